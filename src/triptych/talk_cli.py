"""`triptych talk`: a spoken conversation on a terminal.

Owns where sound comes from and goes to: files, or the devices of `talk_devices`. The conversation
is `Engine.talk`, or chat with audio on a server.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, TypeAlias

from rich.console import Console
from rich.markup import escape

from triptych.core.client.choice import Wanted, add_server_options, open_model
from triptych.core.errors import ConfigError
from triptych.core.media.audio.containers import FORMATS, AudioEncoder, encode_clip, open_encoder
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.declaration import Role
from triptych.core.options.table import add_options
from triptych.core.process.cli_io import read_file, report_write_errors, show
from triptych.modalities.llm.api.audio_fields import MAX_SPOKEN_TOKENS, SPOKEN_INSTRUCTIONS
from triptych.modalities.talk.ports import HEARING_RATE
from triptych.modalities.talk.speaking.events import (
    HeardWords,
    SpokenSound,
    TalkEvent,
    WrittenWords,
)
from triptych.modalities.tts.api.results import format_of

DEFAULT_MODELS = ("embedded", "whisper-tiny.en", "triptych-voice")
WANTED = Wanted(
    task="chat",
    default="embedded",
    pipeline="triptych.talk_cli:LocalTalk",
    remote="triptych.modalities.talk.speaking.remote:RemoteTalk",
)
Turn: TypeAlias = "str | bytes"
"""A text, or the bytes of a file of sound."""


class Talks(Protocol):
    """A conversation of this process or with a server."""

    def begin(self, *, system: str | None, voice: str, **options: Any) -> None:
        """Set what holds for all turns; `options` are a chat call's. `None` asks for brevity."""

    def turn(self, said: Turn) -> Generator[TalkEvent, None, None]:
        """Answer a turn; closing it ends the answer."""


class LocalTalk:
    """A conversation with models of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        from triptych.engine import Engine

        if not getattr(args, "model", None):
            args.model = list(DEFAULT_MODELS)
        needs_ears = bool(args.file or not args.text)
        self._engine = Engine.from_arguments(args, partial(_check_kinds, needs_ears=needs_ears))

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Self:
        """Load the models of the command. Raises `ConfigError` before if a kind is missing."""
        return cls(args)

    def begin(self, *, system: str | None, voice: str, **options: Any) -> None:
        """Open the conversation."""
        self._talk = self._engine.talk(system=system, voice=voice, **options)

    def turn(self, said: Turn) -> Generator[TalkEvent, None, None]:
        """Answer a turn."""
        yield from self._talk(said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()


def _check_kinds(roles: Collection[Role], *, needs_ears: bool) -> None:
    """Raise `ConfigError` if `roles` lack a kind of model that the conversation needs."""
    found = {
        "chat": "chat" in roles or "vision" in roles,
        "recognition": "asr" in roles or not needs_ears,
        "speech": "speech" in roles,
    }
    if missing := [kind for kind, is_there in found.items() if not is_there]:
        named = " ".join(f"-m {name}" for name in DEFAULT_MODELS)
        raise ConfigError(
            f"There is no model of {' and '.join(missing)}. Talking needs models of chat,"
            f" recognition and speech: repeat --model, as in `triptych talk {named}`."
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych talk`."""
    parser.add_argument("file", nargs="*", help="questions as files of sound (default: microphone)")
    parser.add_argument("--text", action="append", default=[], help="a question as text")
    parser.add_argument("-o", "--output", help="file of the answers (default: loudspeaker)")
    parser.add_argument("--format", choices=FORMATS, help="default: the file's extension")
    parser.add_argument("--voice", default="", help="name or id; `triptych voices` lists them")
    parser.add_argument(
        "--system",
        help=f"system prompt, empty for none (default: {SPOKEN_INSTRUCTIONS})",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        help=f"most tokens of an answer (default: {MAX_SPOKEN_TOKENS}, for models that reason as"
        " many as fit)",
    )
    parser.add_argument("--temperature", type=float, help="0 picks the most probable token")
    parser.add_argument(
        "--interrupt",
        action="store_true",
        help="listen during answers, which speech interrupts; use headphones",
    )
    add_server_options(parser)
    sections = ("models", "device", "cache", "schedule", "speech")
    add_options(parser, sections=sections, roles=("chat", "asr", "speech"))


def run(args: argparse.Namespace) -> int:
    """Hold the conversation."""
    questions: list[Turn] = [*map(_read_recording, args.file), *args.text]
    if questions and args.interrupt:
        raise ConfigError("--interrupt is for a microphone: leave it out, or files and --text.")
    with ExitStack() as stack:
        sink = stack.enter_context(_open_sink(args))
        turns: Iterator[Turn] = iter(questions)
        listener: Listener = Deaf()
        if not questions:
            from triptych.talk_devices import open_microphone

            listener = open_microphone(stays_open=args.interrupt)
            turns = map(_as_file, stack.enter_context(closing(listener.turns())))
        talk = stack.enter_context(_open_talk(args))
        options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
        given = {name: value for name, value in options.items() if value is not None}
        talk.begin(system=args.system, voice=args.voice, **given)
        for said in turns:
            _hold_turn(talk, said, sink, listener)
    return 0


def _read_recording(name: str) -> bytes:
    if " " in name and not Path(name).exists():
        raise ConfigError(f"There is no file {name[:60]!r}; a question as text is --text {name!r}.")
    return read_file(name, "recording")


def _open_talk(args: argparse.Namespace) -> AbstractContextManager[Talks]:
    opened: AbstractContextManager[Talks] = open_model(args, WANTED)
    return opened


def _as_file(pcm_S: Pcm) -> Turn:
    return encode_clip("wav", HEARING_RATE, pcm_S)


class Listener(Protocol):
    """Notices speech during an answer."""

    def is_suspecting(self) -> bool:
        """Whether the user may have begun to speak: the answer is held until that is certain."""

    def is_interrupting(self) -> bool:
        """Whether the user speaks: the answer ends."""


class Deaf:
    """Listens to nothing."""

    def is_suspecting(self) -> bool:
        """Suspect nothing, so that no answer is held."""
        return False

    def is_interrupting(self) -> bool:
        """Let the answer be spoken to its end."""
        return False


class Sink(Protocol):
    """The destination of the answers' sound."""

    def play(self, sound: SpokenSound, listener: Listener) -> None:
        """Take the next sound; may wait while it is played, until the user is interrupting."""

    def end_turn(self, *, is_cut: bool) -> None:
        """Wait until all is played, unless the turn `is_cut`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class FileSink:
    """Writes the answers to one file, one after another. An interrupted file is valid."""

    def __init__(self, path: str, audio_format: str) -> None:
        self._path = path
        self._format = audio_format
        self._encoder: AudioEncoder | None = None
        self._file: BinaryIO | None = None

    def play(self, sound: SpokenSound, listener: Listener) -> None:
        """Write the next sound; the file is created with the first."""
        with report_write_errors(self._path):
            if self._encoder is None or self._file is None:
                self._file = Path(self._path).open("wb")  # noqa: SIM115 - closed at the exit
                self._encoder = open_encoder(self._format, sound.sample_rate)
            self._file.write(self._encoder.encode(sound.pcm_S))

    def end_turn(self, *, is_cut: bool) -> None:
        """Do nothing: sound is written as it comes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._encoder is None or self._file is None:
            return
        with report_write_errors(self._path), self._file:
            self._file.write(self._encoder.finish())
            if self._file.seekable():
                self._file.seek(0)
                self._file.write(self._encoder.final_head())


def _open_sink(args: argparse.Namespace) -> Sink:
    """The destination of the sound. Raises `ConfigError` before any model is loaded."""
    if args.output:
        return FileSink(args.output, args.format or format_of(args.output))
    if args.format:
        raise ConfigError("--format is of a file: name one with --output.")
    from triptych.talk_devices import Loudspeaker

    return Loudspeaker()


def _hold_turn(talk: Talks, said: Turn, sink: Sink, listener: Listener) -> None:
    """Answer a turn, until it is interrupted: words to the terminal, sound to `sink`."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    is_cut = False
    with closing(talk.turn(said)) as events:
        for event in events:
            match event:
                case HeardWords(text):
                    console.print(f"[dim]you:[/] {escape(text)}")
                case WrittenWords(text):
                    show(text)
                case SpokenSound():
                    sink.play(event, listener)
            if is_cut := listener.is_interrupting():
                console.print("[dim] (interrupted)[/]", end="")
                break
    show("\n")
    sink.end_turn(is_cut=is_cut)
