"""The common parts of model loaders.

Owns the fields that compose and the pipelines pass to any loader, and the parts that every token
model has. The parts of a model and the order in which they are loaded belong to each loader.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from triptych.core.bundle.triton_cache import use_triton_cache
from triptych.core.errors import ConfigError, ModelTooLarge
from triptych.core.kv.pages import PagePool
from triptych.core.ledger import Ledger
from triptych.core.options.batch_limits import with_batch_limits
from triptych.core.options.config import Config
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.cache_size import CacheSize
from triptych.core.runtime.engine.model_memory import ModelMemory, SizesTaken
from triptych.core.runtime.engine.token_runner import TokenHead, TokenRunner
from triptych.core.runtime.graphs.buckets import DecodeBuckets, PromptBuckets
from triptych.core.runtime.graphs.decode import (
    GPU_POOL_BYTES,
    DecodeGraphs,
    decode_graph_bytes,
    prompt_graph_bytes,
)
from triptych.core.runtime.kernels.attention_backends import TRITON
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache, KvLayout
from triptych.core.runtime.sampling.acceptance import LossyRules
from triptych.core.runtime.sampling.sampler import Sampler
from triptych.core.weights.layout import stored_bytes
from triptych.core.weights.manifest import skip_weight_files
from triptych.core.weights.resolve import ResolvedModel

if TYPE_CHECKING:
    from triptych.core.runtime.engine.ranks import Ranks

LoadedT = TypeVar("LoadedT")
_LEAST_CONTEXT = 512  # tokens; a model with less is of no use
_log = logging.getLogger(__name__)


class DeviceLoader:
    """One model and the device it goes to. `load` makes it a `schedulers.base.ModelLoader`.

    With `is_fixed_on_gpu` its models' matrix products can use fixed tiles there, so that a row does
    not depend on its batch.
    """

    is_fixed_on_gpu: ClassVar[bool] = False
    _num_ranks = 1  # ranks that the model is divided over

    def __init__(
        self, resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
    ) -> None:
        self.name = resolved.name
        self._resolved = resolved
        self._folder = Path(resolved.folder)
        self._config = config
        self._device = device
        self._ledger = ledger
        self._is_sketch = False

    def load(self, report: Callable[[float], None]) -> object:
        """Load the model; see `schedulers.base.ModelLoader`."""
        raise NotImplementedError

    def _with_batch_limits(self, config: Config) -> Config:
        """`config` with the rows and tokens of a step.

        Where it leaves them to the engine, they follow from the memory that the model's share of
        the device has left by about the size of its files.
        """
        share = self._ledger.capacity_bytes // max(1, len(config.models.model))
        left = share - stored_bytes(self._folder) // self._num_ranks
        schedule = with_batch_limits(config.schedule, is_cpu=self._device.is_cpu, left_bytes=left)
        return replace(config, schedule=schedule)

    def check_size(self) -> None:
        """Check that the model fits, before weights are read; see `schedulers.base.ModelLoader`.

        Of a divided model only rank 0's part, the largest, is checked; no other rank is started.
        """
        alone = copy.copy(self)
        alone._ledger = Ledger(self._ledger.capacity_bytes)
        alone._is_sketch = True
        with skip_weight_files(), suppress(SizesTaken):
            alone.load(lambda share: None)
        self._adopt(alone)

    def _adopt(self, sized: Self) -> None:
        """Keep what a copy of this loader found out about the model's sizes."""

    def _memory(self, stack: ExitStack) -> ModelMemory:
        """The model's share of memory; reservations are released with `stack`.

        Raises `ConfigError` where rows would depend on their batch and must not.
        """
        if self._is_deterministic and not (self._device.is_cpu or self.is_fixed_on_gpu):
            raise ConfigError(
                f"--enable-deterministic-inference: on a GPU {self.name} sums in the order of"
                " torch's libraries, which depends on the batch; only text models on the native"
                " decoder do not. Use --device cpu, or leave it out."
            )
        if target := self._device.target:
            use_triton_cache(self._config.models.cache_dir, target, self._resolved.bundle)
        memory = ModelMemory(self._resolved, self._config, self._device, self._ledger, stack)
        memory.is_sketch = self._is_sketch
        if not self._device.is_cpu:
            memory.reserve("libraries", self._device.workspace_bytes())
        return memory

    def _ranks(self, num_ranks: int, stack: ExitStack) -> Ranks:
        """The ranks of a divided model, started until `stack` ends them; not for sizes alone."""
        from triptych.core.runtime.engine.ranks import Ranks

        if self._is_sketch:
            return Ranks.unmet(num_ranks)
        ranks = Ranks.start(self._config, self._resolved, self._device, num_ranks)
        stack.callback(ranks.close)
        return ranks

    @property
    def _is_deterministic(self) -> bool:
        """Whether rows may not depend on their batch."""
        return self._config.device.enable_deterministic_inference


class TokenLoader(DeviceLoader):
    """Loads a model whose steps sample tokens over a paged cache."""

    _attention_backend = TRITON
    reduced_context = 0
    """The context in tokens, where it is shorter than the model's own for want of memory."""

    def __init__(
        self, resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
    ) -> None:
        super().__init__(resolved, config, device, ledger)
        self._config = self._with_batch_limits(config)

    def _with_fitting_context(self, load: Callable[[], LoadedT]) -> LoadedT:
        """Call `load`, and again with the context that fits if the model's own does not.

        A context of --max-length is never reduced. Raises what `load` raises.
        """
        try:
            return load()
        except ModelTooLarge as error:
            fitting = error.context_that_fits
            if self._config.models.max_length or fitting < _LEAST_CONTEXT:
                raise
        _log.warning(
            "model %s: its context is reduced to %d tokens, for which there is memory; set"
            " --max-length, or raise --device-memory-utilization",
            *(self.name, fitting),
        )
        models = replace(self._config.models, max_length=fitting)
        self._config, self.reduced_context = replace(self._config, models=models), fitting
        return load()

    def _adopt(self, sized: Self) -> None:
        self._config, self.reduced_context = sized._config, sized.reduced_context

    def _check_invariance(self, native: NativeKernels | None, *, is_native: bool) -> None:
        """Raise `ConfigError` where rows would depend on their batch and must not."""
        has_kernels = native is not None or not self._device.is_cpu
        if self._is_deterministic and not (has_kernels and is_native):
            raise ConfigError(
                f"--enable-deterministic-inference: {self.name} runs on"
                f" {'torch alone' if is_native else 'transformers'}, where sums depend on the"
                " batch; serve it with the native decoder and kernels, or leave it out."
            )

    def _cache(self, layout: KvLayout, size: CacheSize, native: NativeKernels | None) -> KvCache:
        """Allocate pages and states. Raises `ConfigError` as `_check_invariance` does."""
        kv = KvCache(
            *(size.layout_of(layout), size.num_pages, self._device.torch, native),
            num_slots=size.num_slots + size.num_kept,
            num_snapshots=size.num_snapshots,
        )
        if self._is_deterministic and self._device.is_cpu and kv.native is None:
            raise ConfigError(
                f"--enable-deterministic-inference: the CPU kernels cannot hold the cache of"
                f" {self.name} ({str(layout.dtype).removeprefix('torch.')}, pages of"
                f" {layout.page_size}); try --kv-cache-format auto, or leave it out."
            )
        return kv

    def _sampler(
        self,
        num_logits: int,
        native: NativeKernels | None,
        num_slots: int | None = None,
        lossy: LossyRules | None = None,
    ) -> Sampler:
        """The sampler for all rows of a step."""
        return Sampler(
            vocab_size=num_logits,
            max_batch_size=num_slots or self._config.schedule.max_batch_size,
            device=self._device.torch,
            native=native,
            lossy=lossy,
        )

    def _graphs(
        self,
        memory: ModelMemory,
        layout: KvLayout,
        max_length: int,
        activation_bytes: Callable[[int, int], int],
        *,
        has_prompts: bool = False,
    ) -> DecodeGraphs | None:
        """The captured steps, if any; the cache then needs one more page.

        Steps with prompt chunks are among them if `has_prompts`: what the model computes of a chunk
        must follow from its tokens alone.
        """
        options, schedule = self._config.device, self._config.schedule
        wanted, max_rows = options.device_graph_rows, options.device_graph_max_rows
        pads = options.device_graph_padding
        if not memory.captures:
            if wanted or max_rows or not pads:
                raise ConfigError(
                    "--device-graph-rows, --device-graph-max-rows, --no-device-graph-padding: no"
                    " step is captured here; add --device-graph-capture, or leave them out."
                )
            return None
        if layout.read_by_torch:
            _log.warning("steps run eagerly: %s keeps its own attention", self.name)
            return None
        most = min(max_rows or schedule.max_batch_size, schedule.max_batch_size)
        if max(wanted, default=0) > most:
            raise ConfigError(
                f"--device-graph-rows: no batch of {max(wanted)} rows can be captured with"
                f" --max-batch-size {schedule.max_batch_size} and --device-graph-max-rows {most};"
                " leave it out, or raise these."
            )
        buckets = DecodeBuckets.choose(
            most,
            -(-max_length // layout.page_size),
            wanted=wanted,
            pads=pads,
        )
        num_bytes = decode_graph_bytes(buckets, lambda num_rows: activation_bytes(num_rows, 0))
        num_bytes += 0 if self._device.is_cpu else GPU_POOL_BYTES
        prompts, spare_bytes = None, 0
        if has_prompts:
            prompts = PromptBuckets.choose(most, max_length, layout.page_size)
            spare_bytes = prompt_graph_bytes(prompts, activation_bytes)
        steps = memory.captured_steps(num_bytes + spare_bytes)
        if steps is None:
            return None
        memory.reserve("kv", layout.page_bytes)
        memory.reserve_states(layout, 1)
        return DecodeGraphs(steps, buckets, spare_bytes, prompts)

    def _runner(
        self,
        head: TokenHead,
        layout: KvLayout,
        size: CacheSize,
        *,
        max_length: int,
        native: NativeKernels | None,
        graphs: DecodeGraphs | None,
    ) -> TokenRunner:
        """Create the runner over a cache of `size`. On a GPU all graphs are captured now."""
        if graphs is not None:
            size = size.with_padding()
        schedule = self._config.schedule
        _log.debug(
            "%s: steps of up to %d rows (--max-batch-size) and %d tokens"
            " (--max-batch-input-tokens)",
            *(self.name, schedule.max_batch_size, schedule.max_batch_input_tokens),
        )
        runner = TokenRunner(
            head,
            self._cache(layout, size, native),
            max_batch_size=schedule.max_batch_size,
            max_length=max_length,
            device=self._device.torch,
            graphs=graphs,
        )
        runner.is_deterministic = self._is_deterministic
        runner.attention_backend = self._attention_backend
        if not self._device.is_cpu:
            runner.capture()
        return runner

    def _pool(self, layout: KvLayout, size: CacheSize, *, shares: bool = True) -> PagePool:
        """Create the page pool. With `shares` equal prompt prefixes share pages by default."""
        return PagePool(
            num_pages=size.num_pages,
            page_size=layout.page_size,
            enable_prefix_caching=shares and self._config.cache.enable_prefix_caching,
            num_snapshots=size.num_snapshots if layout.states else None,
            windows=size.windows,
            has_full=size.layout_of(layout).page_bytes > 0,
        )

    def _namespace(self, layout: KvLayout, max_length: int) -> bytes:
        """The namespace of cached prompts: equal weights in one cache format share them."""
        return f"{self._resolved.digest} {layout} {max_length}".encode()
