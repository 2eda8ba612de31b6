"""A run over rows: what is answered, kept, and asked again; keys; where rows are spread."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from triptych.core.bulk.cluster_options import add_cluster_options, read_cluster
from triptych.core.bulk.results import ResultFile
from triptych.core.bulk.rows import BulkRow, Record, RowResult, assign_keys, check_unique_stems
from triptych.core.bulk.run import BulkRun
from triptych.core.bulk.work import Cluster, RowWork
from triptych.core.errors import ConfigError, EngineDown, InvalidRequest
from triptych.core.options.config import Config


@dataclass
class Doubler:
    """A "pipeline": numbers become twice as much; it has what it was asked."""

    asked: list[Any] = field(default_factory=list)


def double(pipeline: Doubler, rows: Sequence[Record], options: Record) -> Iterator[RowResult]:
    for row in rows:
        pipeline.asked.append(row["n"])
        if row["n"] == "down":
            yield RowResult.failed(EngineDown("It is gone."))
        elif not isinstance(row["n"], int):
            yield RowResult.failed(InvalidRequest("No number."))
        else:
            yield RowResult({"n2": 2 * row["n"]}, {".txt": str(2 * row["n"]).encode()})


def make(folder: Path, numbers: Sequence[Any], pipeline: Doubler, **changes: Any) -> BulkRun:
    rows = [
        BulkRow(number=at, entry={"n": n}, asked={"n": n}, stem=f"sub/{at}-{n}")
        for at, n in enumerate(numbers)
    ]
    work = RowWork(pipeline="", answer=f"{__name__}:double", options={}, num_at_once=2)
    made = BulkRun(
        rows=assign_keys(rows, {}),
        work=work,
        sink=ResultFile(folder / "results.jsonl"),
        open_pipeline=lambda: nullcontext(pipeline),
        folder=folder,
    )
    return replace(made, **changes)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`double` is found by this module, which pytest imported under a name of its own."""
    monkeypatch.setattr("triptych.core.bulk.run.load", lambda place: double)


@pytest.mark.usefixtures("here")
def test_halves_of_files_that_a_killed_run_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*given: object) -> None:
        raise OSError("killed")

    own = tmp_path / "sub" / ".download.partial"
    own.parent.mkdir()
    own.touch()
    with monkeypatch.context() as patched:  # as by SIGKILL: no half is taken back
        patched.setattr("os.replace", end)
        patched.setattr("os.unlink", end)
        with pytest.raises(ConfigError):
            make(tmp_path, [1], Doubler()).run("doubled")
    assert len(list(own.parent.iterdir())) == 2
    make(tmp_path, [1], Doubler()).run("doubled")
    left = {each.name for each in own.parent.iterdir()}
    assert left == {own.name, "0-1.txt"}, "what is the caller's own stays"


@pytest.mark.usefixtures("here")
def test_a_run_goes_on_where_an_engine_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Doubler()
    with pytest.raises(EngineDown, match="same command again"):
        make(tmp_path, [1, "x", "down", 4], first).run("doubled")
    assert [record.get("n2") for record in records(tmp_path)] == [2, None]
    second = Doubler()
    rows = make(tmp_path, [1, "x", 3, 4], second)
    assert rows.run("doubled") == 1
    assert second.asked == ["x", 3, 4]
    assert [record.get("n2") for record in records(tmp_path)] == [2, None, 6, 8]
    assert (tmp_path / "sub" / "3-4.txt").read_text() == "8"
    assert records(tmp_path)[3]["files"] == ["sub/3-4.txt"]
    shown = capsys.readouterr().err
    assert "row 1: No number." in shown
    assert "Rows: 4, doubled: 2, there before: 1, failed: 1." in shown


@pytest.mark.usefixtures("here")
def test_a_file_that_is_gone_is_made_again(tmp_path: Path) -> None:
    make(tmp_path, [1, 2], Doubler()).run("doubled")
    (tmp_path / "sub" / "1-2.txt").unlink()
    again = Doubler()
    assert make(tmp_path, [1, 2], again).run("doubled") == 0
    assert again.asked == [2]
    idle = Doubler()
    assert make(tmp_path, [1, 2], idle, open_pipeline=lambda: 1 / 0).run("doubled") == 0


def test_keys_follow_what_is_asked_and_not_where_it_stands() -> None:
    rows = [BulkRow(number=n, entry={"n": n % 2}, asked={}) for n in range(4)]
    keys = [row.key for row in assign_keys(rows, {"model": "a"})]
    assert len(set(keys)) == 4
    assert [row.key for row in assign_keys(rows[1:], {"model": "a"})][:2] == [keys[1], keys[0]]
    assert set(keys).isdisjoint(row.key for row in assign_keys(rows, {"model": "b"}))


def test_files_of_one_name_are_refused() -> None:
    rows = [BulkRow(number=n, entry={}, asked={}, stem="same") for n in (1, 2)]
    with pytest.raises(ConfigError, match="Rows 1 and 2"):
        check_unique_stems(rows)


def cluster(*argv: str) -> Cluster | None:
    parser = argparse.ArgumentParser()
    add_cluster_options(parser)
    return read_cluster(parser.parse_args(argv))


def test_rows_stay_here_unless_a_cluster_is_named() -> None:
    assert cluster() is None
    found = cluster("--ray-address", "auto", "--replicas", "2..4")
    assert found is not None
    assert (found.address, found.least, found.most) == ("auto", 2, 4)
    for argv in (["--replicas", "2"], ["--ray-address", "auto", "--replicas", "x"]):
        with pytest.raises(ConfigError, match="--replicas"):
            cluster(*argv)


def test_without_ray_a_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.data", None)
    place = Cluster(address="auto", least=1, most=1, config=Config())
    with pytest.raises(ConfigError, match=r"pip install '\.\[ray\]'"):
        make(tmp_path, [1], Doubler(), cluster=place).run("doubled")
