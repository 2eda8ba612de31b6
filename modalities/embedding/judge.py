"""Language models that judge whether a document answers a query: Qwen3-Reranker.

Owns recognizing one, its prompt, and the two tokens whose scores are compared. No torch here.

The prompt is that of Qwen3-Embedding's report (Zhang et al. 2025, arXiv:2506.05176).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.core.errors import WeightsError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FAMILY, _NAME = "qwen3", "qwen3-reranker"
_MARK = "is_original_qwen3_reranker"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_YES, _NO = "yes", "no"


def is_judge(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder has such a model: by a mark in its config.json, or by its name.

    The files do not differ from those of a chat model of the same family.
    """
    architectures = config.get("architectures") or ()
    is_chat = config.get("model_type") == _FAMILY and "Qwen3ForCausalLM" in architectures
    return is_chat and (
        bool(config.get(_MARK)) or any(_NAME in part.lower() for part in _names(folder))
    )


def _names(folder: Path) -> tuple[str, ...]:
    """The folder's own name, and that of its repository in the hub's cache."""
    return folder.name, *(part for part in folder.parts if part.startswith("models--"))


@dataclass(frozen=True, slots=True)
class JudgePrompt:
    """The parts of a judge's prompt as ids, and the tokens of its answers."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    answers: tuple[int, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> JudgePrompt:
        """Raises `WeightsError` if the tokenizer lacks an answer or a special token."""
        yes, no, start = map(tokenizer.token_to_id, (_YES, _NO, "<|im_start|>"))
        if yes is None or no is None or start is None:
            raise WeightsError("The tokenizer is not that of a Qwen3 reranker.")
        own = type(tokenizer).from_str(tokenizer.to_str())  # others read texts with that one
        own.encode_special_tokens = False
        before, after = (
            tuple(own.encode(text, add_special_tokens=False).ids) for text in (_BEFORE, _AFTER)
        )
        return cls(before, after, (yes, no))

    @staticmethod
    def text(query: str, document: str, instruction: str) -> str:
        """The part of the prompt between, which users write: no special token is in it."""
        instruct = instruction or _INSTRUCTION
        return f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
