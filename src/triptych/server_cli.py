"""`triptych ps`, `stop` and `explain`: commands about a running server.

Owns their arguments and output. `core.client` finds the server; its routes have the facts.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from triptych.core.client.choice import (
    NONE,
    add_server_options,
    only_server,
    open_server,
    server_address,
)
from triptych.core.client.connection import Connection, is_same_server
from triptych.core.client.records import ServerRecord, running_servers

_POLL_S = 0.2
Report = Mapping[str, Any]


def add_ps_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `triptych ps`."""
    parser.add_argument("--all", action="store_true", help="also models that are not in memory")
    add_server_options(parser, needs_server=True)


def run_ps(args: argparse.Namespace) -> int:
    """List the models that a server has in memory."""
    with open_server(args) as server:
        models = server.get("/v1/engine/models")["models"]
        table = Table("name", "kind", "state", "memory", "idle", box=None, pad_edge=False)
        for model in models:
            if args.all or model["state"] != "unloaded":
                table.add_row(*map(Text, _row(model)))
        console = Console()
        if table.row_count:
            console.print(table)
        held = sum(model["device_bytes"] for model in models)
        console.print(f"{table.row_count} of {len(models)} models, {decimal(held)}, {server.url}")
    return 0


def _row(model: Report) -> tuple[str, ...]:
    state = model["state"]
    if state == "loading" and model["progress"]:
        state = f"loading {model['progress']:.0%}"
    memory = decimal(model["device_bytes"]) if model["device_bytes"] else ""
    is_idle = model["state"] == "ready" and model["idle_s"] > 0
    idle = _duration(model["idle_s"]) if is_idle else ("in use" if state == "ready" else "")
    return model["model"], model["task"], state, memory, idle


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `triptych stop`."""
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help="unload this model; without one, stop the server"
    )
    add_server_options(parser, needs_server=True)


def run_stop(args: argparse.Namespace) -> int:
    """Unload a model of a server, or stop a server; running requests are finished first."""
    if not args.name:
        return _stop_server(_own_record(args))
    with open_server(args) as server:
        model = server.post("/v1/engine/unload", {"model": args.name})
        if _is_held(model):
            waits = f"{model['model']} is unloaded once no request needs it"
            with Console(stderr=True).status(waits):
                model = _unloaded(server, model)
        Console().print(Text(_stopped(model)))
    return 0


def _is_held(model: Report) -> bool:
    return model["state"] in ("ready", "loading")


def _unloaded(server: Connection, before: Report) -> Report:
    """Wait until a model has left memory, and return its last report."""
    while True:
        models: list[Report] = server.get("/v1/engine/models")["models"]
        model = next((each for each in models if each["model"] == before["model"]), None)
        if model is None:
            return {**before, "state": "unloaded"}
        # A request may load it again between two reports: then only the count of loads differs.
        if not _is_held(model) or model["num_loads"] != before["num_loads"]:
            return model
        time.sleep(_POLL_S)


def _stopped(model: Report) -> str:
    """The sentence about a model after `stop`."""
    name = model["model"]
    if _is_held(model):
        return f"{name} was unloaded; a request has loaded it again."
    if model["state"] == "failed":
        return f"{name} is not in memory: its last load failed. The server's log says why."
    return f"{name} is not in memory; the next request loads it."


def _own_record(args: argparse.Namespace) -> ServerRecord:
    """Return the server of this user to stop. Raises `ConfigError` unless there is exactly one."""
    running = running_servers()
    if (address := server_address(args)) not in ("", NONE):
        running = [record for record in running if is_same_server(record.url, address)]
    return only_server(running)


def _stop_server(record: ServerRecord) -> int:
    os.kill(record.pid, signal.SIGTERM)
    with Console(stderr=True).status(f"{record.url} finishes its requests"):
        while record in running_servers():
            time.sleep(_POLL_S)
    Console().print(Text(f"The server at {record.url} has stopped."))
    return 0


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `triptych explain`."""
    parser.add_argument("id", help="the request's id, from X-Request-Id of its response")
    add_server_options(parser, needs_server=True)


def run_explain(args: argparse.Namespace) -> int:
    """Print why a request waited and where its seconds went."""
    with open_server(args) as server:
        report = server.get(f"/v1/engine/explain/{quote(args.id, safe='')}")
    console = Console(highlight=False, soft_wrap=True)
    for line in explained(report):
        console.print(Text(line))
    return 0


def explained(report: Report) -> list[str]:
    """Return the lines that explain a request; fields that are unknown here are listed as well."""
    status = report.get("status")
    state = f"status {status}" if status else "is running"
    lines = [
        f"{report['request_id']}  {report.get('route', '')}  {state},"
        f" {_seconds(report.get('length_s'))}"
    ]
    lines += _further(report, {"request_id", "route", "status", "length_s", "jobs"}, "  ")
    for job in report["jobs"]:
        lines += ["", *_job_lines(job)]
    return lines


def _job_lines(job: Report) -> list[str]:
    title = f"job {job['job_id']}  {job['model']}"
    length = _seconds(job.get("length_s"))
    lines = [f"{title}  {job.get('state', '')} after {length}" if "length_s" in job else title]
    lines += [f"  error: {job['error']}"] if job.get("error") else []
    seconds = {name: each for name, each in (job.get("seconds") or {}).items() if each}
    width = max(map(len, seconds), default=0)
    total = sum(seconds.values())
    for name, each in sorted(seconds.items(), key=lambda item: -item[1]):
        lines.append(f"  {_words(name):{width}}  {_seconds(each):>9}  {each / total:4.0%}")
    shown = {"job_id", "model", "state", "length_s", "error", "seconds", "arrival_s"}
    return lines + _further(job, shown, "  ")


def _further(record: Report, shown: set[str], margin: str) -> list[str]:
    """Return lines for all fields that are not shown otherwise and have a content."""
    lines = []
    for name, value in record.items():
        if name in shown or value in (None, "", [], {}):
            continue
        if isinstance(value, list):
            lines.append(f"{margin}{_words(name)}:")
            lines += [f"{margin}  {_text(each)}" for each in value]
        else:
            lines.append(f"{margin}{_words(name)}: {_text(value, name)}")
    return lines


def _text(value: Any, name: str = "") -> str:
    if isinstance(value, Mapping):
        parts = (f"{_words(each)} {_text(inner, each)}" for each, inner in value.items())
        return ", ".join(parts)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_text, value))
    return _seconds(value) if name.endswith("_s") else str(value)


def _words(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
