"""Filling the gap between two texts, with models that were trained to (fill in the middle).

Owns the tokens by which families mark the two texts, and the prompt that they make. The method is
that of Bavarian et al. (2022, "Efficient Training of Language Models to Fill in the Middle"). Knows
no routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

_BEFORE, _AFTER = "{before}", "{after}"
_PROMPTS = (
    ("<|fim_prefix|>", _BEFORE, "<|fim_suffix|>", _AFTER, "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", _BEFORE, "<fim_suffix>", _AFTER, "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", _BEFORE, "<fim-suffix>", _AFTER, "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", _BEFORE, "<｜fim▁hole｜>", _AFTER, "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
    ("<|code_prefix|>", _BEFORE, "<|code_suffix|>", _AFTER, "<|code_middle|>"),  # GLM
    ("▁<PRE>", _BEFORE, "▁<SUF>", _AFTER, "▁<MID>"),  # CodeLlama
    ("<[fim-suffix]>", _AFTER, "<[fim-prefix]>", _BEFORE, "<[fim-middle]>"),  # Seed-Coder
    ("[SUFFIX]", _AFTER, "[PREFIX]", _BEFORE),  # Codestral
)
_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    *("<fim_pad>", "<file_sep>", "<repo_name>", "▁<EOT>"),
)
"""Tokens that may follow a filled gap, in addition to the model's EOS tokens."""


@dataclass(frozen=True, slots=True)
class GapPrompt:
    """The prompt of one model: ids of tokens, and the places of the two texts.

    `end_ids` end an answer.
    """

    parts: tuple[int | str, ...]
    end_ids: tuple[int, ...]

    def ending(self, stop_token_ids: Sequence[int] | None) -> list[int]:
        """These stop tokens, and those after a filled gap."""
        return [*dict.fromkeys((*(stop_token_ids or ()), *self.end_ids))]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> GapPrompt | None:
        """The prompt of the first family whose tokens a tokenizer has; `None` if it has none's."""
        for prompt in _PROMPTS:
            found = [part if part[0] == "{" else tokenizer.token_to_id(part) for part in prompt]
            parts = tuple(part for part in found if part is not None)
            if len(parts) == len(prompt):
                ends = map(tokenizer.token_to_id, _ENDS)
                return cls(parts, tuple(end for end in ends if end is not None))
        return None

    def ids(self, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """The prompt's ids, of the texts' ids."""
        texts = {_BEFORE: before, _AFTER: after}
        runs = (texts[part] if isinstance(part, str) else (part,) for part in self.parts)
        return tuple(token for run in runs for token in run)
