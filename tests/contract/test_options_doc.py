"""docs/options.md is what the declarations say."""

from pathlib import Path

from triptych.core.options.doc import render
from triptych.core.options.refused import FIXED_BY_FLAG, REFUSED
from triptych.core.options.table import declared

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_page_is_current() -> None:
    hint = "run `python -m triptych.core.options.doc > docs/options.md`"
    assert PAGE.read_text(encoding="utf-8") == render(), hint


def test_page_names_every_flag() -> None:
    text = render()
    flags = [flag for option in declared().values() for flag in option.flags]
    assert all(f"`{flag}`" in text for flag in [*flags, *REFUSED, *FIXED_BY_FLAG])
