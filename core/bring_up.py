"""From options to a device that is ready for models.

Owns the first steps of every process that computes: threads, the device, its memory ledger.
"""

from __future__ import annotations

import torch

from triptych.core.config import DeviceOptions
from triptych.core.device import Device
from triptych.core.errors import DeviceError
from triptych.core.ledger import Ledger
from triptych.core.threads import num_usable_cores


def bring_up(options: DeviceOptions) -> tuple[Device, Ledger]:
    """Open the device and give it a ledger of what is free there, times the share allowed.

    Raises `DeviceError` where there is no such device, or not one that does as it must.
    """
    torch.set_num_threads(options.threads or num_usable_cores())
    device = Device.open(options.device)
    if options.enable_deterministic_inference and not device.is_cpu:
        raise DeviceError(
            "--enable-deterministic-inference: on a GPU the order of sums follows from the batch;"
            " use --device cpu, or leave it out."
        )
    return device, Ledger(int(device.free_bytes() * options.device_memory_utilization))
