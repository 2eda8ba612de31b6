"""A start on a real terminal of 80 columns: `triptych serve` with a fake engine on a pty."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

from support.serve_process import TESTS, write_model

COLUMNS = 80
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_a_start_leaves_its_table_and_a_usable_terminal(tmp_path: Path) -> None:
    models = [f"{name}={write_model(tmp_path / name)}" for name in ("one", "another")]
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    argv = [sys.executable, "-m", "support.serve_process", "fake", "--port", "0", *models]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "TERM": "xterm-256color"}
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        written = _read(terminal, until=b"Ctrl-C")
        process.send_signal(signal.SIGINT)
        written += _read(terminal, until=None)
    os.close(terminal)
    assert process.returncode == 0
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is back"
    remaining = written[written.rindex("\x1b[2K") :].replace("\r", "")
    lines = _CONTROL.sub("", remaining).splitlines()
    assert all(len(line) <= COLUMNS for line in lines[:-1])  # the last is a log line
    words = [line.split() for line in lines]
    assert words[0][0] == "Triptych"
    assert [row[:3] for row in words[1:3]] == [
        ["one", "chat", "ready"],
        ["another", "chat", "ready"],
    ]
    assert [row[0] for row in words[3:9]] == ["Ready", "Memory", "Page", "API", "Try", "Stop"]
    assert "shutting down" in lines[9]
    assert len(lines) == 10


def _read(terminal: int, until: bytes | None) -> str:
    """The output up to a text, or to the end."""
    written = b""
    while until is None or until not in written:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # the end, on Linux
            break
        if not chunk:
            break
        written += chunk
    return written.decode()
