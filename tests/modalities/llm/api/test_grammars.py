"""Grammars of callers, checked in children that are there before they are needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.child_processes import grammar_checkers
from support.http import until
from support.text_models import write_text_folder
from triptych.core.grammar.source import Constraint
from triptych.core.options.config import ModelOptions
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
def test_models_that_are_told_of_tools_get_one_ahead(
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
