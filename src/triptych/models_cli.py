"""`triptych models`: list, fetch, verify and remove the weights on this machine.

Owns the command's arguments, and the output about this machine. `core/weights` stores and verifies
weights; `triptych.server_models_cli` has the actions on a running server.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from triptych.core.client.choice import open_server
from triptych.core.errors import ConfigError, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.options.table import add_options, declared, resolve, resolve_with_sources
from triptych.core.process.lazy import load
from triptych.core.weights.progress import Progress, RichProgress
from triptych.core.weights.resolve import resolve as resolve_model
from triptych.core.weights.resolve import served_name
from triptych.core.weights.store import (
    StoredModel,
    find_model,
    remove,
    stored_models,
    verify_stored,
)
from triptych.modalities.catalog import catalog, role_in
from triptych.modalities.registry import default_models, known_sources

_OF_SERVERS = ("load", "unload")
_OPTIONS = frozenset({"cache_dir", "hf_token", "offline", "revision"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action, its operands, and the options of the weights' location."""
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=(*_ACTIONS, *_OF_SERVERS),
        help="default: list; load and unload are for a running server",
    )
    add_model_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the operands of an action, and the options of the weights' location."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a model as for --model (fetch), or a name, hub id or key from `list`",
    )
    names = {field.name for field in dataclasses.fields(ModelOptions)}
    add_options(parser, sections=("models",), exclude=names - _OPTIONS)
    group = parser.add_argument_group("a running server")
    group.add_argument(
        "--server",
        metavar="URL",
        help="list, fetch or remove its models; load and unload are by default for the one of"
        " yours on this machine",
    )
    group.add_argument("--server-key", metavar="KEY", help="API key of the server, an admin's")


def run(args: argparse.Namespace) -> int:
    """Run the action. Returns 0 if it is done, 1 if a model is damaged."""
    if args.server or args.action in _OF_SERVERS:
        return _run_on_server(args)
    return _ACTIONS[args.action](args.models, resolve(args).models)


def _run_on_server(args: argparse.Namespace) -> int:
    """Run the action on a server. Raises `ConfigError` for what is of this machine alone."""
    resolved = resolve_with_sources(args)
    if args.action == "verify":
        raise ConfigError("verify is for the models on this machine: leave --server out.")
    for name in sorted(resolved.explicit & _OPTIONS - {"revision"}):
        flag = declared()[name].flag
        raise ConfigError(f"{flag} is for the models on this machine: the server has its own.")
    on_server = load("triptych.server_models_cli:run")
    with open_server(args) as server:
        code: int = on_server(server, args.action, args.models, resolved.config.models.revision)
        return code


def _list(names: Sequence[str], options: ModelOptions) -> int:
    stored = _chosen(names, options)
    table = Table("model", "kind", "size", "from", "key", "state", box=None, pad_edge=False)
    for model in stored:
        kind = (role_in(model.folder) if model.is_whole else None) or "-"
        cells = (model.name, kind, decimal(model.num_bytes), model.kind, model.key[:12])
        style = "" if model.is_whole else "red"
        table.add_row(*map(Text, cells), Text("ok" if model.is_whole else "damaged", style=style))
    console = Console()
    if stored:
        console.print(table)
    console.print(f"{len(stored)} models, {decimal(sum(model.num_bytes for model in stored))}")
    if not names:
        _print_catalog(console, {model.name for model in stored})
    return 0


def _print_catalog(console: Console, here: Collection[str]) -> None:
    """Print the named models that are not `here`: they can be fetched, or are in the package."""
    table = Table("model", "kind", "download", "license", box=None, pad_edge=False)
    for entry in catalog():
        if entry.name not in here:
            size = decimal(entry.download_bytes) if entry.download_bytes else "in the package"
            table.add_row(*map(Text, (entry.name, entry.role, size, entry.license)))
    console.print("\nFurther models; `triptych pull NAME` or a start fetches them, or any hub id:")
    console.print(table)


def _fetch(names: Sequence[str], options: ModelOptions) -> int:
    from triptych.modalities.talk.hearing.source import (
        SILERO_VAD,
    )  # a part, which is not served alone

    sources = [*known_sources(), SILERO_VAD]  # the latter is a part: it is not served alone
    for reference in names or (*default_models(), SILERO_VAD.name):
        progress = RichProgress()
        progress.begin(served_name(reference))
        model = resolve_model(
            reference, name=None, options=options, progress=progress, sources=sources
        )
        Console().print(Text(f"{model.name} is in {model.folder}"), soft_wrap=True)
    return 0


def _verify(names: Sequence[str], options: ModelOptions) -> int:
    damaged = 0
    progress = RichProgress()
    for model in _chosen(names, options):
        problem = _problem(model, progress)
        damaged += problem is not None
        Console().print(Text(f"{model.name}: {problem or 'ok'}"), soft_wrap=True)
    return 1 if damaged else 0


def _problem(model: StoredModel, progress: Progress) -> str | None:
    progress.begin(model.name)
    try:
        verify_stored(model, progress)
    except WeightsError as error:
        return error.message
    finally:
        progress.stop()
    return None


def _remove(names: Sequence[str], options: ModelOptions) -> int:
    if not names:
        raise ConfigError("Name the models to remove; `triptych models list` lists them.")
    for model in _chosen(names, options):
        remove(model, options)
        Console().print(Text(f"{model.name} is removed ({decimal(model.num_bytes)})"))
    return 0


def _chosen(names: Sequence[str], options: ModelOptions) -> list[StoredModel]:
    """Return the stored models called `names`, or all of them."""
    stored = stored_models(options)
    if not names:
        return stored
    chosen = [find_model(stored, name) for name in names]
    return [model for i, model in enumerate(chosen) if model not in chosen[:i]]


_ACTIONS: dict[str, Callable[[Sequence[str], ModelOptions], int]] = {
    "list": _list,
    "fetch": _fetch,
    "verify": _verify,
    "remove": _remove,
}
