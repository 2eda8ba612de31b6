"""The heads that draft, by the algorithm that names them.

Owns the table, and the refusal of models that no head can read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from triptych.core.errors import ConfigError
from triptych.core.options.speculation import DFLASH, EAGLE3, MTP, NEXTN
from triptych.core.runtime.decoders.heads.dflash import DFlashBlueprint
from triptych.core.runtime.decoders.heads.eagle import EagleBlueprint
from triptych.core.runtime.decoders.heads.mtp import MtpBlueprint
from triptych.core.runtime.decoders.heads.protocol import HeadBlueprint
from triptych.core.runtime.decoders.native import Blueprint, NativeBlueprint
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.tensors.checkpoint import Checkpoint

Read = Callable[[Checkpoint, NativeBlueprint, NativeKernels | None, str], HeadBlueprint]
"""Reads a head of a name before loading, from its own checkpoint or its target's."""
HEADS: Mapping[str, Read] = MappingProxyType(
    {EAGLE3: EagleBlueprint, MTP: MtpBlueprint, NEXTN: MtpBlueprint, DFLASH: DFlashBlueprint}
)


def check_readable(target: Blueprint, algorithm: str, name: str) -> NativeBlueprint:
    """`target`, which a head can read. Raises `ConfigError` for one that it cannot."""
    if not isinstance(target, NativeBlueprint) or target.config.altup is not None:
        raise ConfigError(
            f"--speculative-algorithm {algorithm}: {name} does not run on layers whose hidden"
            " states a head can read; write ngram, or standalone for a text model."
        )
    return target
