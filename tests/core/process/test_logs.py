"""Log lines as text and JSON, and the levels of modules."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from triptych.core.errors import ConfigError
from triptych.core.options.config import ServerOptions
from triptych.core.options.table import make_config
from triptych.core.process import logs


@pytest.fixture(autouse=True)
def _keep_loggers() -> Iterator[None]:
    root, part = logging.getLogger(), logging.getLogger("triptych.part")
    kept = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = kept
    part.setLevel(logging.NOTSET)


def written(options: ServerOptions, *, has_color: bool | None = None) -> list[str]:
    """The lines of a few log calls."""
    stream = io.StringIO()
    logs.configure(options, stream=stream, has_color=has_color)
    logging.getLogger("triptych.part.near").debug("detail")
    logging.getLogger("triptych.part.near").info("said", extra=logs.fields(plain="a", odd="b c\nd"))
    logging.getLogger("library.part").warning("careful")
    return stream.getvalue().splitlines()


def test_text_has_the_date_and_short_names() -> None:
    said, careful = written(ServerOptions())
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(stamp + r' info near: said plain=a odd="b c\\nd"', said)
    assert re.fullmatch(stamp + " warning library.part: careful", careful), "not ours: as it is"


def test_warnings_have_a_color_on_a_terminal() -> None:
    said, careful = written(ServerOptions(), has_color=True)
    assert "\x1b" not in said
    assert "\x1b[33mwarning library.part: careful\x1b[0m" in careful


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    assert logs.can_color(terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not logs.can_color(terminal)


def test_json_keeps_the_whole_name_and_types() -> None:
    said, _ = map(json.loads, written(ServerOptions(log_format="json")))
    assert (said["logger"], said["plain"]) == ("triptych.part.near", "a")


def test_a_module_has_a_level_of_its_own() -> None:
    options = ServerOptions(log_level="error", log_module_level=("triptych.part=debug",))
    assert [line.split()[3] for line in written(options)] == ["near:", "near:"]


@pytest.mark.parametrize(
    ("level", "name"),
    [(logging.DEBUG, "debug"), (logging.INFO + 5, "warning"), (logging.CRITICAL, "error")],
)
def test_the_level_of_this_process(level: int, name: str) -> None:
    logging.getLogger().setLevel(level)
    assert logs.current_level() == name


def test_lines_follow_the_error_output_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", first)
    logs.configure(ServerOptions())
    logging.getLogger("triptych.part").info("one")
    monkeypatch.setattr("sys.stderr", second)
    logging.getLogger("triptych.part").info("two")
    assert first.getvalue().endswith("part: one\n")
    assert second.getvalue().endswith("part: two\n")


@pytest.mark.parametrize("entry", ["debug", "=debug", "triptych.core=loud", "triptych.core"])
def test_a_malformed_level_is_explained(entry: str) -> None:
    with pytest.raises(ConfigError, match=f"^--log-module-level {entry}: write MODULE=LEVEL"):
        make_config({"log_module_level": (entry,)})
