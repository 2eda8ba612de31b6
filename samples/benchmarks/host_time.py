"""The processor's time of a decode step outside of the model, by part.

Runs the engine as a server does, with a socket between the loop and its client, on a decoder of one
tiny layer: scheduling, transport and reading are those of a large model. Counts the processor's
time of each thread, not the time on a clock, so that other work on the machine matters less; the
least of several turns counts.

| part | thread, and what it does |
|---|---|
| loop | plans, books and commits steps |
| launch | turns a plan into device work, without the model and the sampler |
| sample | the sampler's part of the launch |
| collect | waits for a step and makes its results |
| socket | encodes outputs in the engine's process |
| client | decodes outputs in the API process, and the readers of all streams |

    python samples/benchmarks/host_time.py
    python samples/benchmarks/host_time.py --rows 1 256 --turns 3
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import torch

from triptych.compose import build_codec
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.pages import PagePool
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ScheduleOptions
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.engine.token_runner import TokenRunner
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import AttentionConfig, KvCache
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.rotary import RopeConfig
from triptych.core.runtime.sampling.sampler import Sampler
from triptych.core.transport.endpoint import private_folder
from triptych.core.transport.engine_server import EngineServer
from triptych.core.transport.remote import RemoteClient
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.tokens.scheduler import TokenScheduler

CPU = torch.device("cpu")
MODEL, PAGE_SIZE, MAX_LENGTH, PROMPT, WARM_UP = "tiny", 32, 2048, 64, 40
SHAPE = DecoderConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    norm_eps=1e-5,
    attention=(AttentionConfig(hidden_size=64, num_heads=1, num_kv_heads=1, head_dim=64),),
    rope=RopeConfig(num_rotated_dims=64, max_length=MAX_LENGTH, trained_length=MAX_LENGTH),
    has_tied_embeddings=True,
)
THREADS = {
    "triptych-engine": "loop",
    "triptych-device": "launch",
    "triptych-results": "collect",
    "triptych-socket": "socket",
    "MainThread": "client",
}
PARTS = ("loop", "launch", "sample", "collect", "socket", "client")


class Timed:
    """A call that adds up the processor's time of its thread."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.spent_s = 0.0
        self.num_calls = 0

    def __call__(self, *args: Any) -> Any:
        """Make the call."""
        started_s = time.thread_time()
        try:
            return self._call(*args)
        finally:
            self.spent_s += time.thread_time() - started_s
            self.num_calls += 1


class TinyLoader:
    """Loads the tiny model (`triptych.schedulers.base.ModelLoader`)."""

    name = MODEL

    def __init__(self, options: ScheduleOptions, folder: Path) -> None:
        num_rows = options.max_batch_size
        native = NativeKernels.open("native", folder)
        decoder = Decoder(SHAPE, dtype=torch.float32, device=CPU)
        for parameter in (decoder.head.weight_OI, *(x.weight_OI for x in decoder.linears())):
            parameter.normal_(std=0.02)
        for norm in (decoder.norm, decoder.layers[0].input_norm, decoder.layers[0].mlp_norm):
            norm.weight_C.fill_(1)
        decoder.prepare(native)
        num_pages = num_rows * MAX_LENGTH // PAGE_SIZE
        kv = KvCache(SHAPE.kv_layout(PAGE_SIZE, torch.float32), num_pages + 1, CPU, native)
        sampler = Sampler(vocab_size=512, max_batch_size=num_rows, device=CPU, native=native)
        head = TextHead(decoder, sampler, max_batch_size=num_rows, device=CPU)
        self.forward, self.sample = Timed(head.forward), Timed(head.sample)
        head.forward, head.sample = self.forward, self.sample  # type: ignore[method-assign]
        self._runner = TokenRunner(
            head, kv, max_batch_size=num_rows, max_length=MAX_LENGTH, device=CPU
        )
        self._scheduler = TokenScheduler(
            model=MODEL,
            pool=PagePool(num_pages=num_pages, page_size=PAGE_SIZE),
            options=options,
            max_length=MAX_LENGTH,
            namespace=b"tiny",
        )

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Return the model, which is in memory already."""
        return LoadedModel(
            name=MODEL, scheduler=self._scheduler, runner=self._runner, close=self._runner.close
        )

    def check_size(self) -> None:
        """Accept: the model is in memory."""


def thread_seconds() -> dict[str, float]:
    """The processor's time of each part's thread so far."""
    clocks = {
        THREADS[thread.name]: time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name in THREADS and thread.ident is not None
    }
    return {part: time.clock_gettime(clock) for part, clock in clocks.items()}


class Readers:
    """Reads all streams, and notes the times of threads at two numbers of outputs."""

    def __init__(self, loader: TinyLoader, first: int, last: int) -> None:
        self._loader = loader
        self._moments = {first, last}
        self._num_outputs = 0
        self.notes: list[tuple[dict[str, float], int]] = []

    async def read(self, stream: Any) -> None:
        """Read one stream to its end."""
        async for _ in stream:
            self._num_outputs += 1
            if self._num_outputs in self._moments:
                sampled, computed = self._loader.sample, self._loader.forward
                times = thread_seconds() | {"sample": sampled.spent_s, "model": computed.spent_s}
                self.notes.append((times, sampled.num_calls))

    def microseconds(self) -> dict[str, float]:
        """Microseconds of each part in a step."""
        (before, first), (after, last) = self.notes
        spent = {part: (after[part] - before[part]) / (last - first) * 1e6 for part in before}
        spent["launch"] -= spent["sample"] + spent["model"]
        return {part: spent[part] for part in PARTS}


@contextmanager
def running(engine: EngineCore, folder: Path) -> Iterator[None]:
    """Run the engine on a thread, connected to the socket in `folder`."""
    server = EngineServer(engine, folder, build_codec())
    engine.on_beat = server.send_beat
    thread = threading.Thread(target=engine.run, name="triptych-engine")
    thread.start()
    try:
        yield
    finally:
        engine.stop()
        thread.join()
        server.close(is_drained=True)


async def measure(num_rows: int, num_steps: int, folder: Path) -> dict[str, float]:
    """Microseconds of each part in a decode step of `num_rows`."""
    options = ScheduleOptions(
        max_batch_size=num_rows, max_batch_input_tokens=max(1024, 8 * num_rows)
    )
    loader = TinyLoader(options, folder)
    engine = EngineCore([loader], config=Config(schedule=options), ledger=Ledger(0))
    sampling = SamplingParams(max_tokens=WARM_UP + num_steps + 40, temperature=0.8, seed=1)
    readers = Readers(loader, WARM_UP * num_rows, (WARM_UP + num_steps) * num_rows)
    client = RemoteClient(folder, build_codec(), stream_timeout_s=60)
    with running(engine, folder):
        while not client.status().is_ready:  # noqa: ASYNC110 (the client has no event)
            await asyncio.sleep(0.01)
        requests = [
            TokenRequest(prompt_ids=(row % 512,) + (1,) * (PROMPT - 1), sampling=sampling)
            for row in range(num_rows)
        ]
        streams = [
            client.submit(MODEL, request, job_id=f"job-{row:08d}")
            for row, request in enumerate(requests)
        ]
        await asyncio.gather(*map(readers.read, streams))
        await client.close()
    return readers.microseconds()


def least(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The turn with the least sum."""
    return dict(min(turns, key=lambda turn: sum(turn.values())))


def print_table(rows: Sequence[int], num_steps: int, num_turns: int) -> None:
    """Print a line for each number of rows."""
    print(f"| rows | {' | '.join(PARTS)} | sum |\n|{'---|' * (len(PARTS) + 2)}")
    for num_rows in rows:
        turns = []
        for _ in range(num_turns):
            with private_folder("", role="benchmark") as folder:
                turns.append(asyncio.run(measure(num_rows, num_steps, folder)))
        best = least(turns)
        values = " | ".join(f"{best[part]:.0f}" for part in PARTS)
        print(f"| {num_rows} | {values} | {sum(best.values()):.0f} |", flush=True)


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_table(options.rows, options.steps, options.turns)


if __name__ == "__main__":
    main()
