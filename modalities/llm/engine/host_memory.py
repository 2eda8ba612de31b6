"""Layers of a text model that stay in host memory (`--cpu-offload-gb`), planned before loading.

Owns the choice by the options, and what the log says of its cost.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from triptych.core.errors import ConfigError
from triptych.core.ledger import mib
from triptych.core.options.config import Config
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.devices.device import Device, free_host_bytes
from triptych.core.runtime.engine.model_memory import ModelMemory

_TIMED_BYTES = 2**26
_log = logging.getLogger(__name__)


def leave_on_host(
    blueprint: Any, config: Config, device: Device, memory: ModelMemory, name: str
) -> None:
    """Plan the layers of the model called `name` that stay in host memory, if the options ask.

    Raises `ConfigError` where that is not offered, or would save nothing.
    """
    wanted = config.device.cpu_offload_gb
    if not wanted:
        return
    if device.is_cpu:
        raise ConfigError(
            "--cpu-offload-gb: on a CPU weights are in host memory already, mapped from files;"
            " leave it out."
        )
    if not isinstance(blueprint, NativeBlueprint) or config.device.tensor_parallel_size > 1:
        raise ConfigError(
            f"--cpu-offload-gb: {name} does not run on our decoder on one GPU, and keeps its layers"
            " on the device; leave it out."
        )
    plan = blueprint.leave_on_host(int(wanted * 2**30))
    memory.has_host_layers = True
    torch._C._host_emptyCache()  # which keeps what an unloaded model had pinned
    if plan.host_bytes > (free_bytes := free_host_bytes()):
        raise ConfigError(
            f"--cpu-offload-gb: {mib(plan.host_bytes)} of {name} are for host memory, of which"
            f" {mib(free_bytes)} are free; give less."
        )
    rate = _link_rate(device.torch)
    _log.info(
        "%s: layers %d to %d stay in host memory, %s; each step copies them, in about %.1f ms"
        " (%.1f GB/s); %s of the device are free for it",
        *(name, plan.first, plan.first + len(plan.layer_bytes) - 1, mib(plan.host_bytes)),
        *(1e3 * plan.host_bytes / rate, rate / 1e9, mib(plan.saved_bytes)),
    )


def _link_rate(device: torch.device) -> float:
    """The bytes per second of copies to the device, measured."""
    host_B = torch.empty(_TIMED_BYTES, dtype=torch.uint8, pin_memory=True)
    there_B = torch.empty(_TIMED_BYTES, dtype=torch.uint8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)  # an event alone is of the first device
    there_B.copy_(host_B, non_blocking=True)  # the first copy maps the memory
    start.record(stream)
    there_B.copy_(host_B, non_blocking=True)
    end.record(stream)
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return _TIMED_BYTES / (max(elapsed_ms, 1e-3) / 1e3)
