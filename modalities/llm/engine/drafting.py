"""Opens the loader of the smaller model or head that drafts for a language model.

Owns the refusals that do not depend on its files.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.errors import ConfigError
from triptych.core.options.config import Config
from triptych.core.options.speculation import MTP, NEXTN
from triptych.core.runtime.decoders.heads.table import HEADS, check_readable
from triptych.core.runtime.decoders.native import Blueprint
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.modalities.llm.engine.draft_loader import DraftLoader, NoDraftLoader
from triptych.modalities.llm.engine.head_loader import HeadLoader
from triptych.modalities.llm.engine.small_model_loader import SmallModelLoader


def open_draft_loader(
    resolved: ResolvedModel,
    config: Config,
    device: Device,
    target: Blueprint,
    open_memory: Callable[[ResolvedModel, Config], ModelMemory],
    *,
    sees_images: bool,
) -> DraftLoader | NoDraftLoader:
    """The loader of the drafting model, if there is one; `open_memory` opens its memory.

    Raises `ConfigError` for a `target` that has no drafts.
    """
    options = config.speculation
    if options.speculative_algorithm in (MTP, NEXTN):
        resolved = structs.replace(resolved, draft=resolved.folder)
    elif not (options.draft_model_path and resolved.draft):  # or it was loaded at run time
        return NoDraftLoader()
    if config.device.tensor_parallel_size > 1:
        raise ConfigError(
            f"--speculative-algorithm {options.speculative_algorithm}: {resolved.name} is divided"
            " (--tensor-parallel-size), and a model that drafts runs on one device; leave one of"
            " them out."
        )
    if (algorithm := options.speculative_algorithm) not in HEADS:
        if sees_images:
            raise ConfigError(
                f"--speculative-algorithm {algorithm}: {resolved.name} takes images, and a"
                " smaller model drafts for text models alone; write mtp, eagle3, or ngram."
            )
        return SmallModelLoader(resolved, config, device, open_memory)
    readable = check_readable(target, algorithm, resolved.name)
    return HeadLoader(
        resolved, config, device, open_memory, target=readable, sees_images=sees_images
    )
