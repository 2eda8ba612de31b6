"""The output of a start: the table of a terminal, and the log lines elsewhere."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from rich.console import Console

from triptych.core.engine_api.reports import ModelState, ModelStatus
from triptych.core.errors import ModelTooLarge, Overloaded, TriptychError, to_info
from triptych.core.options.config import ServerOptions
from triptych.core.process import logs
from triptych.core.process.lookups import Lookup
from triptych.startup.child_lines import ChildLines
from triptych.startup.show import Startup
from triptych.startup.table import Address, draw
from triptych.startup.views import LogView, TableView

MB, MIB = 10**6, 2**20
ADDRESS = Address(url="http://127.0.0.1:8000")
MODELS = [
    ("smollm2-135m-instruct", "chat"),
    ("organization/a-model-with-a-very-long-name-indeed", ""),
    ("whisper-tiny.en", "transcription"),
]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal:
    """A start on a terminal of 80 columns, drawn when a test asks."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, width=80, height=40, force_terminal=True, color_system=None
        )
        self.startup = Startup(ServerOptions(), TableView(self.console), self.clock)

    def drawn(self) -> list[str]:
        """The lines of the table as it is now."""
        with self.console.capture() as captured:
            self.console.print(draw(self.startup.state, self.console.width))
        return [line.rstrip() for line in captured.get().splitlines()]

    def last(self, address: Address = ADDRESS) -> list[str]:
        """What remains on the terminal once the server is ready."""
        self.startup.ready(address)
        text = self.file.getvalue()
        return text[text.rindex("Ready in") :].splitlines()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    with terminal.startup:
        yield terminal


def status(model: str, state: ModelState, error: TriptychError | None = None) -> ModelStatus:
    return ModelStatus(model=model, state=state, error=to_info(error) if error else None)


def load_all(startup: Startup, models: list[tuple[str, str]] = MODELS) -> None:
    startup.state.set_kinds((name, kind or "embedding") for name, kind in models)
    for name, _ in models:
        startup.on_model(status(name, "loading"), 0)
        startup.on_model(status(name, "ready"), 300 * MIB)


def row(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.strip().startswith(start))


def test_a_download_is_shown_under_the_model_s_name_with_size_and_speed(terminal: Terminal) -> None:
    startup = terminal.startup
    startup.expect(MODELS)
    progress = startup.progress()
    progress.begin("smollm2-135m-instruct")
    progress.start("Downloading", 98 * MB)
    terminal.clock.now_s += 4
    progress.advance(49 * MB)
    lines = terminal.drawn()
    chat = row(lines, "smollm2")
    assert "\u2588\u2588\u2588\u2591\u2591\u2591 49/98 MB 12.2 MB/s" in chat
    assert "chat" in chat
    assert "waiting" in row(lines, "whisper")
    assert "organization/a-model-wi\u2026" in row(lines, "organization")


@pytest.mark.parametrize(
    ("total", "done", "shown"),
    [(0, 5 * MB, "5.0 MB 1.2 MB/s"), (16_100 * MB, 4_300 * MB, "4.3/16.1 GB 1.1 GB/s")],
)
def test_sizes_that_are_unknown_or_large(
    terminal: Terminal, total: int, done: int, shown: str
) -> None:
    terminal.startup.expect(MODELS)
    progress = terminal.startup.progress()
    progress.begin("whisper-tiny.en")
    progress.start("Downloading", total)
    terminal.clock.now_s += 4
    progress.advance(done)
    assert shown in row(terminal.drawn(), "whisper")


def test_what_follows_a_download_is_named(terminal: Terminal) -> None:
    terminal.startup.expect(MODELS)
    progress = terminal.startup.progress()
    progress.begin("whisper-tiny.en")
    progress.start("Downloading", 75 * MB)
    progress.advance(75 * MB)
    progress.start("Converting", 200)
    progress.advance(50)
    assert "converting 25%" in row(terminal.drawn(), "whisper")
    progress.stop()
    assert "preparing" in row(terminal.drawn(), "whisper"), "it may have failed"
    progress.begin("smollm2-135m-instruct")
    assert "on disk" in row(terminal.drawn(), "whisper")
    load_all(terminal.startup)
    assert "ready, 75.0 MB fetched" in row(terminal.drawn(), "whisper")


def test_a_download_that_was_interrupted_is_not_complete(log: io.StringIO) -> None:
    logs.configure(ServerOptions(), stream=log)
    startup = Startup(ServerOptions(), LogView(), Clock())
    startup.expect(MODELS)
    progress = startup.progress()
    progress.begin("whisper-tiny.en")
    progress.start("Downloading", 75 * MB)
    progress.advance(74 * MB)
    progress.stop()
    assert "downloaded" not in log.getvalue()
    assert startup.state.rows["whisper-tiny.en"].downloaded_bytes == 0


def test_the_last_lines_fit_eighty_columns_and_say_where_to_go(terminal: Terminal) -> None:
    terminal.startup.expect(MODELS)
    load_all(terminal.startup)
    terminal.startup.state.budget_bytes = 20 * 2**30
    terminal.clock.now_s += 19.84
    lines = terminal.last()
    assert lines == [
        "Ready in 19.8 s",
        "  Memory  0.9 of 20.0 GiB  (details on the page's Timeline)",
        "  Page    http://127.0.0.1:8000",
        "  API     http://127.0.0.1:8000/v1  (no API key)",
        '  Try     triptych chat "Hello"  in another terminal',
        "  Stop    Ctrl-C",
    ]


def test_the_lines_follow_the_options(terminal: Terminal) -> None:
    terminal.startup.expect([("voice", "speech")])
    load_all(terminal.startup, [("voice", "speech")])
    options = ServerOptions(api_key=("secret",), page=False)
    lines = terminal.last(Address.of(options, "https://[::]:8000"))
    assert not any(line.startswith("  Page") for line in lines)
    assert "  API     https://[::]:8000/v1  (API key needed)" in lines
    assert '  Try     triptych speak "Hello" -o hello.wav  in another terminal' in lines
    assert not any("secret" in line for line in lines)


@pytest.mark.parametrize(
    "options",
    [ServerOptions(api_key_file="keys"), ServerOptions(admin_key=("secret",))],
)
def test_any_source_of_keys_means_that_a_key_is_needed(options: ServerOptions) -> None:
    assert Address.of(options, "http://127.0.0.1:8000").has_keys


def test_an_engine_without_http_has_no_address(terminal: Terminal) -> None:
    terminal.startup.expect(MODELS)
    load_all(terminal.startup)
    assert [line.split()[0] for line in terminal.last(Address())] == ["Ready", "Stop"]


def test_ready_counts_the_models_that_are_and_says_why_the_others_are_not(
    terminal: Terminal,
) -> None:
    terminal.startup.expect(MODELS)
    load_all(terminal.startup)
    large = ModelTooLarge("whisper-tiny.en can never fit: give --max-length 9056.")
    full = Overloaded("Model x does not fit next to the models in use; try again later.")
    terminal.startup.on_model(status("whisper-tiny.en", "failed", large), 0)
    terminal.startup.on_model(status(MODELS[1][0], "unloaded", full), 0)
    drawn = terminal.drawn()
    lines = terminal.last()
    text = " ".join(" ".join(lines).split())
    assert "Ready in 0.0 s with 1 of 3 models" in text
    assert "whisper-tiny.en: can never fit: give --max-length 9056." in text
    assert "there is no room next to the other models. A request for it loads it" in text
    assert "try again" not in text
    assert all(len(line) <= 80 for line in (*lines, *drawn))


def test_models_for_the_first_use_are_no_failure(terminal: Terminal) -> None:
    terminal.startup.expect(MODELS)
    terminal.startup.state.set_kinds(MODELS)
    for name, _ in MODELS:
        terminal.startup.on_model(status(name, "unloaded"), 0)
    assert "on first use" in row(terminal.drawn(), "whisper")
    assert terminal.last()[0] == "Ready in 0.0 s"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The root log, put back afterwards."""
    root = logging.getLogger()
    kept = root.handlers[:], root.level
    stream = io.StringIO()
    yield stream
    root.handlers[:], root.level = kept


def plain_start(log: io.StringIO, options: ServerOptions) -> list[str]:
    """The log of a start with a download of 25 s and a model that does not fit."""
    logs.configure(options, stream=log)
    clock = Clock()
    startup = Startup(options, LogView(), clock)
    startup.expect(MODELS)
    progress = startup.progress()
    progress.begin("smollm2-135m-instruct")
    progress.start("Downloading", 98 * MB)
    for _ in range(5):
        clock.now_s += 5
        progress.advance(98 * MB // 5)
    progress.start("Converting", 10)
    progress.stop()
    progress.begin("whisper-tiny.en")
    clock.now_s += 20
    progress.advance(10)  # a file that is hashed outside a task
    progress.start("Verifying", 10)
    progress.stop()
    load_all(startup)
    startup.on_model(status("whisper-tiny.en", "failed", ModelTooLarge("It can never fit.")), 0)
    startup.take(Lookup(phase="weights", what="one", seconds=1.0, is_hit=False, reason="absent"))
    startup.ready(ADDRESS)
    startup.on_model(status("whisper-tiny.en", "loading"), 0)
    startup.restart()
    startup.ready(ADDRESS)
    return log.getvalue().splitlines()


def test_without_a_terminal_each_event_is_a_line(log: io.StringIO) -> None:
    lines = [line.partition("start: ")[2] for line in plain_start(log, ServerOptions())]
    chat = "model=smollm2-135m-instruct"
    assert (
        lines[:6]
        == [
            'start models="' + ", ".join(name for name, _ in MODELS) + '"',
            f"downloading {chat} size_mb=98.0",
            f"downloading {chat} done_mb=39.2 size_mb=98.0 mb_per_s=3.92",
            f"downloading {chat} done_mb=78.4 size_mb=98.0 mb_per_s=3.92",
            f"downloaded {chat} size_mb=98.0 elapsed_s=25.0",
            f"converting {chat} size_mb=0.0",
        ]
        or lines[5] == f"converting {chat} size_mb=0.0"
    )
    assert f"loading {chat}" in lines
    assert f"loaded {chat} memory_mib=300.0 elapsed_s=0.0" in lines
    assert 'model not loaded model=whisper-tiny.en reason="It can never fit."' in lines
    assert not any(
        "verifying" in line or "none " in line or "phase=weights" in line for line in lines
    )
    ready = next(line for line in lines if line.startswith("ready phase"))
    assert "num_ready=2 num_models=3 memory_mib=600.0" in ready
    assert lines[-1].startswith("ready again"), "a later load is no event of the start"


def test_in_json_numbers_are_fields(log: io.StringIO) -> None:
    lines = [json.loads(line) for line in plain_start(log, ServerOptions(log_format="json"))]
    (weights,) = [line for line in lines if line.get("phase") == "weights"]
    assert (weights["elapsed_s"], weights["note"]) == (1.0, "hits 0, misses 1; one: absent")
    (ready,) = [line for line in lines if line.get("phase") == "ready"]
    assert (ready["level"], ready["num_ready"], ready["num_models"]) == ("warning", 2, 3)
    assert ready["url"] == ADDRESS.url


def test_lines_of_children_pass_through_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    lines = ChildLines()
    os.write(lines.fd, b"one\ntwo \xff\n")
    lines.close()
    assert stream.getvalue() == "one\ntwo \ufffd\n"


class FailsOnce(io.StringIO):
    """An error output whose first line fails."""

    has_failed = False

    def write(self, text: str) -> int:
        if self.has_failed:
            return super().write(text)
        self.has_failed = True
        raise OSError(errno.EIO, "Input/output error")


def test_a_line_that_cannot_be_written_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FailsOnce()
    monkeypatch.setattr(sys, "stderr", stream)
    lines = ChildLines()
    os.write(lines.fd, b"lost\nnext\n")
    lines.close()
    assert stream.getvalue() == "next\n"


class Stopped(io.StringIO):
    """An error output that accepts nothing until `resumed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed = threading.Event()

    def write(self, text: str) -> int:
        self.resumed.wait()
        return super().write(text)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no larger pipes")
def test_children_do_not_wait_for_a_terminal_that_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stopped()
    monkeypatch.setattr(sys, "stderr", stream)
    lines = ChildLines()
    os.set_blocking(lines.fd, False)
    text = b"x" * 1023 + b"\n"
    try:
        assert os.write(lines.fd, text * 900) == len(text) * 900
    finally:
        stream.resumed.set()
        lines.close()


def screen(text: str) -> list[str]:
    """The lines on a terminal after `text`, without colors."""
    lines, at, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        match part:
            case "\r":
                column = 0
            case "\n":
                at += 1
                lines += [""] * (at == len(lines))
            case "\x1b[1A":
                at -= 1
            case "\x1b[2K":
                lines[at] = ""
            case _ if not part.startswith("\x1b"):
                end = column + len(part)
                lines[at] = lines[at][:column].ljust(column) + part + lines[at][end:]
                column = end
    return [line.rstrip() for line in lines]


def read_all(fd: int) -> str:
    """The output on a terminal whose other end is closed, which Linux reports as an error."""
    chunks = []
    with os.fdopen(fd, "rb", buffering=0) as reader, suppress(OSError):
        while chunk := reader.read(65536):
            chunks.append(chunk)
    return b"".join(chunks).decode()


@pytest.mark.usefixtures("log")
def test_log_lines_remain_above_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        logs.configure(ServerOptions(), has_color=False)
        view = TableView(Console(stderr=True, width=80, height=40))
        with Startup(ServerOptions(), view) as startup:
            startup.expect(MODELS)
            logging.getLogger("triptych.part").warning("careful")
    lines = screen(read_all(ours))
    assert lines[0].endswith("warning part: careful")
    assert row(lines[1:], "whisper")


def test_the_table_is_for_terminals_with_text_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(Startup(ServerOptions())._view, TableView)
    assert isinstance(Startup(ServerOptions(log_format="json"))._view, LogView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(Startup(ServerOptions())._view, LogView)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert isinstance(Startup(ServerOptions())._view, LogView)
