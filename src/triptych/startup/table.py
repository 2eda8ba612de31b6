"""The start as a terminal shows it: the table of models, and the last lines.

Owns the layout, which fits 80 columns. Draws what a `StartState` holds and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from triptych import __version__
from triptych.core.errors import ModelTooLarge, Overloaded
from triptych.core.options.config import ServerOptions
from triptych.startup.state import ModelRow, StartState

_BAR_COLUMNS = 6
_OTHER_COLUMNS = 56  # of a line, without the name
_GIB = 2**30
_STATES = MappingProxyType(
    {"waiting": "waiting", "fetching": "preparing", "found": "on disk", "later": "on first use"}
)
_REFUSED = MappingProxyType({ModelTooLarge.code: "too large", Overloaded.code: "no room now"})
_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "chat": 'triptych chat "Hello"',
        "vision": 'triptych see photo.jpg "What is this?"',
        "speech": 'triptych speak "Hello" -o hello.wav',
        "image": 'triptych imagine "a red boat" -o boat.png',
        "embedding": 'triptych embed "Hello"',
        "transcription": "triptych transcribe speech.wav",
    }
)
"""A command to try for each kind of model, the most general kind first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the server is: its URL, whether it has a page and wants a key; empty: no HTTP."""

    url: str = ""
    has_page: bool = True
    has_keys: bool = False

    @classmethod
    def of(cls, options: ServerOptions, url: str) -> Self:
        """The address of a server with `options` at `url`."""
        return cls(
            url=url,
            has_page=options.page,
            has_keys=bool(options.api_key or options.api_key_file or options.admin_key),
        )


def draw(state: StartState, width: int) -> RenderableType:
    """Draw the head and a line for each model, within `width` columns."""
    head = Text.assemble((f"Triptych {__version__}", "bold"), "   ", (state.device, "dim"))
    head.truncate(width, overflow="ellipsis")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=max(width - _OTHER_COLUMNS, 8))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", min_width=27)
    grid.add_column(no_wrap=True, justify="right")
    for row in list(state.rows.values()):
        memory = gib(row.memory_bytes) if row.memory_bytes else ""
        grid.add_row(Text(row.name), row.kind, _state(row, state.clock()), memory)
    return Group(head, Padding(grid, (0, 0, 0, 2)))


def last_lines(state: StartState, address: Address, elapsed_s: float) -> Iterator[Text]:
    """The lines below the table once the server is ready."""
    refused = state.refused
    num_models = len(state.rows)
    ready = Text(f"Ready in {elapsed_s:.1f} s", "bold green")
    if refused:
        count = f"{num_models - len(refused)} of {num_models} models"
        ready = Text(f"Ready in {elapsed_s:.1f} s with {count}", "bold yellow")
    yield ready
    for row in refused:
        yield Text.assemble((row.name, "yellow"), f": {reason(row)}")
    yield from (_entry(*entry) for entry in _entries(state, address))


def reason(row: ModelRow) -> str:
    """Why a model is refused, and what to do."""
    if row.error.code == Overloaded.code:
        return (
            "there is no room next to the other models. A request for it loads it in place of an"
            " idle one; --device-memory-utilization or smaller models make room for all."
        )
    return row.error.message.removeprefix(row.name).lstrip()


def gib(num_bytes: float) -> str:
    """Format device memory."""
    return f"{num_bytes / _GIB:.1f} GiB"


def _entries(state: StartState, address: Address) -> Iterator[tuple[str, str, str]]:
    if state.budget_bytes:
        used = f"{state.memory_bytes / _GIB:.1f} of {gib(state.budget_bytes)}"
        where = "on the page's Timeline" if address.has_page else "with --log-level debug"
        yield "Memory", used, f"(details {where})"
    if address.url and address.has_page:
        yield "Page", address.url, ""
    if address.url:
        yield "API", f"{address.url}/v1", "(API key needed)" if address.has_keys else "(no API key)"
    if address.url and (example := _example(state)):
        yield "Try", example, "in another terminal"
    yield "Stop", "Ctrl-C", ""


def _entry(name: str, value: str, note: str) -> Text:
    line = Text.assemble("  ", (f"{name:<8}", "dim"), (value, "bold"))
    return line.append(f"  {note}", "dim") if note else line


def _example(state: StartState) -> str:
    served = {row.kind for row in state.rows.values() if row.step != "refused"}
    return next((example for kind, example in _EXAMPLES.items() if kind in served), "")


def _state(row: ModelRow, now_s: float) -> RenderableType:
    if row.action == "Downloading":
        return _download(row, now_s)
    if row.action is not None:
        share = f" {row.done_bytes / row.total_bytes:.0%}" if row.total_bytes else ""
        return f"{row.action.lower()}{share}"
    if row.step == "refused":
        return Text(_REFUSED.get(row.error.code, "failed"), "yellow")
    if row.step == "loading":
        return Text(f"loading {row.progress:.0%}" if row.progress else "loading", "cyan")
    if row.step == "ready":
        fetched = f", {decimal(row.downloaded_bytes)} fetched" if row.downloaded_bytes else ""
        return Text.assemble(("ready", "green"), fetched)
    return Text(_STATES[row.step], "dim")


def _download(row: ModelRow, now_s: float) -> RenderableType:
    speed = _speed(row.bytes_per_s(now_s))
    if not row.total_bytes:
        return f"{decimal(row.done_bytes)} {speed}"
    num_full = min(_BAR_COLUMNS, _BAR_COLUMNS * row.done_bytes // row.total_bytes)
    bar = Text.assemble(("\u2588" * num_full, "green"), "\u2591" * (_BAR_COLUMNS - num_full))
    return Text.assemble(bar, f" {_amount(row.done_bytes, row.total_bytes)} {speed}")


def _speed(bytes_per_s: float) -> str:
    unit, scale = ("GB", 1e9) if bytes_per_s >= 1e9 else ("MB", 1e6)
    amount = bytes_per_s / scale
    return f"{amount:.{0 if amount >= 100 else 1}f} {unit}/s"


def _amount(num_bytes: int, total_bytes: int) -> str:
    """Format both in one unit."""
    if total_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f}/{total_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f}/{total_bytes / 1e6:.0f} MB"
