"""The cost of constrained answers: the first token and decoding, with and without a grammar.

    python samples/benchmarks/structured.py --output docs/benchmarks
    python samples/benchmarks/structured.py --model FILE.gguf --llama llama-env/bin/python

Three kinds of answers take turns in one process, each turn in a different order, on the same
model, with the same prompts and seeds: free ones; ones by a schema of free strings, in which no
token is forced (only the costs of a grammar); and ones by a schema of long names,
where forced tokens are computed together. A first turn, which compiles, does not count. Medians of
the turns, and of their ratios to the free answer of the same turn; how many tokens were
forced. With `--llama`, an interpreter that has llama-cpp-python, llama.cpp takes its turns between
ours with the same file and schema, one answer at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych import ChatPipeline

NAMES = [f"the_{word}_of_the_thing" for word in ("name", "age", "kind", "size", "price", "colour")]
THING = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 24} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
}
STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 200}
FREE = "free"
KINDS: Mapping[str, Mapping[str, Any]] = {
    FREE: {"ignore_eos": True},
    "strings": {"guided_json": STRINGS},
    "names": {"guided_json": {"type": "array", "items": THING, "minItems": 20}},
}
LLAMA = Path(__file__).with_name("structured_llama.py")


@dataclass(frozen=True)
class Turn:
    """One batch of answers: tokens per second after the first, seconds until it, tokens forced."""

    rate: float
    first_s: float
    forced: float = 0.0


class Asker:
    """Sends requests to one pipeline, on the loop of its service."""

    def __init__(self, chat: ChatPipeline) -> None:
        self._chat = chat

    async def answer(self, index: int, options: Mapping[str, Any]) -> tuple[list[float], int]:
        """The times of the question and of the answer's tokens, and the number of forced ones."""
        moments, num_tokens = [time.perf_counter()], 0
        call, requests = await self._chat._prepare([f"Tell me story number {index}."], options)
        async for delta in self._chat._service.generate(call, requests):
            if delta.token_ids:
                moments.append(time.perf_counter())
                num_tokens += len(delta.token_ids)
        return moments, num_tokens

    async def batch(self, size: int, num_tokens: int, options: Mapping[str, Any]) -> Turn:
        """Concurrent answers, one for each row."""
        given = {"temperature": 1.0, "max_tokens": num_tokens, **options}
        answers = await asyncio.gather(
            *(self.answer(index, {**given, "seed": index}) for index in range(size))
        )
        begun_s = min(moments[1] for moments, _ in answers)
        ended_s = max(moments[-1] for moments, _ in answers)
        first_s = statistics.median(moments[1] - moments[0] for moments, _ in answers)
        total = sum(count for _, count in answers)
        forced = total - sum(len(moments) - 1 for moments, _ in answers)
        return Turn((total - size) / (ended_s - begun_s), first_s, forced / total)


class Llama:
    """llama.cpp in a child process that answers on request."""

    def __init__(self, python: str, model: str, num_threads: int) -> None:
        command = [python, str(LLAMA), model, str(num_threads), json.dumps(STRINGS)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self, kind: str, num_tokens: int) -> Turn:
        """One answer, free or by the schema of strings."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(kind, num_tokens, file=self._child.stdin, flush=True)
        rate, first_s = map(float, self._child.stdout.readline().split())
        return Turn(rate, first_s)

    def close(self) -> None:
        """End the process."""
        self._child.communicate()


def take_turns(kinds: Mapping[str, Callable[[], Turn]], num_turns: int) -> dict[str, list[Turn]]:
    """Turns of each kind without the first; every turn begins with the next kind."""
    names = list(kinds)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for number in range(num_turns + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turn = kinds[name]()
            turns[name] += [turn] if number else []
    return turns


def report(title: str, turns: Mapping[str, Sequence[Turn]], free: str) -> dict[str, Any]:
    """Print medians, and return them with every turn."""
    base = turns[free]
    found: dict[str, Any] = {}
    for name, own in turns.items():
        pairs = list(zip(own, base, strict=True))
        row = {
            "tokens_per_s": statistics.median(turn.rate for turn in own),
            "rate_over_free": statistics.median(turn.rate / other.rate for turn, other in pairs),
            "first_token_ms": 1e3 * statistics.median(turn.first_s for turn in own),
            "first_over_free": statistics.median(
                turn.first_s / other.first_s for turn, other in pairs
            ),
            "forced": statistics.median(turn.forced for turn in own),
        }
        print(
            f"{title} {name:8} {row['tokens_per_s']:7.1f} tok/s ({row['rate_over_free']:.3f}),"
            f" first token {row['first_token_ms']:7.1f} ms ({row['first_over_free']:.3f}),"
            f" {row['forced']:4.0%} forced",
            flush=True,
        )
        found[name] = {**row, "turns": [[turn.rate, turn.first_s] for turn in own]}
    return found


def main() -> None:
    """Measure, print, and write `structured.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="the embedded one without")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--llama", help="an interpreter with llama-cpp-python; needs --model")
    parser.add_argument("--output", type=Path, help="a folder for structured.json")
    args = parser.parse_args()
    found: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.processor()}
    sizes = {"max_length": 1024, "max_batch_size": 32, "threads": args.threads}
    model = [args.model] if args.model else []
    llama = Llama(args.llama, args.model, args.threads) if args.llama else None
    with ChatPipeline.from_pretrained(*model, **sizes) as chat:
        asker, run = Asker(chat), chat._loop.run
        for size in args.batches:

            def ours(options: Mapping[str, Any], size: int = size) -> Turn:
                turn: Turn = run(asker.batch(size, args.tokens, options))
                return turn

            kinds = {kind: lambda given=given: ours(given) for kind, given in KINDS.items()}
            if llama is not None and size == 1:
                for kind in (FREE, "strings"):
                    kinds[f"{kind} in llama.cpp"] = lambda kind=kind: llama.answer(
                        kind, args.tokens
                    )
            turns = take_turns(kinds, args.turns)
            theirs = {name: each for name, each in turns.items() if "llama" in name}
            own = {name: each for name, each in turns.items() if name not in theirs}
            found[f"{size} rows"] = report(f"{size:3} rows,", own, FREE)
            if theirs:
                found["llama.cpp"] = report("  1 row, ", theirs, f"{FREE} in llama.cpp")
    if llama is not None:
        llama.close()
    if args.output:
        text = json.dumps(found, indent=1) + "\n"
        (args.output / "structured.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
