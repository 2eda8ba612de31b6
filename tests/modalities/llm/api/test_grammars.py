"""Grammars of callers, checked in children that are there before they are needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.child_processes import grammar_checkers
from support.http import until
from support.text_models import write_text_folder
from triptych.core.errors import RequestError
from triptych.core.grammar.constraint import Constraint
from triptych.core.options.config import ModelOptions
from triptych.modalities.llm.api import grammar_child
from triptych.modalities.llm.api.grammars import GrammarChecker
from triptych.modalities.llm.api.text import TextModel


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_child_is_started_ahead_and_checks_the_first_grammar(
    tmp_path: Path, is_early: bool
) -> None:
    """A grammar that comes while it starts waits for it, too."""
    before = set(grammar_checkers())
    write_text_folder(tmp_path)
    checker = GrammarChecker(tmp_path, 260)
    try:
        checker.start()
        checker.start()
        if not is_early:
            until(lambda: len(set(grammar_checkers()) - before) == 1)
        assert "x" in await checker.check(Constraint("regex", "x+", "guided_regex"))
        assert len(set(grammar_checkers()) - before) == 1
    finally:
        await checker.close()
    assert not set(grammar_checkers()) - before


@pytest.mark.parametrize(
    ("template", "is_begun"), [("{{ tools }}", True), ("{{ messages }}", False)]
)
def test_models_whose_template_supports_tools_get_one_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, is_begun: bool
) -> None:
    begun: list[GrammarChecker] = []

    def begin(checker: GrammarChecker) -> None:
        begun.append(checker)

    monkeypatch.setattr(GrammarChecker, "start", begin)
    resolved = write_text_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    model = TextModel.open(resolved, ModelOptions())
    model.warm()
    assert begun == [model.grammars] * is_begun


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"items": {"patternProperties": {"^a": True, "a$": True}}}, "#/items"),
        ({"items": {"multipleOf": 2**40}}, "#/items"),
        ({"$id": "https://example.com/a", "items": {"$ref": "b.json"}}, "#/items/$ref"),
        ({"type": "array", "items": {"enum": []}, "minItems": 1}, "#/items"),
        (
            {
                "items": {"type": "integer", "minimum": 1, "maximum": 0},
                "type": "array",
                "minItems": 1,
            },
            "#/items",
        ),
    ],
)
@pytest.mark.parametrize("around", ["", 'start: "x" @form'])
def test_the_child_names_the_place_in_the_callers_schema(
    tmp_path: Path, schema: dict[str, Any], place: str, around: str
) -> None:
    write_text_folder(tmp_path)
    check = grammar_child.prepare(str(tmp_path), 260)["check"]
    parts = [json.dumps(schema).encode(), around.encode()]
    with pytest.raises(RequestError, match=rf"{re.escape(place)}\.$"):
        list(check(b"".join(parts), kind="json_schema", sizes=[*map(len, parts)]))


def test_the_child_names_no_place_where_the_schema_is_not_the_cause(tmp_path: Path) -> None:
    write_text_folder(tmp_path)
    check = grammar_child.prepare(str(tmp_path), 260)["check"]
    parts = [b'{"type": "null"}', b"start: @form nowhere"]
    with pytest.raises(RequestError, match=r"names nowhere.* line 1, column 8\.$"):
        list(check(b"".join(parts), kind="json_schema", sizes=[*map(len, parts)]))
