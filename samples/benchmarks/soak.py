"""Soak test: half an hour of mixed traffic, and whether any resource leaks.

    python samples/benchmarks/soak.py --minutes 30 --output docs/benchmarks

Starts `triptych serve` with the embedded models and small caches, which are filled first, so that
later growth is a leak. Simulated users chat (streaming or not, some cancel), send images, listen,
transcribe, embed and generate images, all at random. Every few seconds the script records the
memory of each process, descriptors, threads, pages, jobs and temporary files. The first quarter is
the warm-up. After it the server is idle for a moment, and for a minute at the end; descriptors,
threads and files are compared at those times. For memory, a line is fitted to all samples after the
warm-up. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import numpy as np
from chat_cpu import free_port, server, wait_until_ready
from pages import markdown_table, write_section
from processes import role_of, tree, usage
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from soak_users import CHAT, VISION, Users

from triptych.core.process.versions import versions
from triptych.modalities.llm.api.bench.report import machine

MAX_GROWTH = 0.02
WARM_UP_SHARE = 0.25
REST_S, LAST_REST_S = 15.0, 60.0
FILL_SHARE, MAX_FILLS = 0.95, 60
FILLS = {"look": 240, "embeddings": 1000}
"""Requests that fill the other caches: preprocessed images, and oneDNN's, per number of rows."""
SERVE = (
    "triptych serve --port {port} --log-level warning --kv-cache-memory-mb 192"
    " --max-vision-cache-entries 32 --prepared-images-mb 16 --image-store-mb 16"
)
ROLES = {
    "triptych.engine_process": "engine",
    "triptych.api_process": "api",
    "triptych.core.media.worker": "media",
    "serve": "supervisor",
}
"""The role of each process, by a word of its command line."""
RESTARTS = "triptych_engine_restarts"
MAX_NEW_THREADS = 2  # pools that start threads on demand may have needed one more
AT_REST = ("kv_pages_leased", "jobs_waiting", "jobs_running", "images_running", "units_started")
"""Gauges of the engine that are 0 when it is idle."""
KEPT = {*AT_REST, "engine_restarts_total", "kv_pages_cached", "vision_cache_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A snapshot of the server; `at_s` counts from the end of the preparations."""

    at_s: float
    rss_bytes: dict[str, int]
    pss_bytes: int
    num_descriptors: int
    num_threads: int
    num_processes: int
    temp_bytes: int
    gauges: dict[str, float]

    @property
    def num_open(self) -> float:
        """The gauges that must be 0 at rest."""
        return sum(self.gauges.get(name, 0.0) for name in AT_REST)


@dataclass(slots=True)
class Record:
    """Everything recorded. `rests` are samples at rest: after the warm-up, and at the end."""

    samples: list[Sample] = field(default_factory=list)
    rests: list[Sample] = field(default_factory=list)
    counts: list[Counter[tuple[str, str]]] = field(default_factory=list)
    warm_s: float = 0.0


class Watch:
    """Observes a server from outside."""

    def __init__(self, url: str, pid: int, temp: Path) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)
        self._pid = pid
        self._temp = temp
        self.started_s = time.monotonic()

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    async def gauges(self) -> dict[str, float]:
        """The engine's gauges of `/metrics`, summed over models and per model: `name model`."""
        text = (await self._http.get("/metrics")).raise_for_status().text
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            if family.type == "gauge" or family.name == RESTARTS:
                for sample in family.samples:
                    name = sample.name.removeprefix("triptych_")
                    found[name] += sample.value
                    if "model" in sample.labels:
                        found[f"{name} {sample.labels['model']}"] = sample.value
        return dict(found)

    async def sample(self) -> Sample:
        """A snapshot of the server."""
        gauges = await self.gauges()
        return await asyncio.to_thread(self._look, gauges)

    def _look(self, gauges: dict[str, float]) -> Sample:
        rss: Counter[str] = Counter()
        found = [(role_of(each, ROLES), usage(each)) for each in tree(self._pid)]
        alive = [(role, used) for role, used in found if used is not None]
        for role, used in alive:
            rss[role] += used.rss_bytes
        return Sample(
            at_s=time.monotonic() - self.started_s,
            rss_bytes=dict(rss),
            pss_bytes=sum(used.pss_bytes for _, used in alive),
            num_descriptors=sum(used.num_descriptors for _, used in alive),
            num_threads=sum(used.num_threads for _, used in alive),
            num_processes=len(alive),
            temp_bytes=sum(path.stat().st_size for path in self._temp.rglob("*") if path.is_file()),
            gauges={name: value for name, value in gauges.items() if name in KEPT},
        )


async def fill_caches(users: Users, watch: Watch) -> None:
    """Send unique prompts until caches are about full."""
    for model in (CHAT, VISION):
        for _ in range(MAX_FILLS):
            gauges = await watch.gauges()
            num_cached, num_pages = gauges[f"kv_pages_cached {model}"], gauges[f"kv_pages {model}"]
            if num_cached >= FILL_SHARE * num_pages:
                break
            await users.fill(model, 1000)
    for name, count in FILLS.items():
        await users.repeat(name, count)


async def soak(users: Users, watch: Watch, args: argparse.Namespace) -> Record:
    """The whole soak test, rests included."""
    record = Record()
    is_over, may_act = asyncio.Event(), asyncio.Event()
    may_act.set()
    watch.started_s = time.monotonic()
    everybody = asyncio.gather(*(users.live(is_over, may_act) for _ in range(args.users)))
    seconds = 60 * args.minutes
    await note(record, users, watch, until_s=WARM_UP_SHARE * seconds, every_s=args.every_s)
    may_act.clear()
    record.rests.append(await rest(watch, REST_S))
    record.warm_s = time.monotonic() - watch.started_s
    may_act.set()
    await note(record, users, watch, until_s=seconds, every_s=args.every_s)
    is_over.set()
    await everybody
    record.rests.append(await rest(watch, LAST_REST_S))
    record.counts.append(Counter(users.counts))
    return record


async def note(
    record: Record, users: Users, watch: Watch, *, until_s: float, every_s: float
) -> None:
    """Take samples for a while."""
    while time.monotonic() - watch.started_s < until_s:
        record.samples.append(await watch.sample())
        record.counts.append(Counter(users.counts))
        await asyncio.sleep(every_s)


async def rest(watch: Watch, seconds: float) -> Sample:
    """A snapshot after an idle period, extended while work is still running."""
    await asyncio.sleep(seconds)
    for _ in range(60):
        found = await watch.sample()
        if not found.num_open:
            return found
        await asyncio.sleep(1)
    return found


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    what: str
    found: str
    is_good: bool


def growth(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    """Relative growth of a value along a fitted line."""
    times = np.array([sample.at_s for sample in samples])
    slope, start = np.polyfit(times - times[0], [value(sample) for sample in samples], 1)
    return float(slope * (times[-1] - times[0]) / start)


def judge(record: Record) -> list[Finding]:
    """Results of all checks."""
    steady = [sample for sample in record.samples if sample.at_s >= record.warm_s]
    warm, last = record.rests
    # Of RSS: shared pages count twice, but PSS falls when an unrelated process maps a library.
    findings = [judge_growth("memory of all", steady, lambda each: sum(each.rss_bytes.values()))]
    findings += [
        judge_growth(f"memory of {role}", steady, rss_of(role)) for role in ("engine", "api")
    ]
    for name, most in (("num_descriptors", 0), ("num_threads", MAX_NEW_THREADS), ("temp_bytes", 0)):
        before, after = getattr(warm, name), getattr(last, name)
        title = name.removeprefix("num_").replace("_", " ")
        findings.append(Finding(f"{title} at rest", f"{before} -> {after}", after <= before + most))
    num_restarts = last.gauges.get("engine_restarts_total", 0.0)
    findings.append(Finding("restarts of the engine", f"{num_restarts:.0f}", not num_restarts))
    left = {name: last.gauges.get(name, 0.0) for name in AT_REST if last.gauges.get(name)}
    findings.append(Finding("pages and jobs left", str(left or 0), not left))
    bad = {
        f"{route} {how}": count
        for (route, how), count in record.counts[-1].items()
        if how not in ("ok", "cancelled")
    }
    findings.append(Finding("errors", str(bad or 0), not bad))
    return findings


def rss_of(role: str) -> Callable[[Sample], float]:
    """The memory of one kind of process."""
    return lambda sample: sample.rss_bytes.get(role, 0)


def judge_growth(what: str, samples: Sequence[Sample], value: Callable[[Sample], float]) -> Finding:
    """Whether a line through the samples rises too fast."""
    share = growth(samples, value)
    span_s = samples[-1].at_s - samples[0].at_s
    text = f"{100 * share:+.2f} % in {span_s / 60:.0f} min"
    return Finding(what, text, share <= MAX_GROWTH)


def intervals(record: Record, minutes: float) -> list[list[str]]:
    """A row for each few minutes: medians of samples, and responses in that time."""
    rows = []
    before: Counter[tuple[str, str]] = Counter()
    last_s = record.samples[-1].at_s
    for number in range(int(last_s / 60 / minutes) + 1):
        begin_s, end_s = 60 * minutes * number, 60 * minutes * (number + 1)
        picked = [each for each in record.samples if begin_s <= each.at_s < end_s]
        if not picked:
            continue
        counts = record.counts[record.samples.index(picked[-1])]
        rows.append(
            [f"{begin_s / 60:g}-{min(end_s, last_s) / 60:.3g}", *cells(picked, counts - before)]
        )
        before = counts
    return rows


def cells(samples: Sequence[Sample], counts: Counter[tuple[str, str]]) -> list[str]:
    """The cells of one row."""

    def median(value: Callable[[Sample], float], scale: float = 1.0) -> str:
        return f"{scale * float(np.median([value(sample) for sample in samples])):.0f}"

    mib = 2.0**-20
    by_end = Counter[str]()
    for (_, how), count in counts.items():
        by_end[how if how in ("ok", "cancelled") else "error"] += count
    return [
        *(str(by_end[how]) for how in ("ok", "cancelled", "error")),
        *(median(rss_of(role), mib) for role in ("engine", "api", "media", "supervisor")),
        median(lambda sample: sample.pss_bytes, mib),
        median(lambda sample: sample.num_descriptors),
        median(lambda sample: sample.num_threads),
        median(lambda sample: sample.gauges.get("kv_pages_cached", 0.0)),
        median(lambda sample: sample.gauges.get("vision_cache_bytes", 0.0), mib),
        median(lambda sample: sample.temp_bytes, 2.0**-10),
    ]


TITLES = (
    *("minutes", "answered", "cancelled", "errors"),
    *("engine, MiB", "API, MiB", "media, MiB", "supervisor, MiB", "all (PSS), MiB"),
    *("descriptors", "threads", "pages cached", "features, MiB", "temporary, KiB"),
)


def report(record: Record, minutes: float) -> str:
    """Tables and verdict, as a section of a page."""
    findings = judge(record)
    routes = sorted({route for route, _ in record.counts[-1]})
    ends = sorted({how for _, how in record.counts[-1]})
    counts = record.counts[-1]
    per_route = [[route, *(str(counts[route, how]) for how in ends)] for route in routes]
    found = machine()
    verdict = "good" if all(finding.is_good for finding in findings) else "**bad**"
    return "\n\n".join(
        (
            f"{time.strftime('%d %B %Y')}; {found['num_cores']} cores of {found['cpu']}"
            f" ({', '.join(found['instructions'])}), torch {versions()['torch']}."
            f" Warm-up: the first {record.warm_s / 60:.1f} minutes. Verdict: {verdict}.",
            markdown_table(TITLES, intervals(record, minutes)),
            markdown_table(
                ("judged after the warm-up", "found", "good"),
                [[each.what, each.found, "yes" if each.is_good else "**no**"] for each in findings],
            ),
            markdown_table(("route", *ends), per_route),
        )
    )


async def run(
    url: str, process: subprocess.Popen[bytes], temp: Path, args: argparse.Namespace
) -> Record:
    """Prepare, fill, soak."""
    users, watch = Users(url, args.seed), Watch(url, process.pid, temp)
    try:
        await users.prepare()
        await fill_caches(users, watch)
        users.counts.clear()
        return await soak(users, watch, args)
    finally:
        await users.close()
        await watch.close()


def main() -> int:
    """Soak, print, write; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--users", type=int, default=4, help="concurrent users [4]")
    parser.add_argument("--every-s", type=float, default=5.0, help="between samples [5]")
    parser.add_argument("--rows-of", type=float, default=5.0, help="minutes per row [5]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", default=SERVE, help="the server's command line")
    parser.add_argument("--output", type=Path, help="folder with soak.md, for it and soak.json")
    args = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        temp, log = Path(folder) / "temp", Path(folder) / "log"
        temp.mkdir()
        command = args.serve.format(port=port)
        with server(command, log, environment={"TMPDIR": str(temp)}) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(f"{url}/readyz", process=process)
            record = asyncio.run(run(url, process, temp, args))
        print(log.read_text(errors="replace")[-2000:], file=sys.stderr)
    text = report(record, args.rows_of)
    Console(width=240).print(text)
    if args.output:
        document = json.dumps({"samples": [asdict(each) for each in record.samples]}) + "\n"
        (args.output / "soak.json").write_text(document, encoding="utf-8")
        write_section(args.output / "soak.md", "soak", text)
    return 0 if all(finding.is_good for finding in judge(record)) else 1


if __name__ == "__main__":
    sys.exit(main())
