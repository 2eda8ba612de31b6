"""Drafts from an answer's own text: equal tokens, and the time they save, next to llama.cpp's.

Asks for edits of code, summaries, records as JSON and other answers, without a network: the texts
are those of Python's own library. Two parts:

- Tokens. Every prompt, greedy, with a seed, with a penalty and under a JSON schema, alone and eight
  at a time, with and without drafts: all tokens have to be those of the prompt alone without
  drafts.
- Speed. Some prompts of each kind, one at a time and together, in turns with and without drafts.
  Given a Python that has llama-cpp-python, also those of llama.cpp with and without its prompt
  look-up, one at a time, on the same file. Prompts are cached before, so that times are those of
  answers. Figures are medians over prompts of the best turn of each, and the least ratio.

    python samples/benchmarks/speculation.py MODEL.gguf
    python samples/benchmarks/speculation.py MODEL.gguf --prompts 0 --llama ~/llama/bin/python
    python samples/benchmarks/speculation.py MODEL.gguf --threads 1 --cpu-time

On a shared machine, `--cpu-time` with one thread counts processor seconds, which exclude waiting.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import difflib
import glob
import inspect
import json
import shutil
import statistics
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from triptych import ChatPipeline

EDITS = (
    "Rename the function to `renamed` and repeat the whole code.",
    "Add type hints to this code and repeat all of it.",
    "Repeat this code with a docstring.",
)
SUMMARIES = (
    "Summarize this text in a few sentences, with its own words.",
    "Repeat this text with its mistakes corrected.",
    "List the main points of this text.",
)
RECORDS = "List all statuses of this text as JSON, with code, name and meaning."
OTHERS = ("Tell a story about {}.", "Explain {} to a child.", "What is unusual about {}?")
MODULES = (textwrap, shutil, statistics, inspect, difflib, ast, glob, bisect)
COMPARED, TIMED = 400, 1200
"""The most characters of a text: short ones where there are many prompts."""
COMPANY = 8
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "seed": 7}
PENALIZED = {**SEEDED, "repetition_penalty": 1.1}
RECORD = {
    "type": "object",
    "properties": {
        "code": {"type": "integer"},
        "name": {"type": "string", "maxLength": 60},
        "meaning": {"type": "string", "maxLength": 120},
    },
    "required": ["code", "name", "meaning"],
    "additionalProperties": False,
}
EXTRACTED = {**GREEDY, "structured_outputs": {"json": {"type": "array", "items": RECORD}}}
Ids = tuple[int, ...]


def functions(size: int) -> Iterator[str]:
    """Functions of Python's library, each as its source of so many characters at most."""
    for module in MODULES:
        for _, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__:
                source = textwrap.dedent(inspect.getsource(function))
                if size // 4 < len(source) <= size:
                    yield source


def records(num: int, size: int) -> list[str]:
    """Texts of so many characters that describe answers of HTTP servers, each others."""
    lines = [
        f"- {each.phrase} is answered with status {each.value}: {each.description or 'no more'}."
        for each in HTTPStatus
    ]
    starts = [7 * n % len(lines) for n in range(num)]
    return ["\n".join(lines[start:] + lines[:start])[:size] for start in starts]


def questions(num: int, size: int) -> dict[str, list[str]]:
    """As many questions of each kind, about texts of so many characters at most."""
    codes, texts = list(functions(size)), [text[:size] for _, text in sorted(topics.items())]
    names = sorted(topics)
    return {
        "edits": [f"{EDITS[n % 3]}\n\n{codes[n % len(codes)]}" for n in range(num)],
        "summaries": [f"{SUMMARIES[n % 3]}\n\n{texts[n % len(texts)]}" for n in range(num)],
        "records": [f"{RECORDS}\n\n{text}" for text in records(num, size)],
        "others": [OTHERS[n % 3].format(f"`{names[n % len(names)]}`") for n in range(num)],
    }


def prompts(chat: ChatPipeline, num: int, size: int) -> dict[str, list[Ids]]:
    """As many prompts of each kind, as the model's template has them."""
    return {
        kind: [chat.encode(chat.render(text), add_special_tokens=False) for text in texts]
        for kind, texts in questions(num, size).items()
    }


def answers(
    chat: ChatPipeline, ids: Sequence[Ids], sampling: Mapping[str, Any], num_at_once: int
) -> list[Ids]:
    """The tokens of each prompt's answer."""
    found: list[Ids] = []
    for first in range(0, len(ids), num_at_once):
        part = [list(each) for each in ids[first : first + num_at_once]]
        found += [reply.samples[0].token_ids for reply in chat.complete(part, **sampling)]
    return found


def compare(plain: ChatPipeline, drafting: ChatPipeline, num: int, max_tokens: int) -> None:
    """Print how many answers differ from those alone and without drafts."""
    by_kind = prompts(plain, -(-num // 4), COMPARED)
    ids = list(
        islice((each for group in zip(*by_kind.values(), strict=True) for each in group), num)
    )
    forms = {**SEEDED, **EXTRACTED, "temperature": 0.8}
    samplings = {"greedy": GREEDY, "seeded": SEEDED, "penalized": PENALIZED, "JSON": forms}
    for name, sampling in samplings.items():
        own = {**sampling, "max_tokens": max_tokens}
        alone = answers(plain, ids, own, 1)
        for what, chat, at_once in (
            ("drafts, alone", drafting, 1),
            ("plain, in company", plain, COMPANY),
            ("drafts, in company", drafting, COMPANY),
        ):
            others = answers(chat, ids, own, at_once)
            num_equal = sum(a == b for a, b in zip(alone, others, strict=True))
            print(f"{name}: {what}: {num_equal} of {len(ids)} answers equal", flush=True)


class Llama:
    """llama.cpp in a child process."""

    def __init__(self, python: str, model: Path, num_threads: int, clock: str) -> None:
        script = Path(__file__).with_name("llama_lookup.py")
        self._child = subprocess.Popen(
            [python, str(script), str(model), str(num_threads), clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def seconds_of(self, ids: Ids, *settings: float) -> tuple[float, int]:
        """The seconds of an answer, and its number of tokens.

        `settings` are the most tokens, the temperature, and whether tokens are drafted.
        """
        assert self._child.stdin is not None
        print(json.dumps((ids, *settings)), file=self._child.stdin, flush=True)
        seconds, num_tokens = json.loads(self._answer())
        return seconds, num_tokens

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()


Way = Callable[[Sequence[Ids], Mapping[str, Any]], float]
"""Answers prompts together, with some sampling, and returns tokens per second."""


def way_of(chat: ChatPipeline, max_tokens: int, clock: Callable[[], float]) -> Way:
    """The speed of this server's answers."""

    def run(ids: Sequence[Ids], sampling: Mapping[str, Any]) -> float:
        answers(chat, ids, {**sampling, "max_tokens": 1}, len(ids))
        started = clock()
        found = answers(chat, ids, {**sampling, "max_tokens": max_tokens}, len(ids))
        return sum(map(len, found)) / (clock() - started)

    return run


def way_of_llama(peer: Llama, max_tokens: int, *, drafts: bool) -> Way:
    """The speed of llama.cpp's answers, one at a time."""

    def run(ids: Sequence[Ids], sampling: Mapping[str, Any]) -> float:
        temperature = sampling["temperature"]
        found = [peer.seconds_of(each, max_tokens, temperature, drafts) for each in ids]
        return sum(num_tokens for _, num_tokens in found) / sum(seconds for seconds, _ in found)

    return run


def measure(
    ways: Mapping[str, Way],
    groups: Sequence[Sequence[Ids]],
    sampling: Mapping[str, Any],
    num_turns: int,
) -> list[dict[str, float]]:
    """The best speed of each way for each group of prompts; all take turns."""
    found = []
    for each in groups:
        turns = [
            {name: way(each, sampling) for name, way in ways.items()} for _ in range(num_turns)
        ]
        found.append({name: max(turn[name] for turn in turns) for name in ways})
    return found


def report(kind: str, found: Sequence[Mapping[str, float]]) -> None:
    """Print medians, and ratios to what the same server does without drafts."""
    parts = [f"{name} {statistics.median(each[name] for each in found):.1f}" for name in found[0]]
    for drafts, plain in (("drafts", "plain"), ("llama look-up", "llama")):
        if drafts in found[0]:
            ratios = sorted(each[drafts] / each[plain] for each in found)
            parts.append(
                f"{drafts}/{plain} {statistics.median(ratios):.2f} (least {ratios[0]:.2f})"
            )
    print(f"{kind}: tokens/s: " + ", ".join(parts), flush=True)


def time_all(ways: Mapping[str, Way], by_kind: Mapping[str, Sequence[Ids]], turns: int) -> None:
    """Measure and report each kind of prompts, one at a time and together."""
    own = {name: ways[name] for name in ("plain", "drafts")}
    for kind, ids in by_kind.items():
        # Greedy stories soon repeat themselves.
        sampling = {"others": SEEDED, "records": EXTRACTED}.get(kind, GREEDY)
        alone = own if kind == "records" else ways  # llama.cpp's answers would have no form
        report(kind, measure(alone, [[each] for each in ids], sampling, turns))
        company = ids[:COMPANY]
        report(f"{kind}, {len(company)} at a time", measure(own, [company], sampling, turns))


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--prompts", type=int, default=200, help="whose tokens are compared")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer that is compared")
    parser.add_argument("--timed", type=int, default=6, help="prompts of each kind that are timed")
    parser.add_argument("--kinds", nargs="*", help="of prompts that are timed, of all without it")
    parser.add_argument("--timed-tokens", type=int, default=200)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as cores")
    parser.add_argument("--llama", default="", help="a Python that has llama-cpp-python")
    parser.add_argument(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const="process_time",
        default="perf_counter",
    )
    args = parser.parse_args()
    shared: dict[str, Any] = {"device": "cpu", "max_length": 2048, "max_batch_size": COMPANY}
    if args.threads:
        shared["threads"] = args.threads
    clock = getattr(time, args.clock)
    with (
        ChatPipeline.from_pretrained(str(args.model), **shared) as plain,
        ChatPipeline.from_pretrained(
            str(args.model), speculative_algorithm="ngram", **shared
        ) as drafting,
    ):
        if args.prompts:
            compare(plain, drafting, args.prompts, args.tokens)
        ways = {
            "plain": way_of(plain, args.timed_tokens, clock),
            "drafts": way_of(drafting, args.timed_tokens, clock),
        }
        peer = None
        if args.llama:
            peer = Llama(args.llama, args.model, args.threads or 2, args.clock)
            ways["llama"] = way_of_llama(peer, args.timed_tokens, drafts=False)
            ways["llama look-up"] = way_of_llama(peer, args.timed_tokens, drafts=True)
        if args.timed:
            by_kind = prompts(plain, args.timed, TIMED)
            time_all(ways, {kind: by_kind[kind] for kind in args.kinds or by_kind}, args.turns)
        if peer is not None:
            peer.close()


if __name__ == "__main__":
    main()
