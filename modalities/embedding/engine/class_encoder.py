"""Encoders of any family, as transformers' own class.

Owns the class, its weights and its calls: texts of equal length share a forward pass, without
padding, so that a mask is never needed. A class that sees all tokens (T5's encoder, EmbeddingGemma)
and one with a head for pairs are called in the same way. Slower than `packed_texts`.

Shape suffixes: B texts of one length, T tokens of a text, C hidden.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from triptych.core.errors import WeightsError
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.whole import load_whole
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.embedding.architecture import is_cross_encoder
from triptych.modalities.embedding.engine.blueprint import EncoderBlueprint
from triptych.modalities.embedding.kinds import ClassSizes
from triptych.modalities.llm.engine.class_config import parse_config
from triptych.modalities.llm.engine.fallback import sketch

_IGNORED = ("pooler.", "cls.", "lm_head.", "decoder.", "predictions.", "vocab_projector.")
"""Parts of tensor names of heads that are not used."""
_POOLER = "add_pooling_layer"


class ClassEncoder(torch.nn.Module):
    """An encoder from token ids to hidden states, or to one state with a pair's score."""

    def __init__(self, model: Any, *, scores: bool) -> None:
        super().__init__()
        self.model = model
        self._scores = scores
        self._device = next(model.parameters()).device
        self._has_segments = "token_type_ids" in inspect.signature(model.forward).parameters

    def forward(
        self, texts: Sequence[Sequence[int]], second_starts: Sequence[int] = ()
    ) -> list[Tensor]:
        """The states of each text's tokens, `[T, C]`, or its score `[1, 1]`, in order.

        From its index in `second_starts` on, a text belongs to the second segment.
        """
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, text in enumerate(texts):
            by_length[len(text)].append(index)
        found: dict[int, Tensor] = {}
        for indexes in by_length.values():
            ids_BT = torch.tensor([texts[index] for index in indexes])
            starts = [second_starts[index] for index in indexes] if second_starts else []
            found.update(zip(indexes, self._run(ids_BT, starts), strict=True))
        return [found[index] for index in range(len(texts))]

    def _run(self, ids_BT: Tensor, second_starts: Sequence[int]) -> Tensor:
        given = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}
        if second_starts and self._has_segments and self._num_segments > 1:
            starts_B1 = torch.tensor(second_starts)[:, None]
            given["token_type_ids"] = (torch.arange(ids_BT.shape[1]) >= starts_B1).long()
        output = self.model(**{name: to_device(x, self._device) for name, x in given.items()})
        found: Tensor = output.logits.unsqueeze(1) if self._scores else output.last_hidden_state
        return found

    @property
    def _num_segments(self) -> int:
        return int(getattr(self.model.config, "type_vocab_size", 1))


class ClassBlueprint(EncoderBlueprint):
    """An encoder that runs as transformers' class."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        super().__init__(checkpoint, dtype)
        config = checkpoint.config
        self.sizes: ClassSizes = ClassSizes.read(config)
        self._scores = is_cross_encoder(config)
        self._kind = _class_of(str(config.get("model_type")), scores=self._scores)
        self._config = parse_config(config)

    @cached_property
    def _sketch(self) -> Any:
        return sketch(self._kind, self._config)

    def weight_bytes(self) -> int:
        """Bytes of weights, counted on the meta device."""
        num_values: int = sum(parameter.numel() for parameter in self._sketch.parameters())
        return num_values * self._dtype.itemsize

    def activation_bytes(self, num_tokens: int) -> int:
        """A generous estimate: transformers fuses nothing."""
        sizes = self.sizes
        inner = getattr(self._config, "intermediate_size", None) or 4 * sizes.hidden_size
        values = max(num_tokens, sizes.max_length) * (12 * sizes.hidden_size + 4 * int(inner))
        return values * self._dtype.itemsize

    def build(self, device: torch.device, report: Callable[[float], None]) -> ClassEncoder:
        """Load through transformers. Raises `WeightsError` if a tensor is missing or unknown."""
        given: dict[str, Any] = {"config": copy.deepcopy(self._config), "dtype": self._dtype}
        if _POOLER in inspect.signature(self._kind.__init__).parameters:
            given[_POOLER] = False
        with library_errors("transformers cannot load this encoder"):
            model, info = load_whole(self._kind, self._checkpoint, **given)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            names = sorted(str(n) for n in info[problem] if not any(i in str(n) for i in _IGNORED))
            if names:
                raise WeightsError(f"{problem.replace('_', ' ')}: {', '.join(names[:3])}.")
        report(1.0)
        return ClassEncoder(model.to(device).eval().requires_grad_(False), scores=self._scores)


def _class_of(model_type: str, *, scores: bool) -> Any:
    tables: tuple[Mapping[str, Any], ...] = (
        modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    )
    if scores:
        tables = (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,)
    name = next((table[model_type] for table in tables if model_type in table), None)
    if not isinstance(name, str):
        raise WeightsError(f"{model_type!r} is no encoder that transformers knows.")
    return getattr(transformers, name)
