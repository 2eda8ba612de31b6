"""Shared code of the clients' scripts: the server's address, and a line for each check.

A check takes a `Server` and returns a result, or is a coroutine that does. It fails by
raising; `TooSmall` means that client and server worked, and the model was too weak.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

MAX_CHARACTERS = 160


class TooSmall(Exception):
    """The answer was whole and well-formed, but not good enough."""


@dataclass(frozen=True)
class Server:
    """A running `triptych serve`, by default without API keys."""

    url: str
    model: str
    key: str
    embedding_model: str = "all-minilm-l6-v2"
    speech_model: str = "triptych-voice"
    transcription_model: str = "whisper-tiny.en"

    @property
    def v1(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"


def run_checks(package: str, *checks: Callable[[Server], object], release: str = "") -> None:
    """Run a script's checks, print a line for each, and exit with 1 if one failed.

    `release` is the version of a package that is not Python's.
    """
    parser = argparse.ArgumentParser(description=f"Try {package} against a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--embedding-model", default=Server.embedding_model)
    parser.add_argument("--speech-model", default=Server.speech_model)
    parser.add_argument("--transcription-model", default=Server.transcription_model)
    parser.add_argument("--key", default="none")
    parser.add_argument("--only", default="", help="the name of one check")
    arguments = parser.parse_args()
    server = Server(
        arguments.url.rstrip("/"),
        arguments.model,
        arguments.key,
        arguments.embedding_model,
        arguments.speech_model,
        arguments.transcription_model,
    )
    print(f"client {package} {release or version(package)}")
    chosen = [check for check in checks if arguments.only in ("", check.__name__)]
    verdicts = [_try(check, server) for check in chosen]
    sys.exit("fails" in verdicts)


def said(text: str | None, expected: str) -> str:
    """Return `text`, which must contain `expected`."""
    if expected.lower() not in (text or "").lower():
        raise TooSmall(f"{expected!r} is not in {text!r}")
    return text or ""


@contextmanager
def too_small_if(*errors: type[Exception]) -> Iterator[None]:
    """Translate the client's error for a model that never stops, or answers in no known format."""
    try:
        yield
    except errors as error:
        raise TooSmall(f"{type(error).__name__}: {error}") from error


def _try(check: Callable[[Server], object], server: Server) -> str:
    started = time.monotonic()
    try:
        found = check(server)
        verdict, result = "works", str(asyncio.run(found) if inspect.iscoroutine(found) else found)
    except TooSmall as error:
        verdict, result = "small", str(error)
    except Exception as error:  # whatever a client raises
        verdict, result = "fails", f"{type(error).__name__}: {error}"
    taken = f"({time.monotonic() - started:.0f} s)"
    print(verdict, check.__name__, taken, " ".join(result.split())[:MAX_CHARACTERS], flush=True)
    return verdict
