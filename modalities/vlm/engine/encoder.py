"""Vision encoders: transformers' own towers and projectors, without the language model.

Owns loading one from a checkpoint that holds more, batching images, and their features: bytes are
scaled and normalized here, on the device, as the model's image processor would. Images of equal
shapes share a forward pass. Knows no family: it supports any model with `get_image_features`.

Shapes: N features of an image, C hidden, L layers.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from triptych.core.engine_api.prompt_content import Array, PromptContent
from triptych.core.errors import InvalidRequest, NonFinite, WeightsError
from triptych.core.process.content_cache import ContentCache
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.quiet import transformers_loading
from triptych.core.weights.library_errors import library_errors

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

_PIXELS, _MASK = "pixel_values", "pixel_attention_mask"
_LANGUAGE = ("language_model", "text_model", "lm_head")


@dataclass(frozen=True, slots=True)
class Features:
    """One image's features; `late_LNC`, in some models, are added after the first layers.

    If `is_owned`, they keep no other memory alive, and are never written to.
    """

    hidden_NC: torch.Tensor
    late_LNC: torch.Tensor | None = None
    is_owned: bool = False

    @property
    def num_bytes(self) -> int:
        """Device bytes of the features."""
        late_bytes = 0 if self.late_LNC is None else self.late_LNC.nbytes
        return int(self.hidden_NC.nbytes + late_bytes)

    def part(self, low: int, high: int) -> Features | None:
        """The features from `low` to before `high`, if any."""
        late_LNC = None if self.late_LNC is None else self.late_LNC[:, low:high]
        return Features(self.hidden_NC[low:high], late_LNC) if low < high else None

    def clone(self) -> Features:
        """A copy that keeps no other memory alive; returns owned features themselves."""
        if self.is_owned:
            return self
        late_LNC = None if self.late_LNC is None else self.late_LNC.clone()
        return Features(self.hidden_NC.clone(), late_LNC, is_owned=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureLayout:
    """The common layout of a model's features: the main part, and the late ones."""

    num_parts: int
    hidden_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.num_parts} x {self.hidden_size} {str(self.dtype).removeprefix('torch.')}"

    @property
    def num_bytes(self) -> int:
        """Bytes of one position."""
        return self.num_parts * self.hidden_size * self.dtype.itemsize


FeatureCache = ContentCache[Features]


def not_finite() -> NonFinite:
    """The error of an image whose features are not finite."""
    return NonFinite("The model computed no finite values for an image.")


def open_cache(capacity_bytes: int, max_entries: int) -> FeatureCache:
    """A cache by image digest; with `max_entries` 0 it keeps only features in use."""
    return ContentCache(capacity_bytes, copy=Features.clone, max_entries=max_entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The rest of a processor's work after resizing: `(bytes * factor - mean) / std`.

    In an image the channel is the third axis from the end. In flattened patches a channel's values
    are contiguous; where a patch spans `num_frames` of a video, an image is repeated for all.
    """

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_frames: int = 1

    @classmethod
    def of(cls, processor: Any) -> Scaling:
        """The scaling of transformers' image `processor`."""
        num_channels = len(processor.image_mean)
        return cls(
            factor=processor.rescale_factor if processor.do_rescale else 1.0,
            mean=tuple(processor.image_mean) if processor.do_normalize else (0.0,) * num_channels,
            std=tuple(processor.image_std) if processor.do_normalize else (1.0,) * num_channels,
            num_frames=getattr(processor, "temporal_patch_size", 1),
        )

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Scale and normalize, in float32."""
        are_patches = values.dim() == 2
        scaled: torch.Tensor = values.float().mul_(self.factor)
        if are_patches:
            scaled = scaled.unflatten(1, (len(self.mean), 1, -1))
        mean, std = (to_device(torch.tensor(x), values.device) for x in (self.mean, self.std))
        scaled.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))
        return scaled.expand(-1, -1, self.num_frames, -1).flatten(1) if are_patches else scaled


class ImageEncoder:
    """Calls `model.get_image_features` for batches that are joined along `batch_axis`.

    Without `batch_axis`, and on a CPU, images are encoded one by one: there, batching would change
    the last bits. Without `scaling`, images come scaled. Inputs that the model does not accept are
    dropped. With a `group` this is one rank's part, and only rank 0 has the images' data.
    """

    def __init__(
        self,
        model: Any,
        scaling: Scaling | None,
        *,
        batch_axis: int | None,
        dtype: torch.dtype,
        group: RankGroup | None = None,
    ) -> None:
        self._model = model
        self._scaling = scaling
        self._dtype = dtype
        self._group = group
        self._device = next(model.parameters()).device
        self._batch_axis = None if self._device.type == "cpu" else batch_axis
        self._casts = scaling is not None
        self._wanted = inspect.signature(model.get_image_features).parameters

    @property
    def is_batched(self) -> bool:
        """Whether encoding images together is faster than one by one."""
        return self._batch_axis is not None

    def encode(self, images: Sequence[PromptContent]) -> list[Features | InvalidRequest]:
        """Features in the order of `images`; an error where they do not fit its span."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for index, image in enumerate(images):
            key = index if self._batch_axis is None else _shape(image, self._batch_axis)
            groups[key].append(index)
        encoded: dict[int, Features | InvalidRequest] = {}
        for indexes in groups.values():
            group = [images[index] for index in indexes]
            encoded.update(zip(indexes, self._encode(group), strict=True))
        return [encoded[index] for index in range(len(images))]

    def _encode(self, images: Sequence[PromptContent]) -> list[Features | InvalidRequest]:
        output = self._call(self._batch(images))
        main, late = _parts_of(output)
        hidden_NC = _flatten(main)
        sizes = [image.span.num_features for image in images]
        if sum(sizes) != len(hidden_NC):
            error = InvalidRequest(
                "The number of an image's features does not match its positions in the prompt."
            )
            return [error for _ in images]
        parts = hidden_NC.split(sizes)
        if not late:
            return [Features(part) for part in parts]
        late_parts = torch.stack([_flatten(layer) for layer in late]).split(sizes, dim=1)
        return [Features(part, late) for part, late in zip(parts, late_parts, strict=True)]

    def _batch(self, images: Sequence[PromptContent]) -> dict[str, torch.Tensor]:
        axis = self._batch_axis or 0
        batch = {
            name: torch.cat([self._tensor(p.inputs[name]) for p in images], axis)
            for name in images[0].inputs
            if name in self._wanted
        }
        if self._scaling is not None:
            batch[_PIXELS] = self._scaling(batch[_PIXELS])
            mask = batch.get(_MASK)
            if mask is not None:  # a processor pads after normalizing
                batch[_PIXELS] = batch[_PIXELS] * mask.unsqueeze(-3)
                batch[_MASK] = mask.bool()
        return batch

    def _call(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Call the model, which may compute on pixels before it rounds them to its own type."""
        if not self._casts:
            try:
                return self._model.get_image_features(**batch, return_dict=True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # its class takes pixels of its own type alone
                self._casts = True
        given = {
            name: x.to(self._dtype) if x.is_floating_point() else x for name, x in batch.items()
        }
        return self._model.get_image_features(**given, return_dict=True)

    def _tensor(self, array: Array) -> torch.Tensor:
        if self._group is not None and self._group.rank:
            kind = getattr(torch, array.dtype)
            return self._group.broadcast(torch.empty(array.shape, dtype=kind, device=self._device))
        numbers = np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)
        values = to_device(torch.from_numpy(numbers.copy()), self._device)
        return values if self._group is None else self._group.broadcast(values)


def _shape(image: PromptContent, axis: int) -> tuple[Any, ...]:
    """A key that is equal for images that can be joined along `axis`."""
    return tuple(
        (name, array.dtype, array.shape[:axis], array.shape[axis + 1 :])
        for name, array in sorted(image.inputs.items())
    )


def _parts_of(output: Any) -> tuple[Any, Sequence[Any]]:
    """The main features of an encoder's output, and those that follow later layers.

    Where the output has nothing but features by layer, the first of them count as the main part.
    """
    main = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    late = getattr(output, "deepstack_features", None) or ()
    if main is not None:
        return main, late
    first, *others = (features for _, features in late)
    return first, others


def _flatten(parts: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """All features along one axis."""
    if isinstance(parts, torch.Tensor):
        return parts.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in parts])


def construct_encoder(config: Any, kind: Any) -> Any:
    """Construct the encoder on torch's meta device."""
    with library_errors(f"config.json is invalid as {kind.__name__}"), torch.device("meta"):
        return _encoder_of(_without_language(kind)(_shrink_language_model(config)))


def load_encoder(
    checkpoint: Checkpoint, config: Any, kind: Any, *, dtype: torch.dtype, names: Sequence[str]
) -> Any:
    """Load the encoder of class `kind` from the tensors `names`. Raises `WeightsError`."""
    with transformers_loading():
        model, info = _without_language(kind).from_pretrained(
            None,
            config=_shrink_language_model(config),
            state_dict={name: checkpoint.read(name) for name in names},
            dtype=dtype,
            ignore_mismatched_sizes=True,  # mismatches are reported, and refused below
            output_loading_info=True,
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = [str(key) for key in info[problem]]
        if wrong := sorted(k for k in keys if not any(part in k for part in _LANGUAGE)):
            raise WeightsError(f"The vision encoder has {problem}: {', '.join(wrong[:3])}.")
    return _encoder_of(model)


def _without_language(kind: Any) -> Any:
    """The class `kind`, modified to accept a missing language model."""
    ignored = [rf"{part}" for part in _LANGUAGE]
    return type(kind.__name__, (kind,), {"_keys_to_ignore_on_load_missing": ignored})


def _shrink_language_model(config: Any) -> Any:
    """The configuration with a minimal language model, whose weights nothing is tied to."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    text = config.text_config
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 1, 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    return config


def _encoder_of(model: Any) -> Any:
    """The encoder, taken from the model."""
    base = model.base_model
    for name in ("language_model", "text_model"):
        if hasattr(base, name):
            setattr(base, name, torch.nn.Module())
    return base.eval()
