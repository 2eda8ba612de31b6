"""Text that arrives in pieces."""

from __future__ import annotations

from triptych.modalities.llm.api.tools.source import TextSource


def test_what_is_skipped_is_not_kept() -> None:
    source = TextSource()
    skipping = source.skip(("</end>", "<other>"))
    for piece in ("some ", "words</", "endless> <", "</en"):
        source.text += piece
        assert next(skipping) is None
        assert (source.text in ("", "</", "<", "</en"), source.taken) == (True, "")
    source.text += "d> more"
    assert next(skipping, "over") == "over"
    assert source.text == "</end> more"


def test_without_an_end_all_is_skipped() -> None:
    source = TextSource(text="some <")
    skipping = source.skip(())
    assert (next(skipping), source.text) == (None, "")
    source.is_over = True
    assert next(skipping, "over") == "over"
