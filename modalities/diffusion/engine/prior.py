"""Tokens of an image that a language model writes before the first denoising step.

Owns the sampling, one token at a time, with all state in the image: so images advance in any order,
and alone as in company. Recipes build the prompt and read the tokens.

Legend: T tokens of the prompt, V tokens that an image has, N tokens to write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triptych.core.errors import WeightsError
from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.diffusion.engine.loading.outline import LIVE_WIDTHS

MAX_READ = 2048
"""Tokens of a prompt that are read at once: activations of a longer one would have no bound."""
_DEFAULT_TOP_K = 50  # of transformers, where a configuration has none
_UNSUPPORTED = {
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_p": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "typical_p": 1.0,
}


class ImageTokenModel:
    """The language model of a pipeline, and how it samples: on the host, with transformers' parts.

    `num_codes`: the first tokens of its vocabulary, which an image may have. Raises `WeightsError`
    for a generation_config.json with other ways to sample.
    """

    def __init__(self, module: Any, num_codes: int) -> None:
        self.module = module
        self.num_codes = num_codes
        config = getattr(module, "generation_config", None)  # absent from an outline
        for name, plain in _UNSUPPORTED.items():
            if getattr(config, name, None) not in (None, plain):
                raise WeightsError(f"generation_config.json: {name} is not served; remove it.")
        warpers = LogitsProcessorList()
        if (heat := getattr(config, "temperature", None)) not in (None, 1.0):
            warpers.append(TemperatureLogitsWarper(heat))
        top_k = getattr(config, "top_k", None)
        if (top_k := _DEFAULT_TOP_K if top_k is None else top_k) > 0:
            warpers.append(TopKLogitsWarper(top_k))
        if (top_p := getattr(config, "top_p", None)) not in (None, 1.0):
            warpers.append(TopPLogitsWarper(top_p))
        self._warpers = warpers

    @property
    def token_bytes(self) -> int:
        """Bytes that the cache keeps of a token."""
        text = self.module.config.get_text_config()
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        num_values = 2 * text.num_hidden_layers * text.num_key_value_heads * size
        return int(num_values * self._item_bytes)

    @property
    def live_bytes(self) -> int:
        """Bytes of activations while it reads a part of a prompt, an estimate on the large side."""
        width = self.module.config.get_text_config().hidden_size
        return int(MAX_READ * LIVE_WIDTHS * width * self._item_bytes)

    @property
    def _item_bytes(self) -> int:
        return int(next(self.module.parameters()).dtype.itemsize)

    def sample(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """The next token. One that no image has, such as the end, is sampled again among others."""
        scores_1V = self._warpers(
            torch.empty(1, 0, dtype=torch.int64), logits_V.float().cpu()[None]
        )
        token = _draw(scores_1V, generator)
        return token if token < self.num_codes else _draw(scores_1V[:, : self.num_codes], generator)


class ImageTokens:
    """The tokens of one image, written as far as `advance` was asked to.

    `inputs`: the prompt, `[1, T]`, on the host. `positions_3N`: those of the tokens to write, on
    three axes. `generator` is the image's own, on the host; `done` receives the finished tokens.
    """

    def __init__(
        self,
        model: ImageTokenModel,
        inputs: dict[str, Any],
        positions_3N: Tensor,
        *,
        generator: torch.Generator,
        done: Callable[[Tensor], None],
    ) -> None:
        self._model, self._inputs, self._positions_3N = model, inputs, positions_3N
        self._generator, self._done = generator, done
        self._cache: Any = DynamicCache()
        self._tokens: list[int] = []
        self._next: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the image."""
        return self._positions_3N.shape[1]

    @property
    def num_done(self) -> int:
        """The number of tokens that were written."""
        return len(self._tokens)

    @property
    def is_done(self) -> bool:
        """Whether all tokens were written, and handed over."""
        return self._cache is None

    @torch.no_grad()
    def advance(self, end: int) -> None:
        """Write tokens until there are `end`; a call that raised can be repeated."""
        while self.num_done < min(end, self.num_tokens):
            if self._next is None:
                self._next = self._logits()
            self._tokens.append(self._model.sample(self._next, self._generator))
            self._next = None
        if self.num_done == self.num_tokens and not self.is_done:
            self._done(torch.tensor(self._tokens))
            self._cache, self._inputs = None, {}

    def _logits(self) -> Tensor:
        """The logits of the next token, after the prompt or after the last token."""
        at = self.num_done
        if at > 0:
            self._drop_after(self._inputs["input_ids"].shape[1] + at - 1)
            last = torch.tensor([self._tokens[-1:]])
            return self._read(last, self._positions_3N[:, None, at - 1 : at])
        self._cache = DynamicCache()
        pieces = (self._inputs[name].split(MAX_READ, -1) for name in ("input_ids", "position_ids"))
        for ids_1T, positions_31T in zip(*pieces, strict=True):
            logits = self._read(ids_1T, positions_31T)
        return logits

    def _read(self, ids_1T: Tensor, positions_31T: Tensor) -> Tensor:
        """Add tokens to the cache, and return the logits of the one after them."""
        module = self._model.module
        device = next(module.parameters()).device
        output = module(
            input_ids=to_device(ids_1T, device),
            position_ids=to_device(positions_31T, device),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[0, -1]
        return logits

    def _drop_after(self, length: int) -> None:
        """Drop what a run that raised may have left of the last token in some layers."""
        for layer in self._cache.layers:
            if (num_more := layer.get_seq_length() - length) > 0:
                layer.crop(-num_more)


def _draw(scores_1V: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(scores_1V.softmax(-1), 1, generator=generator))
