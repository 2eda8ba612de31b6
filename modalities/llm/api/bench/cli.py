"""`triptych bench`: its flags, and the order of measurements.

With several `--url`, all servers are measured in each repeat, one after another, so that drift of
the machine affects all of them; ratios to the first are computed per repeat. With several loads
(`--rate 1,2,4`), each is measured as a whole before the next.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.text import Text

from triptych.core.errors import ConfigError
from triptych.core.process.cli_io import count_bar
from triptych.core.process.typed import decode_json
from triptych.modalities.llm.api.bench.client import (
    BenchServer,
    RequestRecord,
    find_model,
    measure,
    negotiate,
    tokens_per_word,
)
from triptych.modalities.llm.api.bench.dataset import Ask, choose, read_dataset
from triptych.modalities.llm.api.bench.load import (
    WORDS,
    Load,
    Run,
    Workload,
    closed_loop,
    open_loop,
)
from triptych.modalities.llm.api.bench.metrics import Goodput
from triptych.modalities.llm.api.bench.report import (
    Result,
    document,
    failures,
    require_matplotlib,
    save_plot,
    sweep_table,
    table,
)

_SYNTHETIC = {"prompt_tokens": 256, "shared_prefix_tokens": 0}
"""The options of made-up prompts, with their defaults."""
_PRIVATE = frozenset({"keys", "url", "output", "plot"})
Prompts = Callable[[int], list[Ask]]
"""Returns the prompts of a repeat."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `triptych bench`."""
    server = parser.add_argument_group("servers")
    server.add_argument(
        "--url",
        action="append",
        help="server to measure; repeat to compare [default http://127.0.0.1:8000]",
    )
    server.add_argument(
        "--label", action="append", help="name of each server in the report [its model or address]"
    )
    server.add_argument(
        "--model", dest="models", action="append", help="model of each server [its first]"
    )
    server.add_argument(
        "--api-key",
        dest="keys",
        metavar="KEY",
        action="append",
        help="sent as bearer token; with several hosts, one for each --url ('' for none)",
    )
    server.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    server.add_argument(
        "--extra-body", action="append", metavar="JSON", help="fields to add, for each server"
    )
    _add_load(parser.add_argument_group("load"))
    _add_prompts(parser.add_argument_group("prompts"))
    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests within these limits, as in ttft:500 itl:50; also tpot and e2e (itl is"
        " a request's longest gap)",
    )
    report.add_argument("--output", type=Path, metavar="FILE", help="write everything as JSON")
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG, of one load")


def _add_load(group: argparse._ArgumentGroup) -> None:
    load = group.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_counts,
        metavar="N[,N...]",
        help="requests in flight; several are measured one after another [default 1]",
    )
    load.add_argument(
        "--rate",
        type=_rates,
        metavar="X[,X...]",
        help="requests per second, at random (Poisson) times; several: a sweep",
    )
    for name, (default, text) in {
        "num-requests": (32, "requests per repeat"),
        "repeats": (3, "how often everything is measured"),
    }.items():
        group.add_argument(
            f"--{name}", type=_positive, default=default, help=f"{text} [default {default}]"
        )
    group.add_argument(
        "--warmup", type=int, default=2, help="unmeasured requests before [default 2]"
    )
    group.add_argument("--timeout-s", type=float, default=600.0, help="for one request [600]")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals [default 0]")


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help='JSON Lines with "prompt" or "messages" (and "max_tokens"), or the JSON of ShareGPT;'
        " rows are chosen at random",
    )
    group.add_argument(
        "--prompt-tokens",
        type=_positive,
        help="length of each made-up prompt, without its chat template [default 256]",
    )
    group.add_argument(
        "--shared-prefix-tokens",
        type=int,
        help="part of each made-up prompt that is the same in all of them [default 0]",
    )
    group.add_argument(
        "--output-tokens",
        type=_positive,
        default=64,
        help="length of each answer; end of text is ignored where possible [default 64]",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers, got {text!r}") from error
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError("must be above 0")
    return rates


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. 1 if a request failed."""
    if args.plot:
        require_matplotlib()
    for flag, path in (("--output", args.output), ("--plot", args.plot)):
        # Better now than after measuring for an hour.
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise ConfigError(f"{flag} {path}: no file can be written there.")
    loads, goodput, workload = _loads(args), Goodput.parse(args.goodput), _workload(args)
    if args.plot and len(loads) > 1:
        raise ConfigError("--plot shows one load: give one --rate or --concurrency.")
    results = asyncio.run(_measure_all(args, workload, loads, goodput))
    console = Console()
    for load in loads:
        console.print(table([each for each in results if each.load == load]))
    if len(loads) > 1:
        console.print(sweep_table(results))
    failed = failures(results)
    for line in failed:
        console.print(Text(line, style="red"))
    if args.output:
        made_up = None if args.dataset else workload
        content = msgspec.json.encode(document(results, made_up, _settings(args)))
        args.output.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
    if args.plot:
        save_plot(results, args.plot)
    return 1 if failed else 0


def _loads(args: argparse.Namespace) -> list[Load]:
    """The loads to measure, in the order given, each once."""
    if args.rate:
        return [Load(rate=rate) for rate in dict.fromkeys(args.rate)]
    return [Load(concurrency=count) for count in dict.fromkeys(args.concurrency or [1])]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options as they were given, without addresses, keys and paths."""
    given = {name: value for name, value in vars(args).items() if name not in _PRIVATE}
    dataset = {"dataset": args.dataset.name if args.dataset else None}
    return {name: value for name, value in {**given, **dataset}.items() if value is not None}


def _workload(args: argparse.Namespace) -> Workload:
    made_up = {name: getattr(args, name) for name in _SYNTHETIC}
    if args.dataset and (given := [name for name, each in made_up.items() if each is not None]):
        raise ConfigError(f"--{given[0].replace('_', '-')} is for made-up prompts, not --dataset.")
    made_up = {name: _SYNTHETIC[name] if each is None else each for name, each in made_up.items()}
    if not 0 <= made_up["shared_prefix_tokens"] < made_up["prompt_tokens"]:
        raise ConfigError("--shared-prefix-tokens must be less than --prompt-tokens.")
    if args.warmup < 0 or not args.timeout_s > 0:
        raise ConfigError("--warmup must be at least 0, --timeout-s above 0.")
    return Workload(
        num_requests=args.num_requests,
        output_tokens=args.output_tokens,
        seed=args.seed,
        **made_up,
    )


async def _measure_all(
    args: argparse.Namespace, workload: Workload, loads: Sequence[Load], goodput: Goodput
) -> list[Result]:
    async with _open_client(args) as client:
        targets = _labelled([await _prepare(client, target) for target in _targets(args)])
        density = await tokens_per_word(client, targets[0], " ".join(WORDS)) or 1.0
        prompts = _prompts(args, workload, density)
        for target in targets:
            send = partial(_send, client, target)
            warmup = prompts(-1)[: args.warmup]
            await closed_loop(send, warmup, concurrency=loads[0].concurrency or 1)
        total = len(loads) * args.repeats * len(targets) * args.num_requests
        results = []
        with count_bar(is_transient=True) as bar:
            task = bar.add_task("measuring", total=total)
            bench = _Bench(client, targets, prompts, args, lambda text: _show(bar, task, text))
            for number, load in enumerate(loads):
                runs = await bench.measure(load, first_repeat=number * args.repeats)
                results += [
                    Result(target=target, load=load, goodput=goodput, runs=tuple(found))
                    for target, found in zip(targets, runs, strict=True)
                ]
    return results


def _show(bar: Progress, task: TaskID, text: str) -> None:
    """Show a new description, or without one the end of a request."""
    if text:
        bar.update(task, description=text)
    else:
        bar.advance(task)


@dataclass(frozen=True, slots=True)
class _Bench:
    """The servers under test and their prompts; `show` reports progress."""

    client: httpx.AsyncClient
    targets: Sequence[BenchServer]
    prompts: Prompts
    args: argparse.Namespace
    show: Callable[[str], None]

    async def measure(self, load: Load, *, first_repeat: int) -> list[list[Run]]:
        """The runs of each target under one load; targets take turns in each repeat."""
        runs: list[list[Run]] = [[] for _ in self.targets]
        for repeat in range(self.args.repeats):
            prompts = self.prompts(first_repeat + repeat)
            order = list(enumerate(self.targets))
            for place, target in order if repeat % 2 == 0 else reversed(order):
                self.show(f"{target.label}, {load}, {repeat + 1}/{self.args.repeats}")
                runs[place].append(await self._apply(load, target, prompts))
        return runs

    async def _apply(self, load: Load, target: BenchServer, prompts: Sequence[Ask]) -> Run:
        async def send(ask: Ask) -> RequestRecord:
            try:
                return await _send(self.client, target, ask)
            finally:
                self.show("")

        if load.rate:
            return await open_loop(send, prompts, rate=load.rate, seed=self.args.seed)
        return await closed_loop(send, prompts, concurrency=load.concurrency)


async def _send(client: httpx.AsyncClient, target: BenchServer, ask: Ask) -> RequestRecord:
    return await measure(client, target, ask.prompt, max_tokens=ask.max_tokens)


def _prompts(args: argparse.Namespace, workload: Workload, density: float) -> Prompts:
    """The prompts of each repeat, from the dataset or made up."""
    if args.dataset is None:

        def make_up(repeat: int) -> list[Ask]:
            texts = workload.prompts(repeat=repeat, tokens_per_word=density)
            return [Ask(text, workload.output_tokens) for text in texts]

        return make_up
    length = workload.output_tokens
    asks = read_dataset(args.dataset, output_tokens=length, tokens_per_word=density)
    if args.endpoint == "completions" and any(not isinstance(ask.prompt, str) for ask in asks):
        raise ConfigError("--endpoint completions takes texts: the dataset has messages.")
    return lambda repeat: choose(asks, workload.num_requests, f"{workload.seed}/{repeat}")


async def _prepare(client: httpx.AsyncClient, target: BenchServer) -> BenchServer:
    """`target` with its model, and the extra fields that it accepts."""
    model = target.model or await find_model(client, target)
    return await negotiate(client, dataclasses.replace(target, model=model))


def _labelled(targets: Sequence[BenchServer]) -> list[BenchServer]:
    """The targets with a label each: the given one, or the model's name, numbered if needed."""
    names = [target.label or Path(target.model).name for target in targets]
    return [
        dataclasses.replace(target, label=name if names.count(name) == 1 else f"{name} ({number})")
        for number, (target, name) in enumerate(zip(targets, names, strict=True), start=1)
    ]


def _open_client(args: argparse.Namespace) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=args.timeout_s,
        mounts={"all://127.0.0.1": None, "all://localhost": None},  # never through a proxy
    )


def _targets(args: argparse.Namespace) -> list[BenchServer]:
    """The servers to measure, as given."""
    urls = [url.rstrip("/").removesuffix("/v1") for url in args.url or ["http://127.0.0.1:8000"]]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: begin it with http:// or https://.")
    count = len(urls)
    labels = _each(args.label, "--label", [""] * count)
    if args.label and len(set(labels)) < count:
        raise ConfigError("give each server its own --label.")
    models = _each(args.models, "--model", [""] * count)
    bodies = map(_read_body, _each(args.extra_body, "--extra-body", ["{}"] * count))
    keys = _keys(args.keys, urls)
    return [
        BenchServer(
            label=label, base_url=url, model=model, endpoint=args.endpoint, body=body, key=key
        )
        for url, label, model, body, key in zip(urls, labels, models, bodies, keys, strict=True)
    ]


def _keys(given: list[str] | None, urls: list[str]) -> list[str]:
    """The API key of each server. One key is not sent to several hosts: it may be secret there."""
    if given and len(given) == 1 and len({urlsplit(url).hostname for url in urls}) > 1:
        raise ConfigError("give --api-key once for each --url ('' for none): the hosts differ.")
    return _each(given, "--api-key", [""] * len(urls))


def _each(given: list[str] | None, flag: str, defaults: list[str]) -> list[str]:
    """One value per server: one given for all, one given for each, or the defaults."""
    if given is None:
        return defaults
    if len(given) == 1:
        return given * len(defaults)
    if len(given) != len(defaults):
        raise ConfigError(f"give {flag} once for each --url, or once for all.")
    return given


def _read_body(text: str) -> dict[str, Any]:
    try:
        return decode_json(text, dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body {text}: expected a JSON object.") from error
