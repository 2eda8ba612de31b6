"""From options to a device that is ready for models.

Owns the first steps of every process that computes: threads, the device, its memory ledger.
"""

from __future__ import annotations

import logging

import torch

from triptych.core.config import DeviceOptions
from triptych.core.devices.device import Device
from triptych.core.errors import DeviceError
from triptych.core.ledger import Ledger
from triptych.core.threads import usable_cores

_log = logging.getLogger(__name__)


def bring_up(options: DeviceOptions) -> tuple[Device, Ledger]:
    """Open the device and give it a ledger of what is free there, times the share allowed.

    Raises `DeviceError` where there is no such device, or not one that does as it must.
    """
    _set_num_threads(options.threads)
    device = Device.open(options.device)
    if options.enable_deterministic_inference and not device.is_cpu:
        raise DeviceError(
            "--enable-deterministic-inference: on a GPU the order of sums follows from the batch;"
            " use --device cpu, or leave it out."
        )
    return device, Ledger(int(device.free_bytes() * options.device_memory_utilization))


def _set_num_threads(asked: int) -> None:
    """Of torch, and of the native kernels, which take as many."""
    cores = usable_cores()
    num_threads = asked or cores.count
    torch.set_num_threads(num_threads)
    reason = f"--threads; {cores}" if asked else str(cores)
    _log.info("threads to compute with: %d (%s)", num_threads, reason)
