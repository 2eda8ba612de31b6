"""Between text and token ids for an embedding model.

Owns what the API process knows of the model: tokenizer, lengths, instructions. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from triptych.core.config import ModelOptions
from triptych.core.errors import ContextLengthExceeded, InvalidRequest, WeightsError
from triptych.core.once import once
from triptych.core.text.context_length import context_length
from triptych.core.text.tokenizer import LeastTokens, encode, read_tokenizer
from triptych.core.text.unicode import check_text
from triptych.core.weights.layout import count_field, read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.embedding.architecture import EncoderSizes, is_encoder
from triptych.modalities.embedding.pooling import PoolingSpec

_WIDTH_FIELDS = ("hidden_size", "n_embd", "d_model")
"""What decoders call the length of their states in config.json."""


@dataclass(frozen=True, slots=True)
class TextReader:
    """A model's tokenizer, which reads what a caller spells as text, and the bound that it has."""

    tokenizer: Tokenizer
    least_tokens: LeastTokens

    @classmethod
    def open(cls, folder: Path, name: str) -> Self:
        """Raises `WeightsError`."""
        tokenizer = read_tokenizer(folder, name)
        tokenizer.encode_special_tokens = True
        return cls(tokenizer, LeastTokens.of(tokenizer))


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
    reader: Callable[[], TextReader]
    """The tokenizer, read when it is first asked for. Raises `WeightsError`."""
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
        num_dimensions = sizes.hidden_size
        if spec.dense:
            last = read_json(folder / spec.dense[-1] / "config.json")
            num_dimensions = int(last["out_features"])
        model = cls(
            name=resolved.name,
            is_causal=is_causal,
            max_length=min(spec.max_length or sizes.max_length, sizes.max_length),
            num_dimensions=num_dimensions,
            vocab_size=sizes.vocab_size,
            normalizes=spec.normalizes,
            reader=once(lambda: TextReader.open(folder, resolved.name)),
            prompts=spec.prompts,
        )
        if not is_causal:  # the tokenizer of a decoder is with its chat; few ask it for vectors
            model.reader()
        return model

    def encode(
        self, texts: Sequence[str], *, prompt_name: str = "", max_tokens: int = 0
    ) -> tuple[tuple[int, ...], ...]:
        """Token ids of every text, with the model's own marks around them.

        Texts of more than `max_tokens` are cut there; 0 cuts none, and refuses those that are over
        the model's length (-1: cut at that), untokenized where theirs shows it. Raises
        `InvalidRequest`.
        """
        if not all(texts):
            raise InvalidRequest("A text is empty: leave it out.", param="input")
        for text in texts:
            check_text(text, "input")
        prompt = self._prompt(prompt_name)
        reader = self.reader()
        most = self.max_length if max_tokens < 0 else max_tokens
        if most > self.max_length:
            raise InvalidRequest(
                f"truncate_prompt_tokens is over the model's {self.max_length} tokens.",
                param="truncate_prompt_tokens",
            )
        num_marks = reader.tokenizer.num_special_tokens_to_add(is_pair=False)
        if 0 < most <= num_marks:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be above {num_marks}: the model adds as many.",
                param="truncate_prompt_tokens",
            )
        whole = [prompt + text for text in texts]
        if not most:
            self._check_length(max(map(reader.least_tokens, whole)), "at least ")
        if not most:
            return tuple(self.check(each.ids) for each in encode(reader.tokenizer, whole))
        encodings = encode(reader.tokenizer, whole, add_special_tokens=False)
        for encoding in encodings:  # before the marks come: a cut text keeps the closing one
            encoding.truncate(most - num_marks)
        marked = map(reader.tokenizer.post_process, encodings)
        return tuple(self.check(each.ids) for each in marked)

    def check(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that the model can take. Raises `InvalidRequest`."""
        if not token_ids:
            raise InvalidRequest("A text has no tokens: leave it out.", param="input")
        self._check_length(len(token_ids))
        if max(token_ids) >= self.vocab_size:
            raise InvalidRequest(
                f"A token id is {max(token_ids)}; {self.name} has {self.vocab_size}.",
                param="input",
            )
        return tuple(token_ids)

    def _check_length(self, num_tokens: int, bound: str = "") -> None:
        if num_tokens > self.max_length:
            raise ContextLengthExceeded(
                f"A text has {bound}{num_tokens} tokens; {self.name} takes 1 to {self.max_length}."
                " Shorten it, split it, or set truncate_prompt_tokens to -1 to have it cut.",
                param="input",
            )

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
    config = config.get("text_config", config)  # of a vision model
    own_length = context_length(config.get)
    widths = (config[field] for field in _WIDTH_FIELDS if field in config)
    return _CausalSizes(
        max_length=(options.max_length or own_length) - 1,  # a decoder's last place is an answer's
        hidden_size=int(next(widths, 0)),
        vocab_size=count_field(config, "vocab_size"),
    )
