"""`triptych voices`: lists, adds and deletes voices, of a running server or of this machine.

Owns the command's words and tables. Without a server it opens the models' front ends without their
weights; the store on disk is shared with a server that may be running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from triptych.core.bundle.resolve import resolve_all
from triptych.core.client.choice import add_server_options, choose_server
from triptych.core.errors import ConfigError
from triptych.core.http.auth import owners
from triptych.core.media.audio import decode
from triptych.core.media.child import DecodePool
from triptych.core.options.config import Config, ModelOptions, ServerOptions
from triptych.core.options.table import add_options, resolve
from triptych.core.weights.layout import read_json
from triptych.core.weights.progress import RichProgress
from triptych.modalities.tts.api.cli import WANTED
from triptych.modalities.tts.api.frontend import open_front_end
from triptych.modalities.tts.api.frontend.base import FrontEnd
from triptych.modalities.tts.api.voices.protocol import VoiceCard
from triptych.modalities.tts.api.voices.record import VoiceDescription, VoiceRecord, check_name
from triptych.modalities.tts.api.voices.remote import RemoteVoices
from triptych.modalities.tts.api.voices.routes import built_in_voices
from triptych.modalities.tts.api.voices.service import VoiceService
from triptych.modalities.tts.api.voices.store import VoiceStore
from triptych.modalities.tts.modality import SPEECH

_OPTIONS = frozenset({"model", "served_model_name", "revision", "cache_dir", "offline"}) | {
    *("api_key", "api_key_file", "max_voices_per_key", "max_voices"),
}


def add_voices_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych voices`."""
    parser.add_argument("action", nargs="?", choices=tuple(_ACTIONS), default="list")
    parser.add_argument(
        "names", nargs="*", metavar="VOICE", help="the new voice's name (add), or ids (delete)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    new = parser.add_argument_group("options of add")
    new.add_argument("--audio", metavar="FILE", help="the recording, of 1 to 60 seconds")
    new.add_argument("--consent", help="how the speaker agreed to be imitated")
    new.add_argument("--transcript", default="", help="the words of the recording, verbatim")
    new.add_argument("--language", default="", help="a tag such as en-GB")
    add_server_options(parser)
    declared = {field.name for field in (*fields(ModelOptions), *fields(ServerOptions))}
    add_options(parser, sections=("models", "server"), exclude=declared - _OPTIONS)


def run_voices(args: argparse.Namespace) -> int:
    """List, add or delete voices. With an API key, those of that key."""
    config = resolve(args)
    remote = choose_server(args, WANTED)
    with closing(RemoteVoices(remote) if remote else _LocalVoices(config)) as voices:
        _ACTIONS[args.action](args, voices)
    return 0


class _Voices(Protocol):
    """The voices of a server or of this machine."""

    def list_all(self) -> list[VoiceCard]:
        """Return the built-in voices and the caller's own."""

    def add(self, name: str, data: bytes, args: argparse.Namespace) -> VoiceCard:
        """Create a voice from a recording."""

    def delete(self, voice_id: str) -> None:
        """Delete a voice of the caller. Raises `RequestError` or `ConfigError`."""


def _list(args: argparse.Namespace, voices: _Voices) -> None:
    if args.names:
        raise ConfigError(f"unexpected argument {args.names[0]!r}; see `triptych voices --help`.")
    cards = voices.list_all()
    if args.json:
        print(json.dumps([card.model_dump() for card in cards], indent=2))
        return
    table = Table("model", "voice", "language", "description", box=None, pad_edge=False)
    for card in cards:
        description = card.description or (card.name if card.name != card.id else "")
        table.add_row(*map(Text, (card.model, card.id, card.language, description)))
    Console().print(table)


def _add(args: argparse.Namespace, voices: _Voices) -> None:
    if len(args.names) != 1 or not args.audio or not args.consent:
        raise ConfigError("To add a voice, give its name, --audio and --consent.")
    name = check_name(args.names[0])
    card = voices.add(name, _read(args.audio), args)
    if args.json:
        print(card.model_dump_json(indent=2))
    else:
        Console().print(Text(f"{card.id} speaks with the voice of {name}"), soft_wrap=True)


def _delete(args: argparse.Namespace, voices: _Voices) -> None:
    if not args.names:
        raise ConfigError("Name the voices to delete; `triptych voices list` shows their ids.")
    for voice_id in args.names:
        voices.delete(voice_id)
        Console().print(Text(f"{voice_id} is deleted"), soft_wrap=True)


class _LocalVoices:
    """The voices of this machine."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._owners = owners(config.server)

    def list_all(self) -> list[VoiceCard]:
        built_in = built_in_voices(_front_ends(self._config))
        store = VoiceStore.from_config(self._config)
        custom = [record for owner in self._owners for record in store.voices_of(owner)]
        return [*built_in, *map(VoiceCard.of_caller, custom)]

    def add(self, name: str, data: bytes, args: argparse.Namespace) -> VoiceCard:
        (owner, *more) = self._owners
        if more:
            raise ConfigError(
                "Several API keys are configured; give the key of the voice's owner alone."
            )
        return VoiceCard.of_caller(asyncio.run(self._make(owner, name, data, args)))

    async def _make(
        self, owner: str, name: str, data: bytes, args: argparse.Namespace
    ) -> VoiceRecord:
        fronts = _front_ends(self._config)
        pool = DecodePool([decode.__name__])
        service = VoiceService(VoiceStore.from_config(self._config), fronts, pool)
        about = VoiceDescription(
            name=name,
            model=service.cloning_model(None).name,
            consent=args.consent,
            transcript=args.transcript,
            language=args.language,
        )
        try:
            return await service.make(owner, about, data)
        finally:
            await pool.close()

    def delete(self, voice_id: str) -> None:
        store = VoiceStore.from_config(self._config)
        if not any(store.delete(voice_id, owner) for owner in self._owners):
            raise ConfigError(f"You have no voice {voice_id!r}.")

    def close(self) -> None:
        """Do nothing: the store is opened for each action."""


def _front_ends(config: Config) -> list[FrontEnd]:
    """Front ends of the configured speech models, or of the default model."""
    models = resolve_all(
        config.models, RichProgress(), sources=SPEECH.load_sources(), defaults=(SPEECH.default,)
    )
    return [
        open_front_end(model)
        for model in models
        if SPEECH.matches(Path(model.folder), read_json(Path(model.folder) / "config.json"))
    ]


def _read(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"--audio {path}: cannot be read ({error.strerror}).") from error


_ACTIONS: dict[str, Callable[[argparse.Namespace, _Voices], None]] = {
    "list": _list,
    "add": _add,
    "delete": _delete,
}
