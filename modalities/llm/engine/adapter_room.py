"""The room for adapters in a text model, made before its weights are read.

Owns the choice of their number and rank, and the check of the adapters that the operator names.
Reads headers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.core.errors import ConfigError, WeightsError
from triptych.core.options.config import Config
from triptych.core.runtime.decoders.adapters import MAX_GPU_RANK, MAX_RANK, AdapterRoom
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.peft import TextAdapter, is_of_text, locate_adapter
from triptych.core.weights.pipeline_index import prefix_errors

_USUAL_RANK = 16  # of adapters that are loaded later, where memory is taken for them now


def make_room(
    blueprint: Any, config: Config, device: Device, name: str, *, sees: bool = False
) -> None:
    """Make room for adapters in the model called `name`, unless they are off.

    One that `sees` gets adapters without a base model only where it is the only model.
    Raises `ConfigError` where the operator names adapters for a model that takes none, and
    `WeightsError` for an adapter that it cannot take.
    """
    options = config.adapters
    named = list(_named(config, name, sees=sees))
    is_wanted = bool(named) or options.enable_lora is True
    if options.enable_lora is False or not (is_wanted or device.is_cpu):
        return
    if reason := _refusal(blueprint, config):
        if named or (is_wanted and not sees):
            raise ConfigError(f"--enable-lora, --lora-paths: {name} {reason}")
        return
    rank = max([adapter.max_rank for _, adapter in named], default=_USUAL_RANK)
    room = AdapterRoom(
        num_slots=options.max_num_loras,
        max_rank=options.max_lora_rank,
        stacked_rank=options.max_lora_rank or rank,
        modules=options.lora_target_modules,
    )
    place, most = ("CPU", MAX_RANK) if device.is_cpu else ("GPU", MAX_GPU_RANK)
    if room.stacked_rank > most:
        raise ConfigError(f"--max-lora-rank: on a {place} adapters have a rank up to {most}.")
    blueprint.adapter_room = room
    modules = blueprint.adaptable
    for called, adapter in named:
        with prefix_errors(f"adapter {called}"):
            modules.check(adapter, room)


def _refusal(blueprint: Any, config: Config) -> str:
    """Why a model takes no adapters, if it does not."""
    if not isinstance(blueprint, NativeBlueprint):
        return (
            "does not run on our decoder, and adapters change that alone: leave them out, or merge"
            " an adapter into its weights."
        )
    if config.device.tensor_parallel_size > 1:
        return "is divided over ranks, and adapters are not: leave --tensor-parallel-size out."
    return ""


def _named(config: Config, name: str, *, sees: bool) -> Iterator[tuple[str, TextAdapter]]:
    """The adapters of `--lora-paths` that are certainly of this model, by name."""
    is_chosen = len(config.models.model) == 1
    is_only = is_chosen or not (config.models.model or sees)
    for each in config.adapters.places():
        if not (each.base_model_name == name or (is_only and not each.base_model_name)):
            continue
        with prefix_errors(f"adapter {each.name}"):
            if is_of_text(locate_adapter(each.path, config.models)):
                yield each.name, TextAdapter.read(each.path, config.models)
            elif is_chosen:
                raise WeightsError(f"It changes no text model; {name} is one.")
