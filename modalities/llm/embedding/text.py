"""Between text and token ids for an embedding model.

Owns what the API process knows of the model: tokenizer, lengths, instructions. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from triptych.core.config import ModelOptions
from triptych.core.context_length import context_length
from triptych.core.errors import InvalidRequest, WeightsError
from triptych.core.unicode import check_text
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.embedding.architecture import EncoderSizes, is_encoder
from triptych.modalities.llm.embedding.pooling import PoolingSpec

_WIDTH_FIELDS = ("hidden_size", "n_embd", "d_model")
"""What decoders call the length of their states in config.json."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingModel:
    """What the API process knows of one model. `prompts` are instructions by name.

    A model that `is_causal` is a decoder: a text's vector is the state of its last token.
    """

    name: str
    is_causal: bool
    max_length: int
    num_dimensions: int
    vocab_size: int
    normalizes: bool
    folder: Path
    prompts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, resolved: ResolvedModel, options: ModelOptions) -> EmbeddingModel:
        """Read a resolved model's folder. Raises `WeightsError` when it lacks what is needed."""
        folder = Path(resolved.folder)
        config = read_json(folder / "config.json")
        is_causal = not is_encoder(config)
        spec = PoolingSpec.read(folder, "last" if is_causal else "mean")
        sizes = _causal_sizes(config, options) if is_causal else EncoderSizes.read(config)
        if is_causal and (spec.mode != "last" or spec.dense):
            raise WeightsError(
                f"{resolved.name} pools in a way that decoders here do not: only the last token's"
                " state is taken, as it is."
            )
        model = cls(
            name=resolved.name,
            is_causal=is_causal,
            max_length=min(spec.max_length or sizes.max_length, sizes.max_length),
            num_dimensions=_num_dimensions(folder, spec, sizes.hidden_size),
            vocab_size=sizes.vocab_size,
            normalizes=spec.normalizes,
            folder=folder,
            prompts=spec.prompts,
        )
        if not is_causal:  # the tokenizer of a decoder is with its chat; few ask it for vectors
            _ = model.tokenizer
        return model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read when it is first asked for. Raises `WeightsError`."""
        return _open_tokenizer(self.folder, self.name)

    def encode(
        self, texts: Sequence[str], *, prompt_name: str = "", max_tokens: int = 0
    ) -> tuple[tuple[int, ...], ...]:
        """Token ids of every text, with the model's own marks around them.

        Texts of more than `max_tokens` are cut there; 0 cuts none, and refuses those that are over
        the model's length (-1: cut at that). Raises `InvalidRequest`.
        """
        if not all(texts):
            raise InvalidRequest("A text is empty: leave it out.", param="input")
        for text in texts:
            check_text(text, "input")
        prompt = self._prompt(prompt_name)
        encodings = self.tokenizer.encode_batch([prompt + text for text in texts])
        most = self.max_length if max_tokens < 0 else max_tokens
        if most > self.max_length:
            raise InvalidRequest(
                f"truncate_prompt_tokens is over the model's {self.max_length} tokens.",
                param="truncate_prompt_tokens",
            )
        num_marks = self.tokenizer.num_special_tokens_to_add(is_pair=False)
        if 0 < most <= num_marks:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be above {num_marks}: the model adds as many.",
                param="truncate_prompt_tokens",
            )
        for encoding in encodings if most else ():
            encoding.truncate(most)
        return tuple(self.check(encoding.ids) for encoding in encodings)

    def check(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that the model can take. Raises `InvalidRequest`."""
        if not 0 < len(token_ids) <= self.max_length:
            raise InvalidRequest(
                f"A text has {len(token_ids)} tokens; {self.name} takes 1 to {self.max_length}."
                " Shorten it, split it, or set truncate_prompt_tokens to -1 to have it cut.",
                param="input",
            )
        if max(token_ids) >= self.vocab_size:
            raise InvalidRequest(
                f"A token id is {max(token_ids)}; {self.name} has {self.vocab_size}.",
                param="input",
            )
        return tuple(token_ids)

    def _prompt(self, name: str) -> str:
        if name and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InvalidRequest(
                f"{self.name} has no prompt {name[:80]!r}; these are: {known}.",
                param="prompt_name",
            )
        return self.prompts.get(name, "")


@dataclass(frozen=True, slots=True)
class _CausalSizes:
    max_length: int
    hidden_size: int
    vocab_size: int


def _causal_sizes(config: Mapping[str, Any], options: ModelOptions) -> _CausalSizes:
    config = config.get("text_config", config)  # of a model that sees
    own_length = context_length(config.get)
    widths = (config[field] for field in _WIDTH_FIELDS if field in config)
    return _CausalSizes(
        max_length=(options.max_length or own_length) - 1,  # a decoder's last place is an answer's
        hidden_size=int(next(widths, 0)),
        vocab_size=int(config["vocab_size"]),
    )


def _open_tokenizer(folder: Path, name: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        raise WeightsError(f"{name} has no tokenizer.json that can be read.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # what a caller spells is text
    return tokenizer


def _num_dimensions(folder: Path, spec: PoolingSpec, hidden_size: int) -> int:
    if not spec.dense:
        return hidden_size
    return int(read_json(folder / spec.dense[-1] / "config.json")["out_features"])
