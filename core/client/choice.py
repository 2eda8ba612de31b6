"""Where a command runs: on a running server, or with a model in its own process.

Owns the options `--server`, `--no-server` and `--server-key`, their environment variables, and the
choice:

    --no-server          this process
    --server URL         that server, or an error
    neither              a server of this user on this machine that is ready and has the model;
                         else this process

Options of an engine (`--device`, ...) are for this process. Knows no modality and no route beyond
the list of models.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from triptych.core.client.connection import Connection, is_on_this_machine
from triptych.core.client.records import running_servers
from triptych.core.errors import ConfigError, TriptychError, Unauthorized, UnknownModel
from triptych.core.options.table import COMMAND_VARIABLES, declared
from triptych.core.options.values import convert_value
from triptych.core.process.lazy import load

NONE = "none"
_SERVER, _KEY = COMMAND_VARIABLES
_CHECK_TIMEOUT_S = 10.0  # the API process of a busy server answers late, and still does
_SHARED = frozenset({"model", "log_level", "cache_dir", "hf_token", "offline"})
"""Options that do not decide where a command runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The model that a command needs: its task in `/v1/models`, and the name of the default.

    With `has_images` the model must take images, too; with `has_seed` its requests have a seed,
    which `--seed` sets where they do not. `pipeline` and `remote` are the classes, as
    `core.process.lazy` names them, of a model in this process and of one of a server
    (`RemoteModel`), which have the methods that the command calls.
    """

    task: str
    default: str
    pipeline: str
    remote: str
    has_images: bool = False
    has_seed: bool = True

    def served_by(self, cards: Sequence[Mapping[str, Any]], reference: str) -> str | None:
        """Return the name under which `cards` list the model of `reference`, if they do.

        Without a reference it is the first model of the task.
        """
        able = [card["id"] for card in cards if self._fits(card)]
        if not reference:
            return next(iter(able), None)
        if reference == "embedded":
            reference = load("triptych.core.weights.resolve:served_name")(self.default)
        return reference if reference in able else None

    def _fits(self, card: Mapping[str, Any]) -> bool:
        sees = "image" in (card.get("input_modalities") or ())
        return card.get("task") == self.task and (sees or not self.has_images)


class RemoteModel:
    """A model of a running server, which a command uses like a pipeline of this process."""

    def __init__(self, connection: Connection, name: str, seed: int | None = None) -> None:
        self.connection = connection
        self.name = name
        self.seed = seed

    def request(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the fields of a request with the model, and with a seed if they have none."""
        is_seeded = self.seed is None or fields.get("seed") is not None
        return {**fields, "model": self.name} | ({} if is_seeded else {"seed": self.seed})

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of commands that can use a running server."""
    group = parser.add_argument_group("where it runs")
    group.add_argument(
        "--server",
        metavar="URL",
        help="use this server; by default a server of yours on this machine that has the model is"
        f" used, and otherwise a model in this process [{_SERVER}]",
    )
    group.add_argument(
        "--no-server",
        dest="server",
        action="store_const",
        const=NONE,
        help="use no server: run the model in this process",
    )
    group.add_argument(
        "--server-key",
        metavar="KEY",
        help=f"API key of the server [{_KEY}; on this machine also TRIPTYCH_API_KEY]",
    )


def open_model(
    args: argparse.Namespace, wanted: Wanted, *, only_here: str = "", **keywords: Any
) -> Any:
    """Open a server's model or a pipeline, for a `with` block.

    `only_here` is that of `choose_server`; `keywords` are further arguments of the pipeline's
    `from_arguments`.
    """
    chosen = choose_server(args, wanted, only_here=only_here)
    if chosen is not None:
        return load(wanted.remote)(chosen.connection, chosen.name, chosen.seed)
    return load(wanted.pipeline).from_arguments(args, **keywords)


def choose_server(
    args: argparse.Namespace, wanted: Wanted, *, only_here: str = ""
) -> RemoteModel | None:
    """Return the server's model that a command shall use; `None`: a model in this process.

    `only_here` names a part of the command that no server does. Raises `ConfigError` for such a
    part and for options of an engine, if they are given with `--server`; and the error of a named
    server that cannot be used.
    """
    address = server_address(args)
    if address == NONE:
        return None
    only_here = only_here or _engine_flag(args, wanted)
    reference = _reference(args)
    if only_here and not address:
        return None
    if only_here:
        raise ConfigError(f"{only_here} needs a model in this process: leave it or --server out.")
    if not address:
        found = _own_server(args, wanted, reference)
    else:
        found = _named_server(connect(address, args), wanted, reference)
    if found is not None and (seed := getattr(args, "seed", None)) is not None:
        found.seed = convert_value(declared()["seed"], seed, "--seed", is_text=True)
    return found


def server_address(args: argparse.Namespace) -> str:
    """Return the given address of a server, `none`, or an empty text."""
    return getattr(args, "server", None) or os.environ.get(_SERVER) or ""


def connect(address: str, args: argparse.Namespace) -> Connection:
    """Connect to a server with the key of the options or the environment.

    The keys of the user's own server (`TRIPTYCH_API_KEY`) are sent to this machine only.
    """
    key = getattr(args, "server_key", None) or os.environ.get(_KEY) or ""
    if not key and is_on_this_machine(address):
        key = os.environ.get("TRIPTYCH_API_KEY", "").partition(",")[0]
    return Connection(address, key)


def served_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the models of the server that a command may use; empty without one."""
    if server_address(args) == NONE:
        return []
    try:
        with open_server(args) as connection:
            cards = connection.get("/v1/models", timeout_s=_CHECK_TIMEOUT_S)["data"]
    except TriptychError:  # reported where the command opens its model
        return []
    return [card["id"] for card in cards]


@contextmanager
def open_server(args: argparse.Namespace) -> Iterator[Connection]:
    """Connect to the named server, or to the latest of this user on this machine.

    For commands about a server. Raises `ConfigError` if there is none.
    """
    address = server_address(args)
    if address in ("", NONE):
        running = running_servers()
        if not running:
            raise ConfigError("No server of yours runs on this machine; give --server URL.")
        address = running[0].url
    with connect(address, args) as connection:
        yield connection


def _engine_flag(args: argparse.Namespace, wanted: Wanted) -> str:
    """Return the first given flag that only an engine reads; empty if there is none."""
    shared = {*_SHARED, "seed"} if wanted.has_seed else _SHARED
    given = (name for name in vars(args) if name in declared() and name not in shared)
    return next((f"--{name.replace('_', '-')}" for name in given), "")


def _reference(args: argparse.Namespace) -> str:
    """Return the given model; several are refused where the pipeline opens."""
    given = getattr(args, "model", None) or ()
    return given[-1] if given else ""


def _named_server(connection: Connection, wanted: Wanted, reference: str) -> RemoteModel:
    try:
        cards = connection.get("/v1/models")["data"]
        name = wanted.served_by(cards, reference)
        if name is None:
            able = [card["id"] for card in cards if wanted.served_by([card], "")]
            raise UnknownModel.among(able, reference, f"{wanted.task} model")
    except TriptychError:
        connection.close()
        raise
    return RemoteModel(connection, name)


def _own_server(args: argparse.Namespace, wanted: Wanted, reference: str) -> RemoteModel | None:
    """Return the model of the latest server of this user that is ready and has it."""
    for record in running_servers():
        connection = connect(record.url, args)
        try:
            connection.get("/readyz", timeout_s=_CHECK_TIMEOUT_S)
            cards = connection.get("/v1/models", timeout_s=_CHECK_TIMEOUT_S)["data"]
        except Unauthorized:
            _note(f"The server at {record.url} needs a key (--server-key); it is not used.")
        except TriptychError:
            _note(f"The server at {record.url} is not ready; it is not used.")
        else:
            name = wanted.served_by(cards, reference)
            if name is not None:
                _note(f"{name} of the server at {record.url} is used; --no-server forbids it.")
                return RemoteModel(connection, name)
            _note(
                f"The server at {record.url} has no {reference or f'{wanted.task} model'}; it is"
                " not used."
            )
        connection.close()
    return None


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
