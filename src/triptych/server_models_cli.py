"""`triptych models` about the models of a running server.

Owns the output of these actions; `triptych.models_cli` has their arguments, and the server's routes
do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from triptych.core.client.connection import Connection
from triptych.core.errors import ConfigError
from triptych.core.weights.progress import Action, RichProgress


def run(server: Connection, action: str, names: Sequence[str], revision: str) -> int:
    """Run an action on a server. Raises the server's errors, and `ConfigError` without names."""
    if action == "list":
        _list(server, names)
        return 0
    if not names:
        raise ConfigError(f"Name the models to {action}.")
    for name in names:
        if action == "fetch":
            _fetch(server, name, revision)
        else:
            _SIMPLE[action](server, name)
    return 0


def _list(server: Connection, names: Sequence[str]) -> None:
    table = Table("model", "kind", "size", "state", "memory", box=None, pad_edge=False)
    models = server.get("/v1/engine/models")["models"]
    for model in models:
        if not names or model["model"] in names:
            cells = (
                model["model"],
                model["task"],
                decimal(model["weight_bytes"]) if model["weight_bytes"] else "-",
                model["state"],
                decimal(model["device_bytes"]) if model["device_bytes"] else "",
            )
            table.add_row(*map(Text, cells))
    console = Console()
    if table.row_count:
        console.print(table)
    console.print(f"{table.row_count} of {len(models)} models, {server.url}")


def _fetch(server: Connection, reference: str, revision: str) -> None:
    body = {"model": reference} | ({"revision": revision} if revision else {})
    progress = RichProgress()
    progress.begin(reference)
    task: tuple[Action | None, int] = None, 0
    num_bytes = 0
    try:
        for event in server.events("/v1/engine/pull", body):
            if event["type"] == "engine.pull.completed":
                _say(f"{event['model']['id']} is served at {server.url}")
                continue
            action: Action = event["action"]
            if task != (action, event["total_bytes"]):
                task, num_bytes = (action, event["total_bytes"]), 0
                progress.start(action, event["total_bytes"])
            progress.advance(event["num_bytes"] - num_bytes)
            num_bytes = event["num_bytes"]
    finally:
        progress.stop()


def _load(server: Connection, name: str) -> None:
    with Console(stderr=True).status(f"{name} is being loaded"):
        model = server.post("/v1/engine/load", {"model": name})
    _say(f"{model['model']} is in memory ({decimal(model['device_bytes'])})")


def _unload(server: Connection, name: str) -> None:
    model = server.post("/v1/engine/unload", {"model": name})
    _say(f"{model['model']} is unloaded once no request needs it")


def _remove(server: Connection, name: str) -> None:
    with Console(stderr=True).status(f"{name} is deleted once its requests have ended"):
        gone = server.delete(f"/v1/models/{quote(name, safe='')}")
    _say(f"{gone['id']} is served no longer; {_files(gone)}")


def _files(gone: Mapping[str, Any]) -> str:
    deleted = gone["deleted_bytes"]
    return "its files are kept" if deleted is None else f"{decimal(deleted)} are deleted"


def _say(text: str) -> None:
    Console().print(Text(text), soft_wrap=True)


_SIMPLE: dict[str, Callable[[Connection, str], None]] = {
    "load": _load,
    "unload": _unload,
    "remove": _remove,
}
