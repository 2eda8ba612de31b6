"""Results in a file: kept as they come, found again, in the order of the rows at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triptych.core.bulk.results import ResultFile
from triptych.core.errors import ConfigError


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


A, B, C, D = (f"{name * 24}" for name in "abcd")


def test_records_are_found_by_another_run(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = ResultFile(path), ResultFile(path)
    with first.opened():
        first.add(B, {"text": "naïve \ud800"})
        first.add(A, {"text": "one"})
        first.add(C, {"error": {"code": "x"}})
    with second.opened():
        assert second.holds(A) == {"text": "one", "row": A}
        assert second.holds(B) == {"text": "naïve \ud800", "row": B}
        assert second.holds(C) is None, "what failed is asked again"
        assert second.holds(D) is None
        second.add(C, {"text": "three"})
        assert [line["row"] for line in lines(path)] == [B, A, C, C], "nothing goes yet"
        second.keep([C, A])
        assert [line["row"] for line in lines(path)] == [C, A]
        assert [second.holds(key)["row"] for key in (A, C)] == [A, C]  # type: ignore[index]


def test_what_was_not_written_whole_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = [f'{{"row": "{key}"}}\n' for key in (A, f"{A}-2", B)]
    path.write_text("".join(whole) + f'{{"row": "{C}"')
    found = ResultFile(path)
    with found.opened():
        assert [key for key in (A, f"{A}-2", B, C) if found.holds(key)] == [A, f"{A}-2", B]
        found.add(D, {})
        assert [key for key in (A, B, D) if found.holds(key)] == [A, B, D]
        found.keep([B])
    assert path.read_text() == whole[2]
    assert list(tmp_path.iterdir()) == [path], "nothing is left next to it"


def test_one_run_at_a_time_writes_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        ResultFile(path).opened(),
        pytest.raises(ConfigError, match="another run is writing"),
        ResultFile(path).opened(),
    ):
        pass
    with ResultFile(path).opened():
        pass


def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "mine"}\nand "this"')
    with pytest.raises(ConfigError, match="name another file"), ResultFile(path).opened():
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
        b'{"row": 1, "name": "Ann"}\n{"row": 2, "name": "Bob"}\n',
        b'{"row": "Ann"}\n',
        b'{"row": "aaaaaaaaaaaaaaaaaaaaaaaa"}\n{"name": "Bob"}\n',
    ],
)
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="not a result file"), ResultFile(file).opened():
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
