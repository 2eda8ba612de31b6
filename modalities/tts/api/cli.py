"""`triptych speak`: the speech pipeline on the command line.

Owns the destination of the sound (a file, a pipe, a player) and the progress report on stderr. The
pipeline does the rest.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Protocol, Unpack, cast, get_args

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from triptych.core.client.choice import Wanted, add_server_options, open_model
from triptych.core.errors import ConfigError
from triptych.core.media.audio.containers import FORMATS, AudioEncoder, open_encoder
from triptych.core.media.captions import CAPTION_FORMATS, CaptionFormat
from triptych.core.options.table import add_options
from triptych.core.process.cli_io import STDIN, read_text, report_write_errors
from triptych.modalities.tts.api.captions import caption_file
from triptych.modalities.tts.api.results import (
    InputFormat,
    SpeakOptions,
    SpeechPiece,
    SpokenWord,
    format_of,
)
from triptych.modalities.tts.modality import SPEECH

PLAYERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ffplay": ("-autoexit", "-nodisp", "-loglevel", "error", "-"),
        "mpv": ("--no-terminal", "-"),
        "aplay": ("-q", "-"),
        "play": ("-q", "-t", "wav", "-"),
    }
)
"""Programs that play a WAV stream from stdin, and their flags for it."""
INPUT_FORMATS: tuple[InputFormat, ...] = get_args(InputFormat)
WANTED = Wanted(
    task=SPEECH.task[0],
    default=SPEECH.default,
    pipeline="triptych.modalities.tts.api.pipeline:SpeechPipeline",
    remote="triptych.modalities.tts.api.remote:RemoteSpeech",
)


class Speaks(Protocol):
    """A speech model of this process or of a server; its rate is known from the first piece on."""

    @property
    def sample_rate(self) -> int:
        """Samples per second of the sound."""

    def pieces(
        self, text: str, *, is_live: bool = True, **options: Unpack[SpeakOptions]
    ) -> Iterator[SpeechPiece]:
        """Speak a text piece by piece."""


def add_speak_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych speak`."""
    parser.add_argument("text", nargs="*", help="text to speak (default: stdin)")
    parser.add_argument("-i", "--input", help='file with the text; "-" is stdin')
    parser.add_argument(
        "--input-format", choices=INPUT_FORMATS, default="text", help="plain text, or SSML"
    )
    parser.add_argument("-o", "--output", help='file to write; "-", the default, is stdout')
    parser.add_argument("--captions", help="file for the words with their times: .srt or .vtt")
    parser.add_argument("--play", action="store_true", help=f"play it with {', '.join(PLAYERS)}")
    parser.add_argument("--format", choices=FORMATS, help="default: the file's extension, else wav")
    parser.add_argument("--voice", default="", help="name or id; `triptych voices` lists them")
    parser.add_argument("--speed", type=float, default=1.0, help="speaking rate, 0.25 to 4")
    parser.add_argument("--instructions", default="", help="how to speak, if supported")
    parser.add_argument("--language", default="", help="language tag of the text, such as en-GB")
    parser.add_argument(
        "--request-seed",
        type=int,
        metavar="SEED",
        help="seed of an earlier run",
    )
    add_server_options(parser)
    sections = ("models", "device", "cache", "schedule", "speech")
    add_options(parser, sections=sections, roles=("speech",))


def run_speak(args: argparse.Namespace) -> int:
    """Speak a text to a file, to stdout or to a player, while it is generated."""
    text, audio_format = _read_text(args), _choose_format(args)
    caption_format = None if args.captions is None else _caption_format(args.captions)
    words: list[SpokenWord] = []
    options = SpeakOptions(
        voice=args.voice,
        speed=args.speed,
        instructions=args.instructions,
        language=args.language,
        input_format=args.input_format,
        seed=args.request_seed,
        has_word_times=caption_format is not None,
    )
    with _open_pipeline(args) as pipeline:
        is_file = args.output not in (None, STDIN)
        pieces = _report_progress(pipeline, pipeline.pieces(text, is_live=not is_file, **options))
        first = next(pieces)  # an invalid request creates no file
        encoder = open_encoder(audio_format, pipeline.sample_rate)
        with _open_sink(args) as sink:
            heard = _collect_words(chain([first], pieces), words)
            _write(heard, encoder, sink, is_file=is_file)
    if caption_format is not None:
        with report_write_errors(args.captions):
            Path(args.captions).write_text(caption_file(words, caption_format), encoding="utf-8")
    return 0


def _open_pipeline(args: argparse.Namespace) -> AbstractContextManager[Speaks]:
    opened: AbstractContextManager[Speaks] = open_model(args, WANTED)
    return opened


def _read_text(args: argparse.Namespace) -> str:
    if args.text and args.input:
        raise ConfigError("Give the text or a file with --input, not both.")
    if args.text:
        return " ".join(args.text)
    path = args.input or STDIN
    if path == STDIN and sys.stdin.isatty():
        raise ConfigError("Nothing to say: give a text, or pipe one in.")
    return read_text("--input", path)


def _choose_format(args: argparse.Namespace) -> str:
    """The audio format to write. Raises `ConfigError` where the sound has no destination."""
    if args.play:
        if args.output or args.format not in (None, "wav"):
            raise ConfigError("--play uses WAV and writes no file: leave out -o and --format.")
        _find_player()
        return "wav"
    if args.output not in (None, STDIN):
        return str(args.format or format_of(args.output))
    if sys.stdout.isatty():
        raise ConfigError(
            "stdout is a terminal: write a file with -o speech.wav, play the sound with --play, or"
            " pipe it into a player, as in `triptych speak ... | aplay`."
        )
    return str(args.format or "wav")


def _caption_format(path: str) -> CaptionFormat:
    """The format of a caption file's extension. Raises `ConfigError` if it is unknown."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    found = next((kind for kind in CAPTION_FORMATS if kind == suffix), None)
    if found is None:
        raise ConfigError(f"--captions: use .{' or .'.join(CAPTION_FORMATS)}, not {path!r}.")
    return found


def _collect_words(pieces: Iterable[SpeechPiece], words: list[SpokenWord]) -> Iterator[SpeechPiece]:
    """Pass pieces through, and add their words to `words`."""
    for piece in pieces:
        words += piece.words
        yield piece


def _find_player() -> list[str]:
    for name, flags in PLAYERS.items():
        if path := shutil.which(name):
            return [path, *flags]
    raise ConfigError(
        f"--play needs one of {', '.join(PLAYERS)}; none is installed. Write a file with -o."
    )


@contextmanager
def _open_sink(args: argparse.Namespace) -> Iterator[BinaryIO]:
    if args.play:
        with subprocess.Popen(_find_player(), stdin=subprocess.PIPE) as player:  # noqa: S603
            yield cast("BinaryIO", player.stdin)
    elif args.output in (None, STDIN):
        yield sys.stdout.buffer
    else:
        with report_write_errors(args.output), Path(args.output).open("wb") as file:
            yield file


def _write(
    pieces: Iterable[SpeechPiece], encoder: AudioEncoder, sink: BinaryIO, *, is_file: bool
) -> None:
    """Write the stream as it is generated. An interrupted file is valid up to that point."""
    try:
        for piece in pieces:
            sink.write(encoder.encode(piece.pcm_S))
            sink.flush()
    finally:
        sink.write(encoder.finish())
        if is_file and sink.seekable():  # a named pipe is not seekable
            sink.seek(0)
            sink.write(encoder.final_head())
        sink.flush()


def _report_progress(pipeline: Speaks, pieces: Iterator[SpeechPiece]) -> Iterator[SpeechPiece]:
    """Pass pieces through and report progress on stderr: live on a terminal, else at the end."""
    console = Console(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    started_s, first_s, num_samples = time.monotonic(), 0.0, 0
    with bar:
        task = bar.add_task("speaking")
        for piece in pieces:
            elapsed_s = time.monotonic() - started_s
            first_s = first_s or elapsed_s
            num_samples += len(piece.pcm_S)
            speech_s = num_samples / pipeline.sample_rate
            report = f"{speech_s:.1f} s of speech, {speech_s / elapsed_s:.1f} times real time"
            bar.update(task, description=report)
            yield piece
    console.print(f"{report}, the first after {first_s * 1000:.0f} ms", highlight=False)
    if piece.coverage < 1.0 or piece.finish_reason != "stop":
        spoken = f"{piece.coverage:.1%} of the text was spoken correctly"
        console.print(f"[yellow]{spoken} ({piece.finish_reason}).[/]", highlight=False)
