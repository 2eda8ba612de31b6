"""The encoder of the family, as a model of transformers: pixels to soft words."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from triptych.modalities.vlm.engine.slots.reader import SlotHead, SlotProjector
from triptych.modalities.vlm.engine.slots.tower import EfficientNetLite
from triptych.modalities.vlm.processing.slots_config import SlotConfig


class SlotModel(PreTrainedModel):  # type: ignore[misc]
    """Tower, reader and teller. The language model is somebody else's business."""

    config_class = SlotConfig
    main_input_name = "pixel_values"

    def __init__(self, config: SlotConfig) -> None:
        super().__init__(config)
        vision: Any = config.vision_config
        self.tower = EfficientNetLite()
        self.reader = SlotHead(vision)
        self.teller = SlotProjector(vision, config.get_text_config().hidden_size)
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, return_dict: bool = True
    ) -> BaseModelOutputWithPooling:
        """Soft words `[B, P, C]` of pictures `[B, 3, H, W]` in -1..1, as `pooler_output`."""
        middle, last = (lines.flatten(2).mT for lines in self.tower(pixel_values))
        return BaseModelOutputWithPooling(pooler_output=self.teller(self.reader(middle, last)))
