"""`triptych config` prints what `triptych serve` would run with."""

from pathlib import Path

import pytest
import yaml

from triptych.cli import main
from triptych.core.options.table import declared


def test_table_says_where_values_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_THREADS", "3")
    assert main(["config", "--changed", "--port", "81", "--api-key", "hush"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["threads", "3", "TRIPTYCH_THREADS"],
        ["port", "81", "--port"],
        ["api_key", "***", "--api-key"],
    ]


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_dump_is_a_config_file(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--format", form, "--page-size", "64", "--model", "a"]) == 0
    first = capsys.readouterr().out
    path = tmp_path / "config"
    path.write_text(first)
    assert main(["config", "--format", form, "--config-file", str(path)]) == 0
    assert capsys.readouterr().out == first
    assert sum(map(len, yaml.safe_load(first).values())) == len(declared())
