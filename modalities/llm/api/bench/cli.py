"""`triptych bench`: its flags, and the order of measurements.

With several `--url`, all servers are measured in each repeat, one after another, so that drift of
the machine affects all of them; ratios to the first are computed per repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.text import Text

from triptych.core.errors import ConfigError
from triptych.core.process.typed import decode_json
from triptych.modalities.llm.api.bench.client import (
    BenchServer,
    find_model,
    measure,
    negotiate,
    tokens_per_word,
)
from triptych.modalities.llm.api.bench.load import (
    WORDS,
    Run,
    Send,
    Workload,
    closed_loop,
    open_loop,
)
from triptych.modalities.llm.api.bench.report import (
    Result,
    document,
    failures,
    require_matplotlib,
    save_plot,
    table,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `triptych bench`."""
    server = parser.add_argument_group("servers")
    server.add_argument(
        "--url",
        action="append",
        help="server to measure; repeat to compare [default http://127.0.0.1:8000]",
    )
    server.add_argument("--label", action="append", help="name of each server in the report")
    server.add_argument("--model", action="append", help="model of each server [its first]")
    server.add_argument("--api-key", help="sent as bearer token")
    server.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    server.add_argument(
        "--extra-body", action="append", metavar="JSON", help="fields to add, for each server"
    )
    _add_workload(parser.add_argument_group("workload"))
    report = parser.add_argument_group("report")
    report.add_argument("--output", type=Path, metavar="FILE", help="write everything as JSON")
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG")


def _add_workload(group: argparse._ArgumentGroup) -> None:
    load = group.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=_positive, help="requests in flight [default 1]")
    load.add_argument("--rate", type=float, help="requests per second, at random (Poisson) times")
    defaults = {
        "num-requests": (32, "requests per repeat"),
        "prompt-tokens": (256, "length of each prompt, without its chat template"),
        "output-tokens": (64, "length of each answer; end of text is ignored where possible"),
        "repeats": (3, "how often everything is measured"),
    }
    for name, (default, text) in defaults.items():
        group.add_argument(
            f"--{name}", type=_positive, default=default, help=f"{text} [default {default}]"
        )
    group.add_argument(
        "--shared-prefix-tokens",
        type=int,
        default=0,
        help="part of each prompt that is the same in all of them [default 0]",
    )
    group.add_argument(
        "--warmup", type=int, default=2, help="unmeasured requests before [default 2]"
    )
    group.add_argument("--timeout-s", type=float, default=600.0, help="for one request [600]")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals [default 0]")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. 1 if a request failed."""
    if args.plot:
        require_matplotlib()
    for flag, path in (("--output", args.output), ("--plot", args.plot)):
        # Better now than after measuring for an hour.
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise ConfigError(f"{flag} {path}: no file can be written there.")
    workload = _workload(args)
    results = asyncio.run(_measure_all(args, workload))
    console = Console()
    console.print(table(results))
    failed = failures(results)
    for line in failed:
        console.print(Text(line, style="red"))
    load = f"rate {args.rate:g}/s" if args.rate else f"concurrency {args.concurrency or 1}"
    if args.output:
        content = msgspec.json.encode(document(results, workload, load))
        args.output.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
    if args.plot:
        save_plot(results, args.plot)
    return 1 if failed else 0


def _workload(args: argparse.Namespace) -> Workload:
    if args.rate is not None and not args.rate > 0:
        raise ConfigError("--rate must be above 0.")
    if not 0 <= args.shared_prefix_tokens < args.prompt_tokens:
        raise ConfigError("--shared-prefix-tokens must be less than --prompt-tokens.")
    if args.warmup < 0 or not args.timeout_s > 0:
        raise ConfigError("--warmup must be at least 0, --timeout-s above 0.")
    fields = [field.name for field in dataclasses.fields(Workload)]
    return Workload(**{name: getattr(args, name) for name in fields})


async def _measure_all(args: argparse.Namespace, workload: Workload) -> list[Result]:
    async with _open_client(args) as client:
        targets = [
            await negotiate(
                client,
                dataclasses.replace(
                    target, model=target.model or await find_model(client, target.base_url)
                ),
            )
            for target in _targets(args)
        ]
        density = await tokens_per_word(client, targets[0], " ".join(WORDS)) or 1.0
        for target in targets:
            prompts = workload.prompts(repeat=-1, tokens_per_word=density)
            send = partial(measure, client, target, max_tokens=args.output_tokens)
            await closed_loop(send, prompts[: args.warmup], concurrency=args.concurrency or 1)
        runs: dict[str, list[Run]] = {target.label: [] for target in targets}
        for repeat in range(args.repeats):
            prompts = workload.prompts(repeat=repeat, tokens_per_word=density)
            # Alternate the order of servers.
            for target in targets if repeat % 2 == 0 else reversed(targets):
                send = partial(measure, client, target, max_tokens=args.output_tokens)
                with Console(stderr=True).status(f"{target.label}: {repeat + 1}/{args.repeats}"):
                    runs[target.label].append(await _apply_load(args, send, prompts))
    return [Result(target=target, runs=tuple(runs[target.label])) for target in targets]


def _open_client(args: argparse.Namespace) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        headers={"authorization": f"Bearer {args.api_key}"} if args.api_key else {},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=args.timeout_s,
        mounts={"all://127.0.0.1": None, "all://localhost": None},  # never through a proxy
    )


async def _apply_load(args: argparse.Namespace, send: Send, prompts: Sequence[str]) -> Run:
    if args.rate:
        return await open_loop(send, prompts, rate=args.rate, seed=args.seed)
    return await closed_loop(send, prompts, concurrency=args.concurrency or 1)


def _targets(args: argparse.Namespace) -> list[BenchServer]:
    """The servers to measure, as given."""
    urls = [url.rstrip("/").removesuffix("/v1") for url in args.url or ["http://127.0.0.1:8000"]]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: begin it with http:// or https://.")
    count = len(urls)
    labels = _each(args.label, "--label", [f"server {number + 1}" for number in range(count)])
    if len(set(labels)) < count:
        raise ConfigError("give each server its own --label.")
    models = _each(args.model, "--model", [""] * count)
    bodies = map(_read_body, _each(args.extra_body, "--extra-body", ["{}"] * count))
    return [
        BenchServer(label=label, base_url=url, model=model, endpoint=args.endpoint, body=body)
        for url, label, model, body in zip(urls, labels, models, bodies, strict=True)
    ]


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
