"""The bar shows on a terminal and nowhere else."""

import sys

import pytest

from triptych.core.weights.progress import RichProgress


def work() -> None:
    progress = RichProgress()
    progress.start("Downloading [x]", 0)
    progress.start("Converting [x]", 100)
    progress.advance(100)
    progress.stop()
    progress.advance(1)
    progress.stop()


def test_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    work()
    out, err = capsys.readouterr()
    assert out == ""
    assert "Converting [x]" in err


def test_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.warns(UserWarning, match="ipywidgets"):  # what a bar is drawn with there
        work()


def test_nothing_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    assert capsys.readouterr() == ("", "")
