"""The device memory of one token model: types, cache format, pages, entries in the ledger.

Owns the sizes that loaders of all modalities choose in the same way. Knows no architecture.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import torch

from triptych.core.bundle.store import Bundle
from triptych.core.errors import ConfigError, MemoryBudgetExceeded, ModelTooLarge
from triptych.core.kv.parts import PartKind
from triptych.core.ledger import Ledger, Reservation, mib
from triptych.core.options.config import Config
from triptych.core.options.tier_plan import TierPlan
from triptych.core.process.logs import fields
from triptych.core.runtime.decoders.shared_packing import SharedPacking
from triptych.core.runtime.devices.device import Device, free_host_bytes
from triptych.core.runtime.engine.cache_size import CacheSize, Demand
from triptych.core.runtime.engine.memory_table import memory_table
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvLayout
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.packed_files import PackedFiles
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.encoding import WeightEncoding, plain_type
from triptych.core.weights.layout import weight_files
from triptych.core.weights.resolve import ResolvedModel, files_stamp

_DTYPES = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
)
_PAGE_DTYPES = MappingProxyType(
    {**_DTYPES, "float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
)
FEWER_BITS = " Quantized weights take less memory: --quantization-encoding."
_REMEDIES = MappingProxyType(
    {
        "weights": FEWER_BITS,
        "activations": " Lower --max-batch-input-tokens, --max-batch-size or --max-length"
        " to make steps smaller.",
        "states": " Lower --max-batch-size to keep the states of fewer rows.",
        "codec-state": " Lower --max-streams to keep fewer voices.",
        "kv-host": " Lower --host-kvcache-swap-space-gb to keep fewer cached pages.",
        "vision-cache": " Lower --max-vision-cache-entries to keep fewer images.",
    }
)
"""Advice for the user, by the purpose that is too large."""
_HOST_SHARE = 0.5  # of the memory that is left, for the host tier unless its size is given
_CPU_CACHE_SHARE = 0.25  # of the ledger: a laptop needs memory for other programs

_log = logging.getLogger(__name__)


def open_kernels(config: Config, bundle: str = "") -> NativeKernels | None:
    """Open the CPU kernels that the options ask for; from the bundle where it has them."""
    folder = WeightsCache.open(config.models.cache_dir).kernels
    return _open_kernels(config.device.cpu_kernels, folder, config.device.cpu_isa, bundle)


@cache
def _open_kernels(mode: str, folder: Path, isa: str, bundle: str) -> NativeKernels | None:
    """Open the kernels once for all models of a process."""
    return NativeKernels.open(mode, folder, isa, Bundle.open(Path(bundle)) if bundle else None)


class SizesTaken(Exception):
    """All memory of a model has been reserved, in a separate ledger."""


class ModelMemory:
    """The memory choices of a model; reservations are released with `stack`."""

    def __init__(
        self,
        model: ResolvedModel,
        config: Config,
        device: Device,
        ledger: Ledger,
        stack: ExitStack,
    ) -> None:
        self._name = model.name
        self._model = model
        self._config = config
        self._device = device
        self._ledger = ledger
        self._stack = stack
        self.num_ranks = 1  # ranks that the model is divided over
        self.is_sketch = False
        self.has_host_layers = False  # whose weights each step copies

    def dtype(self, stored: torch.dtype, *, takes_blocks: bool = False) -> torch.dtype:
        """The type to compute in, for weights `stored` in some type.

        Raises `ConfigError` for options that contradict each other, or ask for blocks where
        `takes_blocks` is false.
        """
        wanted = plain_type(self._config.models, takes_blocks=takes_blocks)
        return _DTYPES.get(wanted) or self._device.compute_dtype(stored)

    def encoding(self, checkpoint: Checkpoint) -> WeightEncoding:
        """The encoding of its weights. Raises `ConfigError` for a checkpoint in another one."""
        wanted = self._config.models.quantization_encoding
        return WeightEncoding.of(wanted, checkpoint.tensors, checkpoint.encoding)

    def cache_format(self, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Page size and type of keys and values, for a model that computes in `dtype`."""
        options = self._config.cache
        return options.kv_cache_page_size, _PAGE_DTYPES.get(options.kv_cache_format, dtype)

    def native_kernels(self) -> NativeKernels | None:
        """The CPU kernels, where the device and the options allow them."""
        return open_kernels(self._config, self._model.bundle) if self._device.is_cpu else None

    def packing(self, kernels: NativeKernels | None) -> SharedPacking | None:
        """Where the model's packed weights are shared with other processes, if they are.

        Raises `ConfigError` where that is asked for, and nothing packs them.
        """
        options = self._config.device
        if kernels is None and options.share_weights and self._device.is_cpu:
            raise ConfigError(
                "--share-weights: weights are shared in the layout of the native CPU kernels, which"
                f" {self._name} does not use here (--cpu-kernels); leave it out."
            )
        if kernels is None or options.share_weights is False:
            return None
        folder = WeightsCache.open(self._config.models.cache_dir).packed
        files = PackedFiles(
            *(folder, kernels),
            max_bytes=int(options.shared_weights_gb * 2**30),
            maps_small_pages=options.share_weights is True,
        )
        place = Path(self._model.folder).resolve()
        stamps = map(files_stamp, weight_files(place))  # other files may be a server's log, say
        return SharedPacking(files, " ".join((self._model.digest, str(place), *stamps)))

    def reserve(
        self, purpose: str, num_bytes: int, *, is_divided: bool = True, remedy: str | None = None
    ) -> None:
        """Reserve bytes that are about to be allocated; divided purposes count for every rank here.

        Raises `MemoryBudgetExceeded`; if the bytes can never be free its message ends with the
        `remedy`, by default that of the purpose.
        """
        remedy = _REMEDIES.get(purpose, "") if remedy is None else remedy
        self._reserve(purpose, num_bytes * (self._num_shares if is_divided else 1), remedy)

    @property
    def available_bytes(self) -> int:
        """The memory left now for each rank on this device."""
        return self._ledger.available_bytes // self._num_shares

    @property
    def most_bytes(self) -> int:
        """The memory that would be left for each rank without other models."""
        return self._ledger.most_bytes(self._name) // self._num_shares

    def _reserve(self, purpose: str, num_bytes: int, remedy: str = "") -> Reservation:
        owner = f"{self._name}/{purpose}"
        try:
            reservation = self._stack.enter_context(self._ledger.reserve(owner, num_bytes))
        except ModelTooLarge as error:
            raise ModelTooLarge(f"{error.message}{remedy}") from error
        reservation.commit()
        return reservation

    def show(self) -> None:
        """Log the device's memory table; called before weights are read.

        Raises `SizesTaken` instead if only the sizes were wanted.
        """
        if self.is_sketch:
            raise SizesTaken
        if not _log.isEnabledFor(logging.DEBUG):
            return
        for model, sizes in memory_table(self._ledger.by_owner()).items():
            _log.debug("memory", extra=fields(model=model, **sizes))
        left_mib = round(self._ledger.available_bytes / 2**20, 1)
        _log.debug("memory left", extra=fields(left_mib=left_mib))

    @property
    def _num_shares(self) -> int:
        """The number of ranks that take this much of the device: on a CPU all of them."""
        return self.num_ranks if self._device.is_cpu else 1

    @property
    def captures(self) -> bool:
        """Whether steps are captured. Raises `ConfigError` for options without effect."""
        wanted = self._config.device.device_graph_capture
        captures = not self._device.is_cpu if wanted is None else wanted
        if self.num_ranks > 1:
            if wanted:
                raise ConfigError(
                    "--device-graph-capture: steps of a divided model are not captured yet; omit"
                    " it, or put the model on one device."
                )
            captures = False
        if self.has_host_layers:
            if wanted:
                raise ConfigError(
                    "--device-graph-capture: steps that copy layers of host memory are not"
                    " captured; leave it or --cpu-offload-gb out."
                )
            captures = False
        if self._config.debug.debug_verify_replay and not captures:
            raise ConfigError(
                "--debug-verify-replay: no step is captured here; add --device-graph-capture."
            )
        return captures

    def captured_steps(self, num_bytes: int) -> CapturedSteps | None:
        """Captured steps of up to `num_bytes`; `None`, logged, where memory is short.

        Also `None` where steps are not captured.
        """
        if not self.captures:
            return None
        try:
            reservation = self._reserve("graphs", num_bytes)
        except MemoryBudgetExceeded:
            left = self._ledger.available_bytes
            _log.warning(
                "steps run eagerly: %s/graphs needs %s, but %s are left",
                *(self._name, mib(num_bytes), mib(left)),
            )
            return None
        return CapturedSteps(
            self._name,
            self._device.torch,
            budget_bytes=num_bytes,
            verifies=self._config.debug.debug_verify_replay,
            resize=partial(_resize, reservation),
        )

    def reserve_cache(
        self,
        layout: KvLayout,
        max_length: int,
        *,
        gives_back: bool = False,
        drafts: bool = False,
    ) -> CacheSize:
        """Reserve the pages and states that full batches can use, within budget and free memory.

        One row of the whole context must fit, whatever the shares. With `gives_back`, layers with a
        window may have pages of their own; with `drafts` each row keeps a second state. Raises
        `ModelTooLarge`, naming the context that fits, where even one row is too long.
        """
        num_slots = self._config.schedule.max_batch_size if layout.states else 0
        num_kept = num_slots if drafts else 0
        self.reserve_states(layout, num_slots + num_kept)
        pages_per_row = -(-max_length // layout.page_size)
        page_bytes = max(1, layout.page_bytes * self._num_shares)
        room = self._ledger.available_bytes // page_bytes - 1
        share = room // max(1, len(self._config.models.model))
        if self._config.cache.kv_cache_memory_mb:
            share = self._config.cache.kv_cache_memory_mb * 2**20 // page_bytes
        elif self._device.is_cpu:
            cpu_bytes = int(self._ledger.capacity_bytes * _CPU_CACHE_SHARE)
            share = min(share, cpu_bytes // page_bytes)
        num_bytes = min(max(share, pages_per_row), room) * page_bytes // self._num_shares
        most = pages_per_row * self._config.schedule.max_batch_size
        size = CacheSize.divided(
            layout,
            num_bytes,
            least_pages=pages_per_row,
            most_pages=most,
            num_slots=num_slots,
            has_snapshots=self._config.cache.enable_prefix_caching,
        )
        size = replace(size, num_kept=num_kept)
        if gives_back:
            sizes = {"least_pages": pages_per_row, "most_pages": most}
            demand = Demand.of(self._config.schedule, max_length)
            size = size.with_windows(layout, num_bytes, demand=demand, **sizes)
        if room < pages_per_row and size.windows is None:
            raise self._lack_of_pages(layout, max_length, room, page_bytes)
        self.reserve("kv", size.page_bytes(size.layout_of(layout), 1))
        self.reserve_states(layout, size.num_snapshots)
        self._show_windows(layout, size)
        return size

    def _show_windows(self, layout: KvLayout, size: CacheSize) -> None:
        """Log what pages of their own save where layers with a window have them."""
        if size.windows is None:
            return
        num_bytes = size.page_bytes(size.layout_of(layout), 1)
        _log.info(
            "%s: pages for %d tokens, in layers with a window for %d: %d %% of the memory that full"
            " attention takes (at most %d rows at a time)",
            *(self._name, size.num_pages * layout.page_size),
            size.num_window_pages * layout.page_size,
            100 * num_bytes // ((size.num_pages + 1) * layout.page_bytes),
            min(size.windows.num_rows, self._config.schedule.max_batch_size),
        )

    def reserve_host_tier(
        self, plan: TierPlan, layout: KvLayout, size: CacheSize
    ) -> dict[PartKind, int]:
        """Reserve host memory for pages that leave the device; returns the bytes of each kind.

        The kinds have the shares that they have on the device. On a CPU the bytes are part of the
        ledger, as the cache is; on a GPU they must be free now. Raises `ConfigError`, or an error
        of the ledger, where there is no room.
        """
        device, sizes = size.part_bytes(layout), size.layout_of(layout).part_bytes
        whole_bytes = sum(device.values())
        left_bytes = self._ledger.available_bytes if self._device.is_cpu else free_host_bytes()
        wanted = plan.host_bytes
        if not wanted:
            even = int(_HOST_SHARE * left_bytes) // max(1, len(self._config.models.model))
            wanted = min(int(plan.host_ratio * whole_bytes), even)
        host = {
            kind: wanted * num_bytes // whole_bytes // sizes[kind] * sizes[kind]
            for kind, num_bytes in device.items()
        }
        wanted = sum(host.values())
        if not all(host.values()) or (wanted > left_bytes and not self._device.is_cpu):
            raise ConfigError(
                f"--kv-connector {plan.connector}: {mib(left_bytes)} of host memory are free, and"
                f" {self._name} has pages of {mib(sum(sizes.values()))}; set another"
                " --host-kvcache-swap-space-gb, or leave it out."
            )
        if self._device.is_cpu:
            self.reserve("kv-host", wanted, is_divided=False)
        else:
            _log.info("%s: %s of host memory for cached pages", self._name, mib(wanted))
        return host

    def reserve_states(self, layout: KvLayout, num_states: int) -> None:
        """Reserve the states of so many rows or snapshots, if the model keeps states."""
        if layout.states and num_states:
            self.reserve("states", num_states * layout.state_bytes)

    def _lack_of_pages(
        self, layout: KvLayout, max_length: int, room: int, page_bytes: int
    ) -> MemoryBudgetExceeded:
        """The error for a cache with room for less than one row of the context."""
        most = self._ledger.most_bytes(self._name) // page_bytes - 1
        if most * layout.page_size >= max_length:  # once other models are unloaded
            return MemoryBudgetExceeded(
                f"The cache of {self._name} has room for {max(room, 0) * layout.page_size} tokens,"
                f" less than its context of {max_length}: lower --max-length, or raise"
                " --device-memory-utilization."
            )
        if most < 1:
            return ModelTooLarge(
                f"{self._name} can never fit: its weights leave no memory for a cache. Raise"
                " --device-memory-utilization, or serve a smaller model."
            )
        num_tokens = most * layout.page_size
        error = ModelTooLarge(
            f"{self._name} can never fit with its context of {max_length} tokens: its weights leave"
            f" room for {num_tokens}. Give --max-length {num_tokens}, or raise"
            " --device-memory-utilization."
        )
        error.context_that_fits = num_tokens
        return error


def _resize(reservation: Reservation, num_bytes: int) -> bool:
    """Resize a reservation; returns whether the memory was there."""
    try:
        reservation.resize(num_bytes)
    except MemoryBudgetExceeded:
        return False
    return True
