"""Tokenizing for embedding models.

Owns the API process's view of a model: tokenizer, lengths, prompts. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from tokenizers import Encoding, Tokenizer

from triptych.core.errors import ContextLengthExceeded, InvalidRequest, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.process.once import once
from triptych.core.text.context_length import context_length
from triptych.core.text.tokenizer import MinTokens, encode, read_tokenizer
from triptych.core.text.unicode import check_text
from triptych.core.weights.layout import count_field, read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.embedding.architecture import EncoderSizes, is_cross_encoder
from triptych.modalities.embedding.judge import JudgePrompt
from triptych.modalities.embedding.kinds import ClassSizes, ModelKind, kind_of
from triptych.modalities.embedding.pooling import PoolingSpec

_WIDTH_FIELDS = ("hidden_size", "n_embd", "d_model")
"""Names of a decoder's hidden size in config.json."""


@dataclass(frozen=True, slots=True)
class TextReader:
    """A model's tokenizer, which treats all input as plain text, and its lower bound of tokens."""

    tokenizer: Tokenizer
    least_tokens: MinTokens

    @classmethod
    def open(cls, folder: Path, name: str) -> Self:
        """Read the tokenizer of a model's folder. Raises `WeightsError`."""
        tokenizer = read_tokenizer(folder, name)
        tokenizer.encode_special_tokens = True
        return cls(tokenizer, MinTokens.of(tokenizer))


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """Pairs of texts, each as one run of token ids, and the index of its second part."""

    token_ids: tuple[tuple[int, ...], ...]
    second_starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EmbeddingModel:
    """The API process's view of one model. `prompts` are instructions by name.

    `default_prompt` names that of texts for which none is chosen. A cross-encoder scores pairs of
    texts; `has_sigmoid`: with a sigmoid, to numbers from 0 to 1.
    """

    name: str
    kind: ModelKind
    max_length: int
    num_dimensions: int
    vocab_size: int
    normalizes: bool
    is_cross_encoder: bool = False
    has_sigmoid: bool = True
    reader: Callable[[], TextReader]
    """The tokenizer, read on first use. Raises `WeightsError`."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""

    @property
    def is_causal(self) -> bool:
        """Whether it runs in the token engine."""
        return self.kind in (ModelKind.DECODER, ModelKind.JUDGE)

    @property
    def scores_pairs(self) -> bool:
        """Whether it has scores of pairs, and no vectors."""
        return self.is_cross_encoder or self.kind is ModelKind.JUDGE

    @cached_property
    def judge(self) -> JudgePrompt:
        """The prompt of a model that judges. Raises `WeightsError` for another tokenizer."""
        return JudgePrompt.of(self.reader().tokenizer)

    @classmethod
    def open(cls, resolved: ResolvedModel, options: ModelOptions) -> EmbeddingModel:
        """Read a resolved model's folder. Raises `WeightsError` if it is incomplete."""
        folder = Path(resolved.folder)
        config = read_json(folder / "config.json")
        kind = kind_of(folder, config)
        scores = is_cross_encoder(config)
        is_causal = kind in (ModelKind.DECODER, ModelKind.JUDGE)
        spec = PoolingSpec.of(folder, config, "last" if is_causal else "mean")
        sizes = _sizes(kind, config, options)
        num_dimensions = sizes.hidden_size
        if spec.dense:
            last = read_json(folder / spec.dense[-1] / "config.json")
            num_dimensions = int(last["out_features"])
        model = cls(
            name=resolved.name,
            kind=kind,
            max_length=min(spec.max_length or sizes.max_length, sizes.max_length),
            num_dimensions=num_dimensions,
            vocab_size=sizes.vocab_size,
            normalizes=spec.normalizes,
            is_cross_encoder=scores,
            has_sigmoid=_has_sigmoid(config),
            reader=once(lambda: TextReader.open(folder, resolved.name)),
            prompts=spec.prompts,
            default_prompt=spec.default_prompt if spec.default_prompt in spec.prompts else "",
        )
        if not is_causal:  # a decoder's tokenizer is read by chat; embeddings of it are rare
            model.reader()
        return model

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str = "",
        max_tokens: int = 0,
        keeps_end: bool = False,
    ) -> tuple[tuple[int, ...], ...]:
        """Token ids of every text, with the model's special tokens.

        Texts of more than `max_tokens` are truncated, at their start if `keeps_end`. -1 stands for
        the model's limit; 0 truncates nothing and refuses texts above the limit, if possible before
        they are tokenized. Raises `InvalidRequest`.
        """
        if not all(texts):
            raise InvalidRequest("A text is empty: omit it.", param="input")
        for text in texts:
            check_text(text, "input")
        prompt = self._prompt(prompt_name or self.default_prompt)
        reader = self.reader()
        most = self.max_length if max_tokens < 0 else max_tokens
        num_marks = reader.tokenizer.num_special_tokens_to_add(is_pair=False)
        self._check_cut(most, num_marks)
        whole = [prompt + text for text in texts]
        if not most:
            self._check_length(max(map(reader.least_tokens, whole)), "at least ")
        if not most:
            return tuple(self.check(each.ids) for each in encode(reader.tokenizer, whole))
        encodings = encode(reader.tokenizer, whole, add_special_tokens=False)
        for (
            encoding
        ) in encodings:  # before special tokens are added: a truncated text keeps the closing one
            encoding.truncate(most - num_marks, direction="left" if keeps_end else "right")
        marked = map(reader.tokenizer.post_process, encodings)
        return tuple(self.check(each.ids) for each in marked)

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        max_tokens: int = 0,
        max_document_tokens: int = 0,
        keeps_end: bool = False,
    ) -> TokenPairs:
        """Token ids of pairs of query and document for a cross-encoder.

        Documents are truncated to `max_document_tokens`, pairs to `max_tokens`, at the ends of both
        texts (the starts if `keeps_end`), the longer text first; 0 and -1 as in `encode`.
        """
        most = self.max_length if max_tokens < 0 else max_tokens
        reader = self.reader()
        tokenizer = reader.tokenizer
        num_marks = tokenizer.num_special_tokens_to_add(is_pair=True)
        self._check_cut(most, num_marks)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        for text in texts:
            check_text(text, "input")
            if not most and not max_document_tokens:
                self._check_length(reader.least_tokens(text), "at least ")
        encodings = encode(tokenizer, texts, add_special_tokens=False)
        marks = PairTemplate.of(tokenizer, texts)
        cut = partial(_cut, keeps_end=keeps_end)
        # Truncated first: a long text would be copied for each pair.
        found = {
            text: cut(each.ids, most or None) for text, each in zip(texts, encodings, strict=True)
        }
        ids, starts = [], []
        for query, document in pairs:
            first, second = found[query], cut(found[document], max_document_tokens or None)
            if most:
                num_first, num_second = shorten_pair(len(first), len(second), most - num_marks)
                first, second = cut(first, num_first), cut(second, num_second)
            whole = [*marks.before, *first, *marks.between, *second, *marks.after]
            ids.append(self.check(whole))
            starts.append(len(whole) - marks.num_of_second(len(first), len(second)))
        return TokenPairs(tuple(ids), tuple(starts))

    def encode_judged(
        self, pairs: Sequence[tuple[str, str]], instruction: str, *, max_document_tokens: int = 0
    ) -> tuple[tuple[int, ...], ...]:
        """Token ids of the prompts by which a model judges pairs of query and document.

        Documents are truncated to `max_document_tokens`; 0 truncates nothing.
        """
        tokenizer, judge = self.reader().tokenizer, self.judge
        for text in {text for pair in pairs for text in pair} | {instruction}:
            check_text(text, "input")
        if max_document_tokens:
            found = encode(tokenizer, [document for _, document in pairs], add_special_tokens=False)
            for each in found:
                each.truncate(max_document_tokens)
            cut = tokenizer.decode_batch([each.ids for each in found])
            pairs = [(query, text) for (query, _), text in zip(pairs, cut, strict=True)]
        texts = [judge.text(query, document, instruction) for query, document in pairs]
        self._check_length(max(map(self.reader().least_tokens, texts)), "at least ")
        between = encode(tokenizer, texts, add_special_tokens=False)
        return tuple(self.check((*judge.before, *each.ids, *judge.after)) for each in between)

    def check(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Check token ids against the model. Raises `InvalidRequest`."""
        if not token_ids:
            raise InvalidRequest("A text has no tokens: omit it.", param="input")
        self._check_length(len(token_ids))
        if max(token_ids) >= self.vocab_size:
            raise InvalidRequest(
                f"Token id {max(token_ids)} is not below {self.vocab_size}, the vocabulary size of"
                f" {self.name}.",
                param="input",
            )
        return tuple(token_ids)

    def _check_cut(self, most: int, num_marks: int) -> None:
        """Raise `InvalidRequest` if `most` is no valid length, special tokens included."""
        if most > self.max_length:
            raise InvalidRequest(
                f"truncate_prompt_tokens exceeds the model's limit of {self.max_length} tokens.",
                param="truncate_prompt_tokens",
            )
        if 0 < most <= num_marks:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be above {num_marks}, the number of special tokens"
                " that the model adds.",
                param="truncate_prompt_tokens",
            )

    def _check_length(self, num_tokens: int, bound: str = "") -> None:
        if num_tokens > self.max_length:
            what = "pair of texts" if self.scores_pairs else "text"
            is_judge = self.kind is ModelKind.JUDGE
            how = "max_tokens_per_doc" if is_judge else "truncate_prompt_tokens to -1"
            raise ContextLengthExceeded(
                f"A {what} has {bound}{num_tokens} tokens; {self.name} takes 1 to"
                f" {self.max_length}. Shorten it, split it, or set {how} to truncate it.",
                param="input",
            )

    def _prompt(self, name: str) -> str:
        if name and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InvalidRequest(
                f"{self.name} has no prompt {name[:80]!r}; its prompts are: {known}.",
                param="prompt_name",
            )
        return self.prompts.get(name, "")


def _cut(ids: list[int], length: int | None, *, keeps_end: bool) -> list[int]:
    """The first `length` of the ids, or the last if `keeps_end`; `None`: all."""
    if length is None or length >= len(ids):
        return ids
    return ids[len(ids) - length :] if keeps_end else ids[:length]


def shorten_pair(num_first: int, num_second: int, most: int) -> tuple[int, int]:
    """Lengths of two texts truncated to `most` tokens together, the longer one first."""
    if num_first + num_second <= most:
        return num_first, num_second
    shorter = min(num_first, num_second, most // 2)
    longer = most - shorter
    return (shorter, longer) if num_first <= num_second else (longer, shorter)


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """A tokenizer's special tokens around two texts, and their types.

    The tokenizer's own method would also copy the truncated part of a long query for each document.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[int, int]
    num_of_type_1: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Iterable[str] = ()) -> Self:
        """The special tokens, found with one token of a sample or of `texts`."""
        samples = chain(("a", "1"), (text[:64] for text in texts))
        encodings = (tokenizer.encode(each, add_special_tokens=False) for each in samples)
        one = next((each for each in encodings if len(each)), None)
        if one is None:  # no text has a token
            whole = tokenizer.post_process(Encoding(), Encoding())
            return cls(tuple(whole.ids), (), (), (0, 0), sum(whole.type_ids))
        one.truncate(1)
        two = Encoding.merge([one])
        whole = tokenizer.post_process(one, two)
        first, second = (n for n, is_mark in enumerate(whole.special_tokens_mask) if not is_mark)
        ids, types = whole.ids, whole.type_ids
        return cls(
            before=tuple(ids[:first]),
            between=tuple(ids[first + 1 : second]),
            after=tuple(ids[second + 1 :]),
            types=(types[first], types[second]),
            num_of_type_1=sum(types) - types[first] - types[second],
        )

    def num_of_second(self, num_first: int, num_second: int) -> int:
        """The number of tokens of a pair with type 1, the second text's."""
        return self.num_of_type_1 + self.types[0] * num_first + self.types[1] * num_second


def _has_sigmoid(config: Mapping[str, Any]) -> bool:
    """Whether a cross-encoder applies a sigmoid, by its folder's configuration."""
    own = config.get("sentence_transformers") or {}
    named = own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or ""
    name = str(named).rpartition(".")[2]
    if name not in ("", "Sigmoid", "Identity"):
        raise WeightsError(f"The cross-encoder's activation {name[:40]!r} is not supported.")
    return name != "Identity"


@dataclass(frozen=True, slots=True)
class _CausalSizes:
    max_length: int
    hidden_size: int
    vocab_size: int


def _sizes(kind: ModelKind, config: Mapping[str, Any], options: ModelOptions) -> Any:
    """The bounds of a text, by the kind of the model."""
    if kind is ModelKind.PACKED:
        return EncoderSizes.read(config)
    return ClassSizes.read(config) if kind is ModelKind.CLASS else _causal_sizes(config, options)


def _causal_sizes(config: Mapping[str, Any], options: ModelOptions) -> _CausalSizes:
    config = config.get("text_config", config)  # of a vision model
    own_length = context_length(config.get)
    widths = (config[field] for field in _WIDTH_FIELDS if field in config)
    return _CausalSizes(
        max_length=(options.max_length or own_length)
        - 1,  # a decoder's last position is for an output token
        hidden_size=int(next(widths, 0)),
        vocab_size=count_field(config, "vocab_size"),
    )
