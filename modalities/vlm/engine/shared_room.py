"""Whether the ranks of a divided encoder have the memory for an image, before any begins with it.

Owns the question and its one answer. In the midst of a step no rank can give up alone: the others
would wait for it, and the engine would have to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.runtime.devices.device import Device
from triptych.modalities.vlm.scheduling.prompts import num_patches_of

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRoom:
    """Of one rank. A step of `reserved_patches` has its memory already, and nobody is asked."""

    group: RankGroup
    device: Device
    patch_bytes: int
    reserved_patches: int

    def holds(self, images: Iterable[PromptContent]) -> bool:
        """Whether all ranks have room for a step: each asks, and gets the same answer."""
        num_patches = sum(map(num_patches_of, images))
        if num_patches <= self.reserved_patches:
            return True
        num_sharing = self.group.num_ranks if self.device.is_cpu else 1
        needed_bytes = num_patches * self.patch_bytes * num_sharing
        is_short = needed_bytes > self.device.obtainable_bytes()
        flag = torch.tensor([is_short], dtype=torch.int32, device=self.device.torch)
        return not self.group.sum(flag).item()
