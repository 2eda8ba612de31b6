"""Filling the gap between two texts, with models that were trained to (fill in the middle).

Owns the tokens by which families mark the two texts, and the prompt that they make. The method is
that of Bavarian et al. (2022, "Efficient Training of Language Models to Fill in the Middle"). Knows
no routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from triptych.core.errors import ContextLengthExceeded

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
_PROJECTS = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
"""Tokens before the name of a project, and of each of its files."""
_PROJECT, _FILE = "myproject\n", "filename\n"  # as llama.cpp calls them
_SNIPPET = "\n\n--- snippet ---\n\n"
"""The text before a file where there is no token for it, llama.cpp's."""


@dataclass(frozen=True, slots=True)
class GapPrompt:
    """The prompt of one model: ids of tokens, and the places of the two texts.

    `end_ids` end an answer. `project_id` and `file_id` begin the names of a project and of its
    files, for models that were trained on whole projects.
    """

    parts: tuple[int | str, ...]
    end_ids: tuple[int, ...]
    project_id: int | None = None
    file_id: int | None = None

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
                ends = tuple(_found(tokenizer, _ENDS))
                marks = (next(_found(tokenizer, each), None) for each in (_PROJECTS, _FILES))
                return cls(parts, ends, *marks)
        return None

    def ids(self, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """The prompt's ids, of the texts' ids."""
        texts = {_BEFORE: before, _AFTER: after}
        runs = (texts[part] if isinstance(part, str) else (part,) for part in self.parts)
        return tuple(token for run in runs for token in run)

    def further(
        self, texts: Sequence[tuple[str, str]], encode: Callable[[str], tuple[int, ...]], room: int
    ) -> tuple[int, ...]:
        """The ids before a prompt for further files, as pairs of name and text.

        Where they do not fit into `room` tokens the first are left out. `encode` raises
        `ContextLengthExceeded` for a text that is too long in any case. The form is llama.cpp's.
        """
        is_marked = self.file_id is not None
        tail = (self.file_id, *encode(_FILE)) if self.file_id is not None else ()
        head = (self.project_id, *encode(_PROJECT)) if self.project_id is not None else ()
        room -= len(head) + len(tail)
        runs: list[tuple[int, ...]] = []
        for name, text in reversed(texts):
            try:
                run = encode(f"{name}\n{text}\n" if is_marked else f"{_SNIPPET}{text}")
            except ContextLengthExceeded:
                break
            run = run if self.file_id is None else (self.file_id, *run)
            room -= len(run)
            if room < 0:
                break
            runs.append(run)
        return (*head, *(token for run in reversed(runs) for token in run), *tail) if runs else ()


def _found(tokenizer: Tokenizer, tokens: Iterable[str]) -> Iterator[int]:
    """The ids of those tokens that a tokenizer has."""
    ids = map(tokenizer.token_to_id, tokens)
    return (token for token in ids if token is not None)
