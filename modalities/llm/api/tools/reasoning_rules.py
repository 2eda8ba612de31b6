"""The tokens around a model's reasoning, for the engine that counts them.

Owns the tokens of a family's marks. If the mark that ends reasoning is not a single token, the
engine cannot see it, and there are no rules.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from triptych.core.engine_api.tokens import ReasoningRules
from triptych.core.text.tokenizer import encode
from triptych.modalities.llm.api.tools.formats import REASONING_FORMATS, AnswerSyntax
from triptych.modalities.llm.api.tools.harmony import ANALYSIS, ENDS, FINAL

_BLANKS = (" ", "\n", "\n\n", "\r\n")


def reasoning_rules(syntax: AnswerSyntax, tokenizer: Tokenizer) -> ReasoningRules | None:
    """The rules of reasoning in `syntax`; `None` without reasoning, or without tokens as marks."""
    if syntax.calls == "harmony":
        return _rules(tokenizer, ANALYSIS, ENDS, FINAL, reopen=True)
    reasoning = REASONING_FORMATS.get(syntax.reasoning)
    if reasoning is None:
        return None
    return _rules(tokenizer, reasoning.open, (reasoning.close,), reasoning.close, reopen=False)


def _rules(
    tokenizer: Tokenizer, opens: str, closes: tuple[str, ...], ending: str, *, reopen: bool
) -> ReasoningRules | None:
    found = [tokenizer.token_to_id(mark) for mark in closes]
    close_ids = tuple(token_id for token_id in found if token_id is not None)
    if len(close_ids) < len(closes):
        return None
    blanks = [_ids(tokenizer, text) for text in _BLANKS]
    return ReasoningRules(
        opens=_ids(tokenizer, opens),
        closes=close_ids,
        ending=_ids(tokenizer, ending),
        blanks=tuple(sorted({ids[0] for ids in blanks if len(ids) == 1})),
        reopen=reopen,
    )


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    (encoding,) = encode(tokenizer, [text], add_special_tokens=False)
    return tuple(encoding.ids)
