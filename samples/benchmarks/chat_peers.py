"""Chat on a CPU over HTTP: Triptych against other servers, on the same weights.

    samples/benchmarks/install_peers.sh ~/peers
    python samples/benchmarks/chat_peers.py --peers ~/peers --output docs/benchmarks

Starts the servers of `chat_peers.toml` one after the other, ours first and again last, which shows
drift of the machine. Only one runs at a time. The same client measures all of them:

- one stream
- 8 and 32 concurrent streams
- 16 concurrent requests with a shared prefix, before and after it is cached

Other prompts share no text. Repeats during which other processes used the machine are dropped.
Writes the figures as JSON and a table into `chat_cpu.md`, one for each kind of processor.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import itertools
import json
import math
import os
import shlex
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from chat_cpu import free_port, server, wait_until_ready
from pages import markdown_table, write_section
from processes import watch_neighbours
from rich.console import Console

from triptych.core.bundle.resolve import resolve_all
from triptych.core.options.config import ModelOptions
from triptych.core.process.threads import num_usable_cores
from triptych.core.process.versions import versions
from triptych.core.weights.progress import RichProgress
from triptych.modalities.llm.api.bench.client import (
    BenchServer,
    measure,
    negotiate,
    tokens_per_word,
)
from triptych.modalities.llm.api.bench.load import WORDS, Run, Workload, closed_loop
from triptych.modalities.llm.api.bench.metrics import (
    Metrics,
    Spread,
    over_repeats,
    spread,
    summarize,
)
from triptych.modalities.llm.api.bench.report import machine

HERE = Path(__file__).parent
QUESTION = "What is the capital of France?"
PROCESSORS = {
    ("25", "17"): "Zen 4",
    ("26", "2"): "Zen 5",
    ("26", "17"): "Zen 5",
    ("6", "85"): "Skylake",
    ("6", "106"): "Ice Lake",
    ("6", "143"): "Sapphire Rapids",
    ("6", "173"): "Granite Rapids",
    ("6", "207"): "Emerald Rapids",
}
"""Names of processors by family and model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How to start and query one server: an entry of the file of servers."""

    label: str
    command: str
    ready: str
    model: str
    body: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0

    def filled(self, values: dict[str, str]) -> Peer:
        """A copy with the placeholders of its command, model and environment replaced."""
        quoted = {name: shlex.quote(value) for name, value in values.items()}
        return dataclasses.replace(
            self,
            command=self.command.format(**quoted),
            model=self.model.format(**values),
            environment={name: text.format(**values) for name, text in self.environment.items()},
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """A workload, its concurrency, and which part of its prompts warms a cache."""

    workload: Workload
    concurrency: int
    num_cold: int = 0

    def shrunk(self) -> Scene:
        """A copy with an eighth of the tokens."""
        whole = self.workload
        names = ("prompt_tokens", "output_tokens", "shared_prefix_tokens")
        fewer = {name: getattr(whole, name) // 8 for name in names}
        return dataclasses.replace(self, workload=dataclasses.replace(whole, **fewer))

    def parts(self, repeat: int, density: float) -> dict[str, Sequence[str]]:
        """The prompts to send together, by the name of the part."""
        prompts = self.workload.prompts(repeat=repeat, tokens_per_word=density)
        if not self.num_cold:
            return {"": prompts}
        return {" cold": prompts[: self.num_cold], " warm": prompts[self.num_cold :]}

    def warm_up(self, density: float) -> dict[str, Sequence[str]]:
        """A few prompts for warming up, at the same concurrency."""
        num_prompts = 2 if self.num_cold else self.concurrency
        return {"": self.workload.prompts(repeat=-1, tokens_per_word=density)[:num_prompts]}


SCENES = {
    "one stream": Scene(
        Workload(num_requests=4, prompt_tokens=512, output_tokens=128, seed=1), concurrency=1
    ),
    "8 streams": Scene(
        Workload(num_requests=16, prompt_tokens=256, output_tokens=64, seed=8), concurrency=8
    ),
    "32 streams": Scene(
        Workload(num_requests=32, prompt_tokens=256, output_tokens=64, seed=32), concurrency=32
    ),
    "shared prefix": Scene(
        Workload(
            num_requests=32,
            prompt_tokens=1534,
            output_tokens=32,
            shared_prefix_tokens=1500,
            seed=16,
        ),
        concurrency=16,
        num_cold=16,
    ),
}
# Title, scene, metric of `summarize`, scale, and whether more is better.
COLUMNS = (
    ("first token, ms", "one stream", "ttft_p50_s", 1e3, False),
    ("1 stream, tok/s", "one stream", "decode_tokens_per_s", 1.0, True),
    ("8 streams, tok/s", "8 streams", "output_tokens_per_s", 1.0, True),
    ("first token, s", "8 streams", "ttft_p50_s", 1.0, False),
    ("32 streams, tok/s", "32 streams", "output_tokens_per_s", 1.0, True),
    ("first token, s", "32 streams", "ttft_p50_s", 1.0, False),
    ("prefix cold, s", "shared prefix cold", "elapsed_s", 1.0, False),
    ("prefix warm, s", "shared prefix warm", "elapsed_s", 1.0, False),
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The results of one server; `repeats` has figures by scene, of undisturbed repeats only."""

    label: str
    command: str
    start_s: float = 0.0
    answer: str = ""
    error: str = ""
    num_dropped: int = 0
    repeats: dict[str, list[Metrics]] = field(default_factory=dict)

    def figure(self, scene: str, name: str) -> Spread | None:
        """Median and spread of one metric, if it was measured."""
        values = [metrics[name] for metrics in self.repeats.get(scene, []) if name in metrics]
        return spread(values) if values else None

    def document(self) -> dict[str, Any]:
        """As plain data."""
        medians = {
            scene: {name: asdict(each) for name, each in over_repeats(repeats).items()}
            for scene, repeats in self.repeats.items()
        }
        return {**asdict(self), "over_repeats": medians}


class Client:
    """Measures the running server."""

    def __init__(self, args: argparse.Namespace, peer: Peer, pid: int, http: httpx.AsyncClient):
        self._args = args
        self._http = http
        self._pid = pid
        self._peer = peer

    async def measure(self, url: str, density: float, outcome: Outcome) -> None:
        """Run every scene and add its figures to `outcome`."""
        asked = BenchServer(
            label=self._peer.label, base_url=url, model=self._peer.model, body=self._peer.body
        )
        target = await negotiate(self._http, asked)
        outcome.answer = await self._answer(target)
        for name, scene in self._args.scenes.items():
            await self._send(target, scene, scene.warm_up(density), num_tokens=8)
            await self._repeat_enough(target, name, density, outcome)

    async def _repeat_enough(
        self, target: BenchServer, name: str, density: float, outcome: Outcome
    ) -> None:
        """Repeat as requested, within the time budget; a while longer if no repeat counts."""
        started_s = time.monotonic()
        num_clean = 0
        for repeat in itertools.count():
            parts = self._args.scenes[name].parts(repeat, density)
            num_clean += await self._repeat(target, name, parts, outcome)
            left_s = self._args.budget_s * (1 if num_clean else 3) + started_s - time.monotonic()
            if num_clean == self._args.repeats or left_s < 0:
                return

    async def _repeat(
        self, target: BenchServer, name: str, parts: dict[str, Sequence[str]], outcome: Outcome
    ) -> bool:
        """Measure once; False if it does not count because other processes used the machine."""
        scene = self._args.scenes[name]
        with watch_neighbours(self._pid, os.getpid()) as neighbours:
            runs = await self._send(target, scene, parts, num_tokens=scene.workload.output_tokens)
        if neighbours.num_cores > self._args.max_foreign_cores:
            outcome.num_dropped += 1
            return False
        for part, run in runs.items():
            metrics = figures(run, scene.workload.output_tokens)
            metrics["foreign_cores"] = neighbours.num_cores
            metrics["own_s"] = neighbours.own_s
            outcome.repeats.setdefault(name + part, []).append(metrics)
        return True

    async def _send(
        self, target: BenchServer, scene: Scene, parts: dict[str, Sequence[str]], *, num_tokens: int
    ) -> dict[str, Run]:
        send = functools.partial(measure, self._http, target, max_tokens=num_tokens)
        return {
            name: await closed_loop(send, prompts, concurrency=scene.concurrency)
            for name, prompts in parts.items()
        }

    async def _answer(self, target: BenchServer) -> str:
        """The answer to a question, so that a reader sees that it makes sense."""
        body = target.request(QUESTION, max_tokens=16) | {"stream": False}
        body.pop("stream_options", None)
        reply = await self._http.post(target.base_url + target.path, json=body)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"])


def figures(run: Run, num_tokens: int) -> Metrics:
    """Figures of one run. Raises RuntimeError if the run is not as requested."""
    failed = sorted({sample.error for sample in run.samples if sample.error})
    if failed:
        raise RuntimeError(f"requests failed: {', '.join(failed)}")
    short = min(sample.num_output_tokens for sample in run.samples)
    if short < num_tokens - 1:  # some servers do not count the last
        raise RuntimeError(f"an answer had {short} of {num_tokens} tokens")
    metrics = summarize(run)
    return {**metrics, "decode_tokens_per_s": 1 / metrics["tpot_p50_s"]}


def run_peer(peer: Peer, args: argparse.Namespace, values: dict[str, str]) -> Outcome:
    """Start one server, measure it, stop it. Errors are stored in the outcome."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    filled = peer.filled({**values, "port": str(port)})
    outcome = Outcome(label=peer.label, command=peer.command)
    log = args.logs / f"{peer.label.replace(' ', '_')}.log"
    started_s = time.monotonic()
    try:
        with server(filled.command, log, environment=filled.environment) as process:
            wait_until_ready(url + peer.ready, timeout_s=peer.timeout_s, process=process)
            outcome.start_s = time.monotonic() - started_s
            asyncio.run(measure_peer(args, filled, process.pid, url, outcome))
    except (RuntimeError, httpx.HTTPError, OSError, SystemExit) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def measure_peer(
    args: argparse.Namespace, peer: Peer, pid: int, url: str, outcome: Outcome
) -> None:
    """Measure a running server. Tokens per word are measured once, on ours."""
    # A server may close an idle connection at the moment it is reused.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=args.timeout_s, limits=limits, trust_env=False) as http:
        if not args.tokens_per_word:
            ours = BenchServer(label="", base_url=url, model=peer.model)
            args.tokens_per_word = await tokens_per_word(http, ours, " ".join(WORDS)) or 1.0
        await Client(args, peer, pid, http).measure(url, args.tokens_per_word, outcome)


def table(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: each server, and ours relative to the best peer."""
    ours = outcomes[0].label
    rows = [[each.label, *(cell(each, column) for column in COLUMNS)] for each in outcomes]
    ratios = [ratio(outcomes, column, ours) for column in COLUMNS]
    rows.append([f"**{ours} / best peer**", *ratios])
    return ["server", *(column[0] for column in COLUMNS)], rows


def cell(outcome: Outcome, column: tuple[str, str, str, float, bool]) -> str:
    """Median, minimum and maximum; empty if there is none."""
    _, scene, name, scale, _ = column
    found = outcome.figure(scene, name)
    if found is None:
        return "failed" if outcome.error else "-"
    median, low, high = (f"{scale * value:.3g}" for value in (found.median, found.low, found.high))
    return f"{median} ({low}-{high})" if low != high else median


def ratio(outcomes: Sequence[Outcome], column: tuple[str, str, str, float, bool], ours: str) -> str:
    """Our result relative to the best peer: above 1 is better, for any metric."""
    _, scene, name, _, more_is_better = column
    found = [(each.label == ours, each.figure(scene, name)) for each in outcomes]
    mine = [each.median for is_ours, each in found if is_ours and each]
    theirs = [each.median for is_ours, each in found if not is_ours and each]
    if not mine or not theirs:
        return "-"
    middle = sum(mine) / len(mine)
    return f"**{middle / max(theirs) if more_is_better else min(theirs) / middle:.2f}**"


def processor(found: dict[str, Any]) -> str:
    """The kind of this processor, as a heading."""
    key = (found["cpu_family"], found["cpu_model"])
    return PROCESSORS.get(key, f"{found['cpu']} (family {key[0]}, model {key[1]})")


def write(outcomes: Sequence[Outcome], args: argparse.Namespace) -> None:
    """Write the figures, and the table in the section of this processor."""
    found = machine()
    kind = processor(found)
    name = f"chat_peers_{kind.lower().replace(' ', '_')}"
    document = {
        "machine": found,
        "versions": versions(),
        "max_foreign_cores": str(args.max_foreign_cores),
        "scenes": {title: asdict(scene) for title, scene in args.scenes.items()},
        "servers": [outcome.document() for outcome in outcomes],
    }
    path = args.output / f"{name}.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = args.output / "chat_cpu.md"
    if page.exists():
        write_section(page, name, section(outcomes, found, args))


def section(outcomes: Sequence[Outcome], found: dict[str, Any], args: argparse.Namespace) -> str:
    """The table of this run and its conditions."""
    titles, rows = table(outcomes)
    dropped = sum(outcome.num_dropped for outcome in outcomes)
    failed = [f"{each.label}: {each.error}." for each in outcomes if each.error]
    words = [
        f"{time.strftime('%d %B %Y')}; {found['num_cores']} cores,",
        f"{', '.join(found['instructions'])}.",
        f"Medians, least and greatest of up to {args.repeats} repeats; {dropped} were dropped, in",
        f"which others used more than {args.max_foreign_cores:g} cores.",
        *failed,
    ]
    return f"{markdown_table(titles, rows)}\n\n{' '.join(words)}"


def read_peers(args: argparse.Namespace) -> list[Peer]:
    """The servers to measure, ours first and last."""
    entries = tomllib.loads(args.servers.read_text(encoding="utf-8"))["server"]
    ours, *others = [Peer(**entry) for entry in entries]
    unknown = set(args.only or ()) - {peer.label for peer in others}
    if unknown:
        raise SystemExit(f"--only: {', '.join(sorted(unknown))} is not in {args.servers.name}.")
    return [ours, *(peer for peer in others if not args.only or peer.label in args.only), ours]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, required=True, help="folder of install_peers.sh")
    parser.add_argument("--servers", type=Path, default=HERE / "chat_peers.toml")
    parser.add_argument("--only", action="append", metavar="LABEL", help="peers [all]")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"))
    parser.add_argument("--repeats", type=int, default=3, help="of each workload [3]")
    parser.add_argument("--budget-s", type=float, default=30.0, help="no repeat begins later [30]")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="per request [300]")
    parser.add_argument("--max-foreign-cores", type=float, default=0.1, help="else dropped [0.1]")
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of the tokens, once: to check that all work"
    )
    args = parser.parse_args()
    args.scenes = SCENES
    if args.quick:
        args.scenes = {name: scene.shrunk() for name, scene in SCENES.items()}
        args.repeats, args.max_foreign_cores = 1, math.inf
    return args


def main() -> int:
    """Measure all servers; 1 if one failed."""
    args = parse()
    args.output.mkdir(parents=True, exist_ok=True)
    args.tokens_per_word = 0.0
    (model,) = resolve_all(ModelOptions(), RichProgress())
    cores = sorted(os.sched_getaffinity(0))
    values = {
        "python": sys.executable,
        "here": str(HERE),
        "peers": str(args.peers.resolve()),
        "folder": str(model.folder),
        "model": model.name,
        "num_cores": str(num_usable_cores()),
        "cores": ",".join(map(str, cores)),
    }
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        args.logs = Path(folder)
        for peer in read_peers(args):
            outcomes.append(run_peer(peer, args, values))
            last = outcomes[-1]
            if last.error:
                log = (args.logs / f"{peer.label.replace(' ', '_')}.log").read_text(
                    errors="replace"
                )
                print(f"{peer.label}: {last.error}\n{log[-2000:]}", file=sys.stderr)
            Console(width=180).print(markdown_table(*table(outcomes)), last.answer, sep="\n")
            write(outcomes, args)
    return 1 if any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
