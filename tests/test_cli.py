"""The `triptych` command: help, errors, exit codes."""

import argparse
import os
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from triptych import cli
from triptych.core.errors import EngineDown, InvalidRequest, WeightsError
from triptych.core.options.command import Command
from triptych.core.options.table import declared

Run = Callable[[argparse.Namespace], int]


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Put a function in the place of `triptych serve`."""

    def install(run: Run) -> None:
        module = types.ModuleType("fake_serve")
        vars(module).update(add_arguments=lambda parser: None, run=run)
        monkeypatch.setitem(sys.modules, "triptych.serve", module)

    return install


def _raise(error: BaseException) -> Run:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_overview_lists_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["help"]):
        assert cli.main(argv) == 0
        text = capsys.readouterr().out
        assert all(f"  {command.name} " in text for command in cli.COMMANDS)
        assert "examples:" in text


def test_version_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == cli.main(["version"]) == 0
    assert capsys.readouterr().out.count("triptych 0.") == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["srve"], "did you mean `triptych serve`?"),
        (["xyzzy"], "`triptych --help` lists the commands"),
        (["--serve"], "unknown option '--serve'"),
        (["config", "--prot", "1"], "did you mean --port?"),
        (["config", "--port"], "expected one argument; see `triptych config --help`"),
        (["config", "--format", "xml"], "invalid choice"),
        (["config", "--mem-fraction-static", "0.8"], "use --device-memory-utilization"),
        (["config", "--port", "70000"], "must be at least 0 and at most 65535"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WeightsError("model.safetensors is\ncut short."), 2),
        (InvalidRequest("no"), 2),
        (EngineDown("gone"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    handle: Callable[[Run], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    handle(_raise(error))
    assert cli.main(["serve"]) == code
    assert capsys.readouterr().err.count("\n") == (0 if code == 130 else 1)


def test_debug_shows_the_traceback(
    handle: Callable[[Run], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle(_raise(EngineDown("gone")))
    monkeypatch.setenv("TRIPTYCH_LOG_LEVEL", "debug")
    assert cli.main(["serve"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_exit_code_is_the_handlers(handle: Callable[[Run], None]) -> None:
    handle(lambda args: 3)
    assert cli.main(["serve"]) == 3


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_reader_that_leaves_ends_the_command_quietly(form: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "triptych", "config", "--format", form],
        stdout=write_end,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


def test_markup_in_an_error_is_shown_as_it_is(
    handle: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    handle(_raise(WeightsError("tensor [bold]x[/] is missing.")))
    cli.main(["serve"])
    assert "[bold]x[/]" in capsys.readouterr().err


def test_short_help_lists_common_options_and_full_help_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["serve", flag])
        texts.append(capsys.readouterr().out)
    short, full = texts
    assert "--port" in short
    assert "--max-model-len" not in short
    assert short.count("\n") < 70
    assert "`triptych serve --help-all` lists" in short
    for option in declared().values():
        assert all(spelling in full for spelling in option.flags)
    assert all(example in text for text in texts for example in ("triptych serve\n",))


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_short_help_is_no_list_of_server_options(command: Command) -> None:
    assert command.parser().format_help().count("\n") < 110
