"""Prose of the product reads plainly: docstrings name their subject, things are no persons."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("core", "schedulers", "modalities", "src")
_TEXTS = {".py", ".js", ".html", ".toml", ".md", ".c", ".h"}
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_HEADLESS = re.compile(r"(What|Those|Some|Whoever|Whatever|To be|Have|Nobody|Everybody)\b")
_PERSONS = re.compile(r"\b(told|tells|nobody|whoever|anew)\b", re.IGNORECASE)
_MIN_WORDS = 3
_MOST_LINES = 20


def _files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.*"))


@cache
def docstrings() -> list[tuple[str, str]]:
    """Each docstring of the product, with its place."""
    return [
        (f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", text)
        for file in _files(*PRODUCT)
        if file.suffix == ".py"
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, _DEFINITIONS) and (text := ast.get_docstring(node))
    ]


def test_docstrings_name_their_subject() -> None:
    assert len(docstrings()) > 5000, "the whole product was read"
    assert [place for place, text in docstrings() if _HEADLESS.match(text)] == []


def test_docstrings_are_phrases() -> None:
    assert [place for place, text in docstrings() if len(text.split()) < _MIN_WORDS] == []


def test_things_are_no_persons() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in (ROOT / "README.md", *_files(*PRODUCT, "docs"))
        if file.suffix in _TEXTS
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if _PERSONS.search(line)
    ]
    assert len(found) <= _MOST_LINES, found
