"""Prefill in one process and decode in another: tokens, bytes on the wire, and deaths.

    python samples/benchmarks/roles.py --output docs/benchmarks/roles.md
    python samples/benchmarks/roles.py --model tiny --kills 50 --output docs/benchmarks/roles.md
    python samples/benchmarks/roles.py --model triptych-vision --output docs/benchmarks/roles.md

For a vision model, one process encodes images and the other does the rest. First the same
requests, greedy and seeded, go to one engine and to two. Then requests are sent one after another,
while one of the two processes gets SIGKILL at a random moment of each, in turn, and is restarted;
a request lost with the answering process is repeated once. Exits with 1 if an answer differs,
or bytes exceed the pages' by more than 5 %. `tiny` is a Llama with random weights. Processes are
forked from this one, which has imported everything.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from pages import markdown_table, write_section
from PIL import Image

from triptych import compose
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.media.fetch import Fetched
from triptych.core.options.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    PipelineOptions,
    ScheduleOptions,
    ServerOptions,
)
from triptych.core.options.pipeline import DECODE, ENCODE, NIXL, PREFILL, SOCKETS, WHOLE
from triptych.core.options.table import add_options, resolve_with_sources
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.multimodal import ImageSource
from triptych.modalities.llm.engine import fallback, loader  # noqa: F401 (before the forks)
from triptych.modalities.registry import resolve_models, role_of
from triptych.modalities.vlm.api.preparation import ImageProcessorCache, InProcessPreparation
from triptych.modalities.vlm.api.prompt_encoder import VisionPromptEncoder
from triptych.modalities.vlm.engine import encoder_loader  # noqa: F401
from triptych.modalities.vlm.modality import VISION
from triptych.modalities.vlm.processing.probe import read_facts
from triptych.schedulers.local import LocalClient

START_S = 600.0
_WAY = "shared memory"
_ids = count()


@dataclass(kw_only=True)
class Setup:
    """The model, and where the two processes meet."""

    model: ResolvedModel
    folder: Path
    address: str
    transport: str
    chunk: int
    sees: bool

    @property
    def roles(self) -> tuple[str, str]:
        """The roles of the helper and of the answering process."""
        return (ENCODE, WHOLE) if self.sees else (PREFILL, DECODE)

    @property
    def prefix(self) -> str:
        """Prefix of the names of series."""
        return "feature_" if self.sees else ""

    def config(self, role: str, *, is_alone: bool = False) -> Config:
        """The configuration of an engine of a role, on one thread."""
        meets = () if is_alone else (self.address,)
        limit = "encoder_timeout_s" if self.sees else "prefill_timeout_s"
        return Config(
            models=ModelOptions(model=(self.model.reference,)),
            device=DeviceOptions(device="cpu", threads=1),
            cache=CacheOptions(kv_cache_memory_mb=512),
            schedule=ScheduleOptions(max_batch_size=4, max_batch_input_tokens=self.chunk),
            server=ServerOptions(stream_timeout_s=math.inf),
            pipeline=PipelineOptions(
                pipeline_role=role,
                prefill_address=() if self.sees else meets,
                encoder_address=meets if self.sees else (),
                pipeline_key_file=str(self.folder / "key") if meets else "",
                pipeline_transport=self.transport if meets else SOCKETS,
                **{limit: 60.0} if meets else {},
            ),
        )


@dataclass(kw_only=True)
class Engine:
    """A process with an engine, and the connection to it."""

    setup: Setup
    role: str
    is_alone: bool = False
    pid: int = 0
    line: socket.socket = field(default_factory=socket.socket)

    def start(self) -> None:
        """Fork; returns at once."""
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            config = self.setup.config(self.role, is_alone=self.is_alone)
            os._exit(_child(self.setup, config, theirs))
        theirs.close()
        self.line = ours

    def wait_ready(self) -> None:
        """Wait until the engine reports that it is ready."""
        self.line.settimeout(START_S)
        if self.line.recv(1) != b"r":
            raise RuntimeError(f"the {self.role} process did not start")

    def ask(self, request: TokenRequest, timeout_s: float = START_S) -> list[int] | None:
        """The token ids of the answer; none if the process died. Raises `TimeoutError`."""
        self._send(base64.b64encode(msgspec.msgpack.encode(request)))
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = START_S) -> Any:
        """The rest of the answer; none if the process died."""
        self.line.settimeout(timeout_s)
        found = b""
        with suppress(ConnectionError):
            while not found.endswith(b"\n"):
                more = self.line.recv(65536)
                if not more:
                    return None
                found += more
            return json.loads(found)
        return None

    def _send(self, line: bytes) -> None:
        with suppress(ConnectionError):
            self.line.sendall(line + b"\n")

    def series(self, name: str) -> float:
        """A metric of the engine."""
        self._send(f"?{name}".encode())
        return float(self.answer() or 0)

    def wait_for(self, name: str, least: float) -> float:
        """Wait until a metric is at least this high; returns it."""
        while (value := self.series(name)) < least:
            time.sleep(0.1)
        return value

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.line.close()


def _child(setup: Setup, config: Config, line: socket.socket) -> int:
    torch.set_num_threads(1)
    try:
        asyncio.run(_serve(setup, config, line))
    except (ConnectionError, KeyboardInterrupt):
        return 1
    return 0


async def _serve(setup: Setup, config: Config, line: socket.socket) -> None:
    """Answer messages on the connection until it ends: names of series, and requests."""
    client = LocalClient(compose.build_engine(config, [setup.model]))
    await client.load(setup.model.name)
    reader, writer = await asyncio.open_connection(sock=line, limit=2**26)
    writer.write(b"r")
    while raw := await reader.readline():
        if raw.startswith(b"?"):
            answer: Any = await _series(client, raw[1:].strip().decode(), setup.model.name)
        else:
            asked = msgspec.msgpack.decode(base64.b64decode(raw), type=TokenRequest)
            answer = await _complete(client, setup.model.name, asked)
        writer.write(json.dumps(answer).encode() + b"\n")


async def _series(client: LocalClient, name: str, model: str) -> float:
    await asyncio.sleep(0.6)  # a heartbeat
    beat = client.status().last_beat
    values = {**beat.gauges, **beat.counters} if beat is not None else {}
    return values.get(f'triptych_{name}{{model="{model}"}}', 0.0)


async def _complete(client: LocalClient, model: str, request: TokenRequest) -> list[int]:
    ids: list[int] = []
    async for output in client.submit(model, request, job_id=f"job-{next(_ids)}"):
        ids += output.payload.token_ids
    return ids


def sampling_of(num: int, num_tokens: int) -> SamplingParams:
    """Every other answer is sampled with a seed."""
    if num % 2:
        return SamplingParams(temperature=0.8, top_p=0.95, seed=num, max_tokens=num_tokens)
    return SamplingParams(temperature=0.0, max_tokens=num_tokens)


def texts(rng: random.Random, num: int, length: int, num_tokens: int) -> list[TokenRequest]:
    """Requests with new prompts."""
    return [
        TokenRequest(
            prompt_ids=tuple(rng.randrange(20, 250) for _ in range(length)),
            sampling=sampling_of(each, num_tokens),
        )
        for each in range(num)
    ]


def chats(
    model: ResolvedModel, rng: random.Random, num: int, num_tokens: int
) -> list[TokenRequest]:
    """Requests with new images."""
    config = Config()
    images = ImageProcessorCache.from_config(InProcessPreparation(model), config)
    facts = read_facts(model.folder)
    encoder = VisionPromptEncoder.open(model, facts, images, config)

    async def encode(each: int) -> TokenRequest:
        file = io.BytesIO()
        Image.frombytes("RGB", (16, 16), rng.randbytes(768)).resize((320, 240)).save(file, "png")
        shown = ImageSource(file=Fetched(file.getvalue(), ""))
        message = {"role": "user", "content": [shown, "What is this?"]}
        request = await encoder.encode_messages([message])
        return msgspec.structs.replace(request, sampling=sampling_of(each, num_tokens))

    async def encode_all() -> list[TokenRequest]:
        return [await encode(each) for each in range(num)]

    return asyncio.run(encode_all())


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """Processes that are ready."""
    started: list[Engine] = []
    try:
        for engine in engines:
            engine.start()
            started.append(engine)
            engine.wait_ready()
        yield
    finally:
        for engine in started:
            engine.kill()


def expected(setup: Setup, asked: Sequence[TokenRequest]) -> list[list[int] | None]:
    """The answers of a single engine."""
    alone = Engine(setup=setup, role=WHOLE, is_alone=True)
    with running(alone):
        return [alone.ask(each) for each in asked]


def compare(setup: Setup, asked: Sequence[TokenRequest]) -> tuple[list[list[str]], bool]:
    """Answers of two engines compared with one's, and the transfers; whether both are right."""
    want, prefix = expected(setup, asked), setup.prefix
    helper, front = (Engine(setup=setup, role=role) for role in setup.roles)
    with running(helper, front):
        front.wait_for(f"{prefix}page_links", 1)
        got = [front.ask(each) for each in asked]
        num_pages, num_bytes = (
            front.series(f"{prefix}page{name}_total") for name in ("s_received", "_received_bytes")
        )
        sent_bytes = helper.series(f"{prefix}page_sent_bytes_total")
        kind = "feature" if setup.sees else "page"
        fallbacks = front.series(f"{kind}_fallbacks_total")
        content_bytes = num_pages * helper.series("page_bytes")
        if setup.sees:
            content_bytes = front.series("vision_cache_bytes")
    num_equal = sum(ours == theirs for ours, theirs in zip(want, got, strict=True))
    overhead = max(num_bytes, sent_bytes) / content_bytes - 1
    what = "images encoded" if setup.sees else "prompts with pages computed"
    rows = [
        ["answers equal token for token", f"{num_equal} of {len(asked)}"],
        [f"{what} by the answering engine", f"{fallbacks:g}"],
        ["pages transferred", f"{num_pages:.0f}, {content_bytes:.0f} bytes"],
        ["further bytes on the wire", f"{100 * overhead:.3f} %"],
    ]
    return rows, num_equal == len(asked) and 0 <= overhead < 0.05 and not fallbacks


def kill(
    setup: Setup, asked: Sequence[TokenRequest], rng: random.Random
) -> tuple[list[list[str]], bool]:
    """Requests during each of which a process dies; whether all answers are right."""
    want, counts = expected(setup, asked), Counter[str]()
    longest_s = usual_s = first_s = 0.0
    helper, front = (Engine(setup=setup, role=role) for role in setup.roles)
    with running(helper, front):
        front.wait_for(f"{setup.prefix}page_links", 1)
        for num, (each, ids) in enumerate(zip(asked, want, strict=True)):
            begun_s = time.monotonic()
            if num == 0:  # none dies: how long it takes
                answer = front.ask(each)
                first_s = usual_s = time.monotonic() - begun_s
            else:
                victim, num_hit = helper if num % 2 else front, counts["hit"]
                answer = _ask_and_kill(front, victim, each, rng.uniform(0, usual_s), counts)
                usual_s *= 1.1 if counts["hit"] > num_hit else 0.8  # the machine is shared
            counts["right"] += answer == ids
            longest_s = max(longest_s, time.monotonic() - begun_s)
    rows = [
        ["processes killed", f"{len(asked) - 1}: {setup.roles[0]} and the other in turn"],
        ["killed during the request", f"{counts['hit']}"],
        ["repeated, since the answering process was killed", f"{counts['again']}"],
        ["answers equal to those of one engine", f"{counts['right']} of {len(asked)}"],
        ["seconds of the first request, without a kill", f"{first_s:.2f}"],
        ["longest request, process starts included", f"{longest_s:.2f}"],
    ]
    return rows, counts["right"] == len(asked)


def _ask_and_kill(
    front: Engine, victim: Engine, asked: TokenRequest, after_s: float, counts: Counter[str]
) -> Any:
    """Ask; kill the victim during the request; restart it, and repeat the request if necessary."""
    answer = None
    try:
        answer = front.ask(asked, after_s)
    except TimeoutError:
        counts["hit"] += 1
    victim.kill()
    victim.start()
    if answer is None and victim is front:
        counts["again"] += 1
        victim.wait_ready()
        return front.ask(asked)
    if answer is None:
        answer = front.answer()
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
    """Run both parts, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--length", type=int, default=330, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a step")
    parser.add_argument("--way", default=_WAY, choices=(_WAY, "TCP", "NIXL"))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rng = random.Random(8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "key").write_text("a secret of this benchmark")
        is_tiny = given.model == "tiny"
        model = tiny_model(folder / "model") if is_tiny else resolved_model(given.model)
        setup = Setup(
            model=model,
            folder=folder,
            address=f"unix:{folder}/pages" if given.way == _WAY else f"127.0.0.1:{_free_port()}",
            transport=NIXL if given.way == "NIXL" else SOCKETS,
            chunk=given.chunk,
            sees=role_of(model) == VISION.role,
        )
        num = given.kills + 1 if given.kills else given.requests
        asked = (
            chats(model, rng, num, given.tokens)
            if setup.sees
            else texts(rng, num, given.length, given.tokens)
        )
        if given.kills:
            title, (rows, is_right) = "Deaths", kill(setup, asked, rng)
        else:
            title, (rows, is_right) = "Tokens and bytes", compare(setup, asked)
    what = "prompts with an image" if setup.sees else f"prompts of {given.length} tokens"
    head = f"{given.model}, {given.way}, {what}, answers of {given.tokens}"
    table = markdown_table([head, ""], rows)
    print(f"## {title}\n\n{table}")
    if given.output:
        section = f"{title.lower()} {given.model} {given.way}"
        write_section(given.output, section, f"## {title}: {given.model}, {given.way}\n\n{table}")
    return 0 if is_right else 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
