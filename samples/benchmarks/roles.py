"""Prefill in one process and decode in another: tokens, bytes on the wire, and deaths.

    python samples/benchmarks/roles.py --output docs/benchmarks/roles.md
    python samples/benchmarks/roles.py --model tiny --kills 50 --output docs/benchmarks/roles.md

First the same requests, greedy and seeded, of one engine and of two. Then requests one after
another, while one of the two processes gets SIGKILL at a random moment of each, in turn, and is
started again; a request that the decode process took along is asked once more. Exits with 1 where
an answer differs, or bytes exceed the pages' by more than 5 %. `tiny` is a Llama with random
weights. Processes are forked from this one, which has imported all there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers
from pages import markdown_table, write_section

from triptych import compose
from triptych.core.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    PipelineOptions,
    ScheduleOptions,
    ServerOptions,
)
from triptych.core.options.pipeline import DECODE, PREFILL, WHOLE
from triptych.core.options.table import add_options, resolve_with_sources
from triptych.core.sampling_params import SamplingParams
from triptych.core.tokens import TokenRequest
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.engine import fallback, loader  # noqa: F401 (before the forks)
from triptych.modalities.registry import resolve_models
from triptych.schedulers.local import LocalClient

START_S = 600.0
_ids = count()


@dataclass(kw_only=True)
class Setup:
    """The model, and where the two processes meet."""

    model: ResolvedModel
    folder: Path
    address: str
    chunk: int

    def config(self, role: str) -> Config:
        """Of an engine of a role, on one thread."""
        has_role = role != WHOLE
        return Config(
            models=ModelOptions(model=(self.model.reference,)),
            device=DeviceOptions(device="cpu", threads=1),
            cache=CacheOptions(kv_cache_memory_mb=512),
            schedule=ScheduleOptions(max_batch_size=4, max_batch_input_tokens=self.chunk),
            server=ServerOptions(stream_timeout_s=math.inf),
            pipeline=PipelineOptions(
                pipeline_role=role,
                prefill_address=(self.address,) if has_role else (),
                pipeline_key_file=str(self.folder / "key") if has_role else "",
                prefill_timeout_s=60.0,
            ),
        )


@dataclass(kw_only=True)
class Engine:
    """A process with an engine, and the line to it."""

    setup: Setup
    role: str
    pid: int = 0
    line: socket.socket = field(default_factory=socket.socket)

    def start(self) -> None:
        """Fork; returns at once."""
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            os._exit(_child(self.setup, self.role, theirs))
        theirs.close()
        self.line = ours

    def wait_ready(self) -> None:
        """Until it says so."""
        self.line.settimeout(START_S)
        if self.line.recv(1) != b"r":
            raise RuntimeError(f"the {self.role} process did not start")

    def ask(self, request: Mapping[str, Any], timeout_s: float = START_S) -> dict[str, Any] | None:
        """What it says; none where it died. Raises `TimeoutError`."""
        with suppress(ConnectionError):
            self.line.sendall(json.dumps(request).encode() + b"\n")
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = START_S) -> dict[str, Any] | None:
        """The rest of what it says."""
        self.line.settimeout(timeout_s)
        found = b""
        with suppress(ConnectionError):
            while not found.endswith(b"\n"):
                more = self.line.recv(65536)
                if not more:
                    return None
                found += more
            answer: dict[str, Any] = json.loads(found)
            return answer
        return None

    def series(self, name: str) -> float:
        """A figure of the engine's."""
        answer = self.ask({"series": name}) or {}
        return float(answer["value"])

    def wait_for(self, name: str, least: float) -> float:
        """A figure, once it is so high."""
        while (value := self.series(name)) < least:
            time.sleep(0.1)
        return value

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.line.close()


def _child(setup: Setup, role: str, line: socket.socket) -> int:
    torch.set_num_threads(1)
    try:
        asyncio.run(_serve(setup, role, line))
    except (ConnectionError, KeyboardInterrupt):
        return 1
    return 0


async def _serve(setup: Setup, role: str, line: socket.socket) -> None:
    """Answer what comes on the line until it ends."""
    client = LocalClient(compose.build_engine(setup.config(role), [setup.model]))
    await client.load(setup.model.name)
    reader, writer = await asyncio.open_connection(sock=line)
    writer.write(b"r")
    while raw := await reader.readline():
        asked = json.loads(raw)
        if "series" in asked:
            await asyncio.sleep(0.6)  # a heartbeat
            beat = client.status().last_beat
            key = f'triptych_{asked["series"]}{{model="{setup.model.name}"}}'
            values = {**beat.gauges, **beat.counters} if beat is not None else {}
            answer: dict[str, Any] = {"value": values.get(key, 0)}
        else:
            answer = await _complete(client, setup.model.name, asked)
        writer.write(json.dumps(answer).encode() + b"\n")


async def _complete(client: LocalClient, model: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    sampling = SamplingParams(**asked["sampling"])
    request = TokenRequest(prompt_ids=tuple(asked["prompt"]), sampling=sampling)
    ids: list[int] = []
    async for output in client.submit(model, request, job_id=f"job-{next(_ids)}"):
        ids += output.payload.token_ids
    return {"ids": ids}


def asked_of(rng: random.Random, num: int, length: int, num_tokens: int) -> dict[str, Any]:
    """A request with a prompt that nobody had before; every other is drawn with a seed."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": num_tokens}
    if num % 2:
        sampling |= {"temperature": 0.8, "top_p": 0.95, "seed": num}
    return {"prompt": [rng.randrange(20, 250) for _ in range(length)], "sampling": sampling}


@contextmanager
def running(setup: Setup, *roles: str) -> Iterator[list[Engine]]:
    """Processes of these roles that are ready."""
    engines: list[Engine] = []
    try:
        for role in roles:
            engine = Engine(setup=setup, role=role)
            engine.start()
            engines.append(engine)
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def expected(setup: Setup, asked: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The answers of one engine that does both."""
    with running(setup, WHOLE) as (whole,):
        return [(whole.ask(each) or {})["ids"] for each in asked]


def compare(setup: Setup, asked: Sequence[Mapping[str, Any]]) -> tuple[list[list[str]], bool]:
    """Answers of two engines beside one's, and what crossed; whether that is as it should be."""
    want = expected(setup, asked)
    with running(setup, PREFILL, DECODE) as (prefill, decode):
        decode.wait_for("page_links", 1)
        got = [(decode.ask(each) or {})["ids"] for each in asked]
        num_pages, num_bytes = (
            decode.series(f"page{name}_total") for name in ("s_received", "_received_bytes")
        )
        sent_bytes = prefill.series("page_sent_bytes_total")
        fallbacks = decode.series("page_fallbacks_total")
        page_bytes = prefill.series("page_bytes")
    num_equal = sum(ours == theirs for ours, theirs in zip(want, got, strict=True))
    overhead = max(num_bytes, sent_bytes) / (num_pages * page_bytes) - 1
    rows = [
        ["answers equal token for token", f"{num_equal} of {len(asked)}"],
        ["prompts that the decode engine computed pages of", f"{fallbacks:g}"],
        ["pages that crossed", f"{num_pages:g} of {page_bytes:g} bytes"],
        ["bytes on the wire above those of pages", f"{100 * overhead:.3f} %"],
    ]
    return rows, num_equal == len(asked) and 0 <= overhead < 0.05 and not fallbacks


def kill(
    setup: Setup, asked: Sequence[Mapping[str, Any]], rng: random.Random
) -> tuple[list[list[str]], bool]:
    """Requests during each of which a process dies; whether all answers are right."""
    want, counts = expected(setup, asked), Counter[str]()
    longest_s = usual_s = first_s = 0.0
    with running(setup, PREFILL, DECODE) as (prefill, decode):
        decode.wait_for("page_links", 1)
        for num, (each, ids) in enumerate(zip(asked, want, strict=True)):
            begun_s = time.monotonic()
            if num == 0:  # none dies: how long it takes
                answer = decode.ask(each)
                first_s = usual_s = time.monotonic() - begun_s
            else:
                victim, num_hit = prefill if num % 2 else decode, counts["hit"]
                answer = _ask_and_kill(decode, victim, each, rng.uniform(0, usual_s), counts)
                usual_s *= 1.1 if counts["hit"] > num_hit else 0.8  # the machine is shared
            counts["right"] += (answer or {}).get("ids") == ids
            longest_s = max(longest_s, time.monotonic() - begun_s)
    num_kills = len(asked) - 1
    rows = [
        ["processes killed", f"{num_kills}: prefill and decode in turn"],
        ["killed during the request", f"{counts['hit']}"],
        ["asked again, since the decode process was gone", f"{counts['again']}"],
        ["answers equal to those of one engine", f"{counts['right']} of {len(asked)}"],
        ["seconds of the first request, without a kill", f"{first_s:.2f}"],
        ["longest request, process starts included", f"{longest_s:.2f}"],
    ]
    return rows, counts["right"] == len(asked)


def _ask_and_kill(
    decode: Engine, victim: Engine, asked: Mapping[str, Any], after_s: float, counts: Counter[str]
) -> dict[str, Any] | None:
    """Ask; kill the victim in between; start it again, and ask again where need be."""
    answer = None
    try:
        answer = decode.ask(asked, after_s)
    except TimeoutError:
        counts["hit"] += 1
    victim.kill()
    victim.start()
    if answer is None and victim is decode:
        counts["again"] += 1
        victim.wait_ready()
        return decode.ask(asked)
    if answer is None:
        answer = decode.answer()
    victim.wait_ready()
    return answer


def tiny_model(folder: Path) -> ResolvedModel:
    """A Llama with random weights."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.08,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return ResolvedModel(name="tiny", reference="tiny", folder=str(folder), digest="00")


def resolved_model(name: str) -> ResolvedModel:
    """A model that `triptych serve` knows by this name."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    resolved = resolve_with_sources(parser.parse_args(["--model", name]))

    class Silent:
        def __getattr__(self, _: str) -> Any:
            return lambda *args, **kwargs: None

    (model,) = resolve_models(resolved, Silent())  # type: ignore[arg-type]
    return model


def main() -> int:
    """Run both parts, and write what they found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--length", type=int, default=330, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a step")
    parser.add_argument("--tcp", action="store_true", help="instead of shared memory")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rng = random.Random(8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "key").write_text("a secret of this benchmark")
        is_tiny = given.model == "tiny"
        setup = Setup(
            model=tiny_model(folder / "model") if is_tiny else resolved_model(given.model),
            folder=folder,
            address=f"127.0.0.1:{_free_port()}" if given.tcp else f"unix:{folder}/pages",
            chunk=given.chunk,
        )
        way = "TCP" if given.tcp else "shared memory"
        if given.kills:
            asked = [asked_of(rng, n, given.length, given.tokens) for n in range(given.kills + 1)]
            title, (rows, is_right) = "Deaths", kill(setup, asked, rng)
        else:
            asked = [asked_of(rng, n, given.length, given.tokens) for n in range(given.requests)]
            title, (rows, is_right) = "Tokens and bytes", compare(setup, asked)
    head = f"{given.model}, {way}, prompts of {given.length} tokens, answers of {given.tokens}"
    table = markdown_table([head, ""], rows)
    print(f"## {title}\n\n{table}")
    if given.output:
        section = f"{title.lower()} {given.model} {way}"
        write_section(given.output, section, f"## {title}: {given.model}, {way}\n\n{table}")
    return 0 if is_right else 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
