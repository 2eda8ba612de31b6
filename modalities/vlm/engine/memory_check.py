"""The common check, before a step, that all ranks of a divided encoder have memory for it.

Owns the check. During a step no rank can abort alone: the other ranks would wait for it, and the
engine would have to end.
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
class SharedMemoryCheck:
    """Checks memory on one rank. A step of at most `reserved_patches` needs no check."""

    group: RankGroup
    device: Device
    patch_bytes: int
    reserved_patches: int

    def has_memory(self, images: Iterable[PromptContent]) -> bool:
        """Whether all ranks have memory for a step; collective, with the same result on each."""
        num_patches = sum(map(num_patches_of, images))
        if num_patches <= self.reserved_patches:
            return True
        num_sharing = self.group.num_ranks if self.device.is_cpu else 1
        needed_bytes = num_patches * self.patch_bytes * num_sharing
        is_short = needed_bytes > self.device.obtainable_bytes()
        flag = torch.tensor([is_short], dtype=torch.int32, device=self.device.torch)
        return not self.group.sum(flag).item()
