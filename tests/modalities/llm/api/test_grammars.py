"""Grammars of callers, checked in children that are there before they are needed."""

from __future__ import annotations

from pathlib import Path

from support.child_processes import grammar_checkers
from support.http import until
from support.text_models import write_text_folder
from triptych.core.grammar.source import Constraint
from triptych.modalities.llm.api.grammars import GrammarChecker


async def test_a_child_is_started_ahead_and_checks_the_first_grammar(tmp_path: Path) -> None:
    before = set(grammar_checkers())
    write_text_folder(tmp_path)
    checker = GrammarChecker(tmp_path, 260)
    try:
        checker.start()
        checker.start()
        until(lambda: len(set(grammar_checkers()) - before) == 1)
        assert "x" in await checker.check(Constraint("regex", "x+", "guided_regex"))
    finally:
        await checker.close()
    assert not set(grammar_checkers()) - before
