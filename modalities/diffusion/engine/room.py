"""Divides the memory that an image model's weights leave among runs, decoding and images.

Owns the shares, and the advice if one image does not fit. Reads no weights: all sizes follow from
shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.options.config import Config, ImageOptions
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.runtime.graphs.decode import GPU_POOL_BYTES
from triptych.modalities.diffusion.engine.costs import GenerationCosts, own_request
from triptych.modalities.diffusion.plan import ImageCost

_SHARE = 0.25  # largest share of the free memory for images, and the same for activations
_NUM_BRANCHES = 2
_LITTLE_BYTES = 64 * 2**20  # enough for a small model to decode many images at once
_SPARE_STATE = 4  # images may be larger than the default size, and have caches
_SIZE_RANGE = 16  # images with fewer pixels than default_size / 16 are not useful


@dataclass(frozen=True, slots=True)
class Room:
    """Capacities: rows of one run, bytes of images, pixels decoded as a whole.

    `graphs` are those of captured runs, if runs are captured.
    """

    max_rows: int
    state_bytes: int
    whole_pixels: int
    graphs: CapturedSteps | None

    @classmethod
    def reserve(
        cls, memory: ModelMemory, costs: GenerationCosts, config: Config, *, captures: bool
    ) -> Room:
        """Reserve the memory. Raises `MemoryBudgetExceeded`.

        One image of the default size must fit, or of the largest size that the options allow, and
        a run for its two branches.
        """
        images = config.images
        own = costs.of_image(own_request(costs.recipe, images.max_image_pixels))
        remedy = _remedy(costs, images, memory.most_bytes)
        available = memory.available_bytes
        most = int(_SHARE * available / max(1, len(config.models.model)))
        for_runs = min(most, available - _least_state_bytes(own, images))
        row_bytes = costs.row_bytes(own.num_tokens)
        num_rows = max(min(images.max_image_rows, for_runs // row_bytes), _NUM_BRANCHES)
        # Steps follow one another: a run, a decoding and the encoding of a prompt share the room.
        least = max(num_rows * row_bytes, costs.decode_bytes(own.num_pixels), costs.encode_bytes)
        activations = max(least, min(for_runs, _LITTLE_BYTES))
        memory.reserve("activations", activations, remedy=remedy)
        wanted = _SPARE_STATE * images.max_images_in_flight * own.state_bytes
        wanted = images.image_memory_mb << 20 or min(most, wanted, memory.available_bytes)
        state_bytes = max(own.state_bytes, wanted)
        memory.reserve("images", state_bytes, remedy=remedy)
        pool_bytes = 0 if costs.recipe.device.type == "cpu" else GPU_POOL_BYTES
        graphs = memory.captured_steps(num_rows * row_bytes + pool_bytes) if captures else None
        return cls(num_rows, state_bytes, activations // costs.decode_bytes(1), graphs)


def _least_state_bytes(own: ImageCost, images: ImageOptions) -> int:
    return max(own.state_bytes, images.image_memory_mb << 20)


def _remedy(costs: GenerationCosts, images: ImageOptions, most_bytes: int) -> str:
    """The options to change if `most_bytes` are too few for one image; empty if they suffice."""

    def missing_bytes(own: ImageCost) -> int:
        runs = max(
            _NUM_BRANCHES * costs.row_bytes(own.num_tokens),
            costs.decode_bytes(own.num_pixels),
            costs.encode_bytes,
        )
        return runs + _least_state_bytes(own, images) - most_bytes

    own = costs.of_image(own_request(costs.recipe, images.max_image_pixels))
    if (missing := missing_bytes(own)) <= 0:
        return ""
    if (left_bytes := (images.image_memory_mb << 20) - missing) >= own.state_bytes:
        return f" One image fits with --image-memory-mb {left_bytes >> 20}."
    fewer_bits = "Weights in fewer bits leave more for images: --quantization-encoding."
    smaller = own
    while smaller.num_pixels > own.num_pixels / _SIZE_RANGE:
        smaller = costs.of_image(own_request(costs.recipe, smaller.num_pixels - 1))
        if missing_bytes(smaller) <= 0:
            return f" Smaller images fit: --max-image-pixels {smaller.num_pixels}. {fewer_bits}"
    return f" {fewer_bits}"
