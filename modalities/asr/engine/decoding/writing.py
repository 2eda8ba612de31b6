"""Families that write token by token: after an encoder's states, or as a chat about the sound.

Owns the bounds on a text, the processors of logits in a checkpoint's generation_config.json, and
decoding. The family runs its encoder. Shape suffixes: B batch (1), T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.generation.logits_process import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.asr.engine.tokens import Writing, Written
from triptych.modalities.asr.engine.window_model import Heard, Window, WindowModel
from triptych.modalities.asr.wire import TranscriptToken

Encoded: TypeAlias = tuple[Tensor, Tensor | None]
_TOKENS_PER_S = 12
"""More than any language has, in the families' vocabularies."""
_SPARE_TOKENS = 16


class WritingModel(WindowModel):
    """A family with an autoregressive decoder."""

    tokens_per_stage: ClassVar[int] = 1

    def __init__(self, network: Any, processor: Any, tokenizer: Tokenizer) -> None:
        super().__init__(network, processor, tokenizer)
        generation = network.generation_config
        ends = generation.eos_token_id
        ends = self.config.eos_token_id if ends is None else ends
        self.end_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        takes_cache = "cache" in inspect.signature(network.forward).parameters
        self._cache_name = "cache" if takes_cache else "past_key_values"  # before transformers 5.24

    @property
    def max_text_tokens(self) -> int:
        """The most tokens that a text may have."""
        return 2**16

    def write(
        self, window: Window, prompt_ids: Sequence[int], logits_V: Tensor, given: dict[str, Any]
    ) -> Generator[Stage, None, Written]:
        """Write the text from the prompt's logits on; `given` are inputs of every call."""
        processors = self._processors(len(prompt_ids))
        asked = round(window.duration_s * _TOKENS_PER_S) + _SPARE_TOKENS

        def choose(logits_V: Tensor, token_ids: list[int]) -> tuple[int, float]:
            if processors:
                ids_BT = self._ids([*prompt_ids, *token_ids])
                logits_V = processors(ids_BT, logits_V[None])[0]
            return window.sampler.sample(logits_V, window.temperature)

        writing = Writing(
            feed=lambda token_id: self.feed([token_id], given),
            choose=choose,
            end_ids=self.end_ids,
            max_tokens=min(asked, self.max_text_tokens - len(prompt_ids)),
            tokens_per_stage=self.tokens_per_stage,
        )
        return (yield from writing.write(logits_V))

    @abstractmethod
    def feed(self, token_ids: Sequence[int], given: dict[str, Any]) -> Tensor:
        """The logits [V] (float32) after more tokens."""

    def _logits(self, **inputs: Any) -> Tensor:
        logits_V: Tensor = self.network(use_cache=True, **inputs).logits[0, -1]
        return logits_V.float()

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return to_device(torch.tensor([list(token_ids)]), self.device)

    def _processors(self, num_prompt_tokens: int) -> LogitsProcessorList:
        """The processors of logits that the checkpoint's generation_config.json asks for."""
        asked, device = self.network.generation_config, self.device
        found = LogitsProcessorList()
        if asked.repetition_penalty not in (None, 1.0):
            found.append(RepetitionPenaltyLogitsProcessor(asked.repetition_penalty))
        if asked.no_repeat_ngram_size:
            found.append(NoRepeatNGramLogitsProcessor(asked.no_repeat_ngram_size))
        if asked.suppress_tokens:
            found.append(SuppressTokensLogitsProcessor(asked.suppress_tokens, device=device))
        if first := getattr(asked, "begin_suppress_tokens", None):
            found.append(
                SuppressTokensAtBeginLogitsProcessor(first, num_prompt_tokens, device=device)
            )
        return found


def tokens_of(written: Written) -> tuple[TranscriptToken, ...]:
    """The tokens of a text, without times."""
    pairs = zip(written.token_ids, written.logprobs, strict=True)
    return tuple(TranscriptToken(token_id, logprob=logprob) for token_id, logprob in pairs)


class EncoderDecoder(WritingModel):
    """A family whose decoder reads an encoder's states by cross-attention."""

    tokens_per_stage = 8

    @abstractmethod
    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Encoded]:
        """The encoder's output [B, T, D], and the mask of its valid positions [B, T]."""

    @property
    def max_text_tokens(self) -> int:
        """The most tokens that a text may have."""
        sizes = getattr(self.config, "decoder_config", self.config)
        return int(sizes.max_position_embeddings)

    def hear(self, window: Window) -> Generator[Stage, None, Heard]:
        """Recognize a window."""
        inputs = self.inputs(window)
        start_id, asked = self.config.decoder_start_token_id, inputs.pop("decoder_input_ids", None)
        prompt_ids = [] if asked is None else asked[0].tolist()
        if start_id is not None and prompt_ids[:1] != [start_id]:
            prompt_ids.insert(0, start_id)
        encoded_BTD, mask_BT = yield from self.encode(inputs)
        outputs = SimpleNamespace(
            last_hidden_state=encoded_BTD,
            attention_mask=mask_BT,
            hidden_states=None,
            attentions=None,
        )
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        given = {"encoder_outputs": outputs, self._cache_name: cache}
        yield Stage("decode", self.tokens_per_stage)
        logits_V = self.feed(prompt_ids, given)
        written = yield from self.write(window, prompt_ids, logits_V, given)
        return Heard(tokens_of(written), window.language)

    def feed(self, token_ids: Sequence[int], given: dict[str, Any]) -> Tensor:
        """The logits after more tokens."""
        return self._logits(decoder_input_ids=self._ids(token_ids), **given)


class PromptedModel(WritingModel):
    """A language model that reads the encoded sound where its prompt has placeholders."""

    def hear(self, window: Window) -> Generator[Stage, None, Heard]:
        """Recognize a window."""
        inputs = self.inputs(window)
        ids_BT = inputs.pop("input_ids")
        inputs.pop("attention_mask", None)
        sound_TD = yield from self.encode(inputs)
        prompt_BTD = self._spliced(ids_BT, sound_TD)
        cache = DynamicCache(config=self.config.get_text_config())
        given = {self._cache_name: cache}
        body = self.network.model.language_model
        hidden_BTD = yield from self.layerwise(
            "prefill", body, body.layers, inputs_embeds=prompt_BTD, use_cache=True, **given
        )
        logits_V = self.network.lm_head(body.norm(hidden_BTD[:, -1]))[0].float()
        prompt_ids = ids_BT[0].tolist()
        written = yield from self.write(window, prompt_ids, logits_V, given)
        return self.heard(window, written)

    @abstractmethod
    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Tensor]:
        """The sound in the language model's space [T, D]."""

    def heard(self, window: Window, written: Written) -> Heard:
        """The transcript in the written tokens."""
        return Heard(tokens_of(written), window.language)

    def feed(self, token_ids: Sequence[int], given: dict[str, Any]) -> Tensor:
        """The logits after more tokens."""
        return self._logits(input_ids=self._ids(token_ids), **given)

    def _spliced(self, ids_BT: Tensor, sound_TD: Tensor) -> Tensor:
        """The prompt's embeddings, with the sound in the place of its placeholders."""
        is_sound_BT = ids_BT == self.config.audio_token_id
        embedding: nn.Module = self.network.get_input_embeddings()
        embedded_BTD: Tensor = embedding(to_device(ids_BT.masked_fill(is_sound_BT, 0), self.device))
        sound_TD = sound_TD.reshape(-1, embedded_BTD.shape[-1]).to(embedded_BTD.dtype)
        return embedded_BTD.masked_scatter(to_device(is_sound_BT, self.device)[..., None], sound_TD)
