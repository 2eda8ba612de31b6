"""One accelerator or the CPU: its name, its memory and the types it computes in.

Owns the first steps of every process that computes (threads, the device, its memory ledger), and
the dtype policy. Knows nothing of models or pages.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil
import torch

from triptych.core.errors import DeviceError
from triptych.core.ledger import Ledger, mib
from triptych.core.options.config import DeviceOptions
from triptych.core.process.heap import keep_freed_memory
from triptych.core.process.threads import usable_cores

# Aliases, because a field of `Device` has the name of torch's module.
TorchDevice: TypeAlias = torch.device
Dtype: TypeAlias = torch.dtype

_SPEC = re.compile(r"(?:gpu|cuda)(?::(\d+(?:,\d+)*))?")
_ANY = ("auto", "default")
_APPLE = ("mps", "metal")
_PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_NUM_PRIMITIVES = 256
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USAGE = Path("/sys/fs/cgroup/memory.current")
_HOPPER = 9  # major version
_WORKSPACE_BYTES, _SMALL_WORKSPACE_BYTES = 2**25, 2**23 + 2**17  # torch's defaults
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """An opened device: a wrapped `torch.device`, without global state."""

    torch: TorchDevice

    @classmethod
    def open(cls, spec: str) -> Device:
        """Open `auto`, `cpu`, `gpu` or `gpu:N`. Raises `DeviceError` in one actionable line."""
        if spec == "cpu" or (spec in _ANY and not torch.cuda.is_available()):
            keep_freed_memory()
            _bound_primitive_caches()
            return cls(torch.device("cpu"))
        index, count = _gpu_index("gpu" if spec in _ANY else spec), torch.cuda.device_count()
        if not torch.cuda.is_available() or index >= count:
            raise DeviceError(
                f"No GPU {index}: {count or 'no'} GPU(s) usable by this PyTorch. Use --device cpu,"
                " or install a PyTorch build and a driver that match."
            )
        _keep_full_precision()
        return cls(torch.device("cuda", index))

    @property
    def name(self) -> str:
        """The device's name in the log."""
        if self.is_cpu:
            return "cpu"
        return f"gpu:{self.torch.index or 0} ({torch.cuda.get_device_name(self.torch)})"

    @property
    def is_cpu(self) -> bool:
        """Whether this is the host's own processor."""
        return self.torch.type == "cpu"

    @property
    def target(self) -> str:
        """The compile target of kernels: `cuda:90`, `hip:gfx942`; empty on a CPU."""
        if self.is_cpu:
            return ""
        properties = torch.cuda.get_device_properties(self.torch)
        if torch.version.hip is not None:
            return f"hip:{properties.gcnArchName.partition(':')[0]}"
        return f"cuda:{properties.major}{properties.minor}"

    def workspace_bytes(self) -> int:
        """The workspaces of the matrix libraries, which torch keeps for a stream of a GPU."""
        if self.is_cpu:
            return 0
        major, _ = torch.cuda.get_device_capability(self.torch)
        return _WORKSPACE_BYTES if major >= _HOPPER else _SMALL_WORKSPACE_BYTES

    def taken_bytes(self) -> int:
        """Device memory held by this process."""
        if self.is_cpu:
            return int(psutil.Process().memory_info().rss)
        return int(torch.cuda.memory_reserved(self.torch))

    def free_bytes(self) -> int:
        """Memory that can be allocated now without swapping, container limits respected."""
        if not self.is_cpu:
            free, _ = torch.cuda.mem_get_info(self.torch)
            return int(free)
        return free_host_bytes()

    def obtainable_bytes(self) -> int:
        """Memory that this process can allocate now: free, or held without being used.

        It may be fragmented.
        """
        if self.is_cpu:
            return self.free_bytes()
        return self.free_bytes() + self.taken_bytes() - int(torch.cuda.memory_allocated(self.torch))

    def compute_dtype(self, checkpoint_dtype: Dtype) -> Dtype:
        """The type to hold and run weights in: the checkpoint's own where the device has it fast.

        float16 checkpoints run in bfloat16 on a CPU; without fast bfloat16 a CPU takes float32 and
        a GPU float16.
        """
        if checkpoint_dtype not in (torch.bfloat16, torch.float16):
            return torch.float32
        if self.is_cpu:
            return torch.bfloat16 if has_fast_cpu_bfloat16() else torch.float32
        if checkpoint_dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
            return torch.float16
        return checkpoint_dtype

    def synchronize(self) -> None:
        """Wait until everything launched so far is done."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.torch)


def _gpu_index(spec: str) -> int:
    """The index of the one GPU that `--device` names. Raises `DeviceError`."""
    if spec in _APPLE:
        raise DeviceError(
            f"--device {spec}: there are no kernels for Apple GPUs, and torch's own would be slower"
            " than the CPU kernels. Use --device cpu, or auto, which takes the CPU there."
        )
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise DeviceError(f"Unknown device {spec!r}: use auto, cpu, gpu or gpu:N.")
    numbers = (match[1] or "0").split(",")
    if len(numbers) > 1:
        raise DeviceError(
            f"--device {spec}: --tensor-parallel-size is the number of GPUs that a model"
            f" is divided over. Add it, use --device gpu:{numbers[0]}, or serve the model on each"
            f" GPU with --device gpu --replicas {len(numbers)}."
        )
    return int(numbers[0])


def rank_device(options: DeviceOptions, rank: int) -> str:
    """The device of one of the ranks that a model is divided over, as `--device` names it."""
    spec = options.device
    match = _SPEC.fullmatch(spec)
    numbers = (match[1] or "0").split(",") if match else []
    if len(numbers) > 1 and len(numbers) == options.num_devices:
        return f"gpu:{numbers[rank]}"
    if len(numbers) > 1 or rank == 0 or not torch.cuda.is_available() or spec == "cpu":
        return spec
    return f"gpu:{int(numbers[0] if numbers else 0) + rank}"


def share_cores(options: DeviceOptions, num_ranks: int) -> None:
    """Limit torch to this rank's share of the cores, unless `--threads` is set."""
    if not options.threads:
        torch.set_num_threads(max(1, usable_cores().count // num_ranks))


def open_device(options: DeviceOptions) -> tuple[Device, Ledger]:
    """Open the device and create the ledger of its memory: free memory times the share allowed.

    Raises `DeviceError` where the device does not exist or cannot be used.
    """
    cores = usable_cores()
    num_threads = options.threads or cores.count
    torch.set_num_threads(num_threads)  # the native kernels use the same number
    reason = f"--threads; {cores}" if options.threads else str(cores)
    _log.debug("threads to compute with: %d (%s)", num_threads, reason)
    device = Device.open(rank_device(options, 0))
    free_bytes = device.free_bytes()
    ledger = Ledger(int(free_bytes * options.device_memory_utilization), free_bytes)
    _log.debug(
        "device %s: %s of %s free for models (--device-memory-utilization %g)",
        device.name,
        mib(ledger.capacity_bytes),
        mib(free_bytes),
        options.device_memory_utilization,
    )
    return device, ledger


def free_host_bytes() -> int:
    """Host memory that can be allocated now without swapping, container limits respected."""
    return min(int(psutil.virtual_memory().available), _container_bytes())


def has_fast_cpu_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 natively on this processor."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _keep_full_precision() -> None:
    """Compute float32 convolutions in float32, as torch does matrix products by default.

    For the whole process and once: torch's setting is global, so that code which changes it for a
    while would change it for models on other threads.
    """
    torch.backends.cudnn.allow_tf32 = False


def _bound_primitive_caches() -> None:
    """Limit the compiled primitives that oneDNN and torch's layer above it keep, 1,024 by default.

    One of half a megabyte is compiled for each weight and number of rows. With prompts of many
    lengths the caches grew for hours, to gigabytes with the fragmentation. Compiling one again
    takes a fraction of a millisecond. The limits are read at the first matrix product.
    """
    for name in _PRIMITIVE_CACHES:
        os.environ.setdefault(name, str(_NUM_PRIMITIVES))


def _container_bytes() -> int:
    """Bytes that the enclosing cgroup (version 2) still allows; without a limit, a huge number."""
    try:
        return int(_CGROUP_LIMIT.read_text()) - int(_CGROUP_USAGE.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return 2**62


def end_of_work(device: torch.device) -> Callable[[], None]:
    """A function that waits for the work launched so far on this thread's stream.

    The thread sleeps until then. Waiting for other events keeps a core busy (`HostCopy.get`), so
    the result of a step is read after its end; `torch.Event` takes `blocking` and ignores it.
    """
    if device.type != "cuda":
        return _is_over
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event.synchronize


def _is_over() -> None:
    """Do nothing: on a CPU, work is done when its launch returns."""
