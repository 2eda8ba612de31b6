"""The picture of a first start in README.md: what `triptych serve` leaves on a terminal.

python docs/session_image.py                     # fetches the default models into a fresh cache
python docs/session_image.py --model kokoro-82m  # other options of triptych serve

Owns the pseudo-terminal of 80 columns and the picture. It draws the screen that remains, without
the frames of the table before it.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import sys
import tempfile
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).parent / "images" / "session.svg"
COLUMNS, LINES = 80, 40
LAST = b"Ctrl-C"
"""Of the last line of a start."""
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
ERASE = "\x1b[2K"


def start(options: list[str], cache_dir: str) -> str:
    """The terminal's output of a start that is interrupted once it is ready."""
    argv = [sys.executable, "-m", "triptych", "serve", *options, "--cache-dir", cache_dir]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(argv[0], argv)  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    written, is_stopped = b"", False
    while chunk := read(terminal):
        written += b"" if is_stopped else chunk
        if LAST in written and not is_stopped:
            os.write(terminal, b"\x03")
            is_stopped = True
    os.waitpid(pid, 0)
    return written.decode()


def read(terminal: int) -> bytes:
    """The next output; empty once the program has ended."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports the end so
        return b""


def main() -> None:
    """Start a server, and draw what it left."""
    options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as cache_dir:
        written = start(options, cache_dir)
    remaining = written[written.rindex(ERASE) + len(ERASE) :].replace("\r", "")
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=sys.stderr)
    console.print(Text.assemble(("$ ", "dim"), shlex.join(["triptych", "serve", *options])))
    for line in AnsiDecoder().decode(remaining.rstrip()):
        line.rstrip()
        console.print(line)
    console.save_svg(
        str(TARGET), title="triptych serve", unique_id="session", code_format=own_fonts()
    )


def own_fonts() -> str:
    """The library's format without fonts of another host, which pages do not load in pictures."""
    bare = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return bare.replace("Fira Code, monospace", FONTS)


if __name__ == "__main__":
    main()
