"""Results in a file: kept as they come, found again, in the order of the rows at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triptych.core.bulk.results import ResultFile
from triptych.core.errors import ConfigError


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_found_by_another_run(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = ResultFile(path), ResultFile(path)
    with first.opened():
        first.add("b", {"text": "naïve \ud800"})
        first.add("a", {"text": "one"})
        first.add("c", {"error": {"code": "x"}})
    with second.opened():
        assert second.holds("a") == {"text": "one", "row": "a"}
        assert second.holds("b") == {"text": "naïve \ud800", "row": "b"}
        assert second.holds("c") is None, "what failed is asked again"
        assert second.holds("d") is None
        second.add("c", {"text": "three"})
        assert [line["row"] for line in lines(path)] == ["b", "a", "c", "c"], "nothing goes yet"
        second.keep(["c", "a"])
        assert [line["row"] for line in lines(path)] == ["c", "a"]
        assert [second.holds(key)["row"] for key in "ac"] == ["a", "c"]  # type: ignore[index]


def test_what_was_not_written_whole_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"row": "a"}\nnothing\n[1]\n{"other": 1}\n{"row": "b"}\n{"row": "c"')
    found = ResultFile(path)
    with found.opened():
        assert [key for key in "abc" if found.holds(key)] == ["a", "b"]
        found.add("d", {})
        assert [key for key in "abd" if found.holds(key)] == ["a", "b", "d"]
        found.keep(["b"])
    assert path.read_bytes() == b'{"row": "b"}\n'
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_one_run_at_a_time_writes_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        ResultFile(path).opened(),
        pytest.raises(ConfigError, match="another run writes there"),
        ResultFile(path).opened(),
    ):
        pass
    with ResultFile(path).opened():
        pass


def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "mine"}\nand "this"')
    with pytest.raises(ConfigError, match="Name another file"), ResultFile(path).opened():
        pass
    assert path.read_text() == '{"prompt": "mine"}\nand "this"'


@pytest.mark.parametrize(
    "content",
    [
        b"thirty-two bytes of a plain text",
        b"two lines\nof text",
        b'{"a": 1}',
        b'{"row": "x", "text": "cut o',
        b"\x00\xff\xfe",
        b"\n",
        b"[1, 2]\n",
    ],
)
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="something else"), ResultFile(file).opened():
        pass
    assert file.read_bytes() == content


def test_a_file_that_is_empty_is_written(tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.touch()
    with ResultFile(file).opened():
        pass


def test_a_file_that_cannot_be_written_is_a_wrong_option(tmp_path: Path) -> None:
    found = ResultFile(tmp_path / "absent" / "out.jsonl")
    with pytest.raises(ConfigError, match="cannot be written"), found.opened():
        pass
