"""The bar shows on a terminal and nowhere else."""

import sys

import pytest

from triptych.core.weights.progress import Action, RichProgress, SilentProgress, WholeDownload


def work() -> None:
    progress = RichProgress()
    progress.begin("some [x]")
    progress.start("Downloading", 0)
    progress.start("Converting", 100)
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
    assert "Converting some [x]" in err


def test_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.warns(UserWarning, match="ipywidgets"):  # what a bar is drawn with there
        work()


def test_several_downloads_are_one_task() -> None:
    seen: list[object] = []

    class Watch(SilentProgress):
        def start(self, action: Action, total_bytes: int) -> None:
            seen.append((action, total_bytes))

        def advance(self, num_bytes: int) -> None:
            seen.append(num_bytes)

    whole = WholeDownload(Watch(), 30)
    for part in (10, 20):
        whole.start("Downloading", part)
        whole.advance(part)
    assert seen == [("Downloading", 30), 10, 20]


def test_nothing_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    assert capsys.readouterr() == ("", "")
