"""Where a command runs: on a running server, or with a model in its own process.

Owns the options `--server`, `--no-server` and `--server-key`, their environment variables, and the
choice:

    --no-server          this process
    --server URL         that server, or an error
    neither              a server of this user on this machine that is ready and has the model;
                         else this process

Options of an engine (`--device`, ...), from any source, are for this process. Also owns which keys
are sent where. Knows no modality and no route beyond the list of models.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

from triptych.core.client.connection import (
    Connection,
    is_on_this_machine,
    is_same_server,
    normalized_url,
)
from triptych.core.client.records import ServerRecord, running_servers
from triptych.core.errors import ConfigError, TriptychError, Unauthorized, UnknownModel
from triptych.core.options.declaration import Option
from triptych.core.options.relevance import spelled
from triptych.core.options.table import (
    COMMAND_VARIABLES,
    Resolved,
    declared,
    resolve_with_sources,
    value_of,
)
from triptych.core.process.lazy import load

NONE = "none"
_SERVER, _KEY = COMMAND_VARIABLES
_API_KEYS = ("TRIPTYCH_API_KEY",)
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

    def served_by(
        self, cards: Sequence[Mapping[str, Any]], references: Sequence[str]
    ) -> str | None:
        """Return the name under which `cards` list the first such model of `references`, if any.

        Without references it is the first model of the task.
        """
        able = [card["id"] for card in cards if self._fits(card)]
        names = [self._name_of(reference) for reference in references] or able
        return next((name for name in names if name in able), None)

    def reads(self, option: Option) -> bool:
        """Whether an engine with the model alone reads `option`."""
        roles = (self.task, "vision") if self.has_images else (self.task,)
        is_for_engine = option.section != "server" and not option.is_for_server
        return is_for_engine and option.is_for(roles)

    def _name_of(self, reference: str) -> str:
        if reference != "embedded":
            return reference
        return str(load("triptych.core.weights.resolve:served_name")(self.default))

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

    def __exit__(self, *_: object) -> None:
        self.close()


def add_server_options(parser: argparse.ArgumentParser, *, needs_server: bool = False) -> None:
    """Declare the options of commands that can use a running server, or need one."""
    group = parser.add_argument_group("where it runs")
    default = "by default a server of yours on this machine that has the model is used, and"
    default += " otherwise a model in this process"
    if needs_server:
        default = "by default the one of yours on this machine"
    group.add_argument("--server", metavar="URL", help=f"use this server; {default} [{_SERVER}]")
    if not needs_server:
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
        help=f"API key of the server [{_KEY}, which is sent to {_SERVER}, and to another --server"
        " over https or on this machine; on this machine also TRIPTYCH_API_KEY]",
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
    resolved = resolve_with_sources(args)
    only_here = only_here or _engine_option(resolved, wanted)
    if only_here and not address:
        return None
    if only_here:
        source = "--server" if getattr(args, "server", None) else _SERVER
        raise ConfigError(
            f"{only_here} needs a model in this process: leave it or {source} out, or give"
            " --no-server."
        )
    references = resolved.config.models.model
    if address:
        found: RemoteModel | None = _named_server(connect(address, args), wanted, references)
    else:
        found = _own_server(args, wanted, references)
    if found is not None and resolved.sources["seed"] != "default":
        found.seed = resolved.config.device.seed
    return found


def server_address(args: argparse.Namespace) -> str:
    """Return the given address of a server, `none`, or an empty text."""
    return getattr(args, "server", None) or os.environ.get(_SERVER) or ""


def connect(
    address: str, args: argparse.Namespace, variables: Sequence[str] = _API_KEYS
) -> Connection:
    """Connect to the named server with the key of the options or the environment.

    The keys of the user's own server, which `variables` hold, are sent to this machine only.
    """
    key = getattr(args, "server_key", None) or ""
    if not key and _takes_key(address, args):
        key = os.environ.get(_KEY) or ""
    return Connection(address, key or _own_key(address, variables))


def served_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the models of the servers that a command may use; empty without one."""
    address = server_address(args)
    if address == NONE:
        return []
    if address:
        return _names(lambda: connect(address, args))
    found = (_names(partial(_connect_own, record, args)) for record in running_servers())
    return list(dict.fromkeys(chain.from_iterable(found)))


@contextmanager
def open_server(args: argparse.Namespace) -> Iterator[Connection]:
    """Connect to the named server, or to the one of this user on this machine.

    For commands about a server, which may need an admin's key. Raises `ConfigError` if there is
    none or a choice.
    """
    keys = ("TRIPTYCH_ADMIN_KEY", *_API_KEYS)
    address = server_address(args)
    if address in ("", NONE):
        opened = _connect_own(only_server(running_servers()), args, keys)
    else:
        opened = connect(address, args, keys)
    with opened as connection:
        yield connection


def only_server(records: Sequence[ServerRecord]) -> ServerRecord:
    """Return the one record. Raises `ConfigError` if there is none or a choice."""
    if not records:
        raise ConfigError("No such server of yours runs on this machine; see --server.")
    if len(records) > 1:
        urls = ", ".join(record.url for record in records)
        raise ConfigError(f"Several servers of yours run: choose one with --server ({urls}).")
    return records[0]


def _connect_own(
    record: ServerRecord, args: argparse.Namespace, variables: Sequence[str] = _API_KEYS
) -> Connection:
    key = getattr(args, "server_key", None) or _own_key(record.url, variables)
    return Connection(record.url, key)


def _own_key(address: str, variables: Sequence[str]) -> str:
    """Return the first of the keys with which a server of this environment would start."""
    if not is_on_this_machine(address):
        return ""
    keys = (os.environ.get(variable, "").partition(",")[0].strip() for variable in variables)
    return next(filter(None, keys), "")


def _takes_key(address: str, args: argparse.Namespace) -> bool:
    """Whether the key of the environment is for the named server, and cannot be read on its way.

    It belongs to the server of the environment.
    """
    named = os.environ.get(_SERVER) or NONE
    if not getattr(args, "server", None) or is_same_server(address, named):
        return True
    return is_on_this_machine(address) or normalized_url(address).startswith("https:")


def _names(opening: Callable[[], Connection]) -> list[str]:
    try:
        with opening() as connection:
            cards = connection.get("/v1/models", timeout_s=_CHECK_TIMEOUT_S)["data"]
    except TriptychError:  # reported where the command opens its model
        return []
    return [card["id"] for card in cards]


def _engine_option(resolved: Resolved, wanted: Wanted) -> str:
    """Return the first option that only an engine reads, as it was given; empty without one.

    A flag counts always; files and variables may be those of a server, so their options count if
    the model's engine reads them and they differ from the default.
    """
    shared = {*_SHARED, "seed"} if wanted.has_seed else _SHARED
    for name, option in declared().items():
        is_default = value_of(resolved.config, option) == option.default
        if name in shared or (is_default and name not in resolved.explicit):
            continue
        if name in resolved.explicit or wanted.reads(option):
            return spelled(option, resolved.sources[name])
    return ""


def _named_server(connection: Connection, wanted: Wanted, references: Sequence[str]) -> RemoteModel:
    try:
        cards = connection.get("/v1/models")["data"]
        name = wanted.served_by(cards, references)
        if name is None:
            able = [card["id"] for card in cards if wanted.served_by([card], ())]
            raise UnknownModel.among(able, ", ".join(references), f"{wanted.task} model")
    except TriptychError:
        connection.close()
        raise
    return RemoteModel(connection, name)


def _own_server(
    args: argparse.Namespace, wanted: Wanted, references: Sequence[str]
) -> RemoteModel | None:
    """Return the model of the latest server of this user that is ready and has it."""
    for record in running_servers():
        connection = _connect_own(record, args)
        try:
            connection.get("/readyz", timeout_s=_CHECK_TIMEOUT_S)
            cards = connection.get("/v1/models", timeout_s=_CHECK_TIMEOUT_S)["data"]
        except Unauthorized:
            reason = "It needs a key (--server-key)."
        except TriptychError as error:
            reason = error.message
        else:
            name = wanted.served_by(cards, references)
            if name is not None:
                _note(f"{name} of the server at {record.url} is used; --no-server forbids it.")
                return RemoteModel(connection, name)
            reason = f"It has no {', '.join(references) or f'{wanted.task} model'}."
        _note(f"The server at {record.url} is not used. {reason}")
        connection.close()
    return None


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
