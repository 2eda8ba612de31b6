"""What loaders of models have in common.

Owns the fields that compose and the pipelines hand to any loader, and the parts that every model of
tokens has. What a model is made of, and the order in which it is loaded, is each loader's own.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from triptych.core.config import Config
from triptych.core.devices.device import Device
from triptych.core.engine.model_memory import ModelMemory
from triptych.core.errors import ConfigError
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.kv.pages import PagePool
from triptych.core.layers.attention import KvCache, KvLayout
from triptych.core.ledger import Ledger
from triptych.core.sampling.sampler import Sampler
from triptych.core.weights.resolve import ResolvedModel


class DeviceLoader:
    """One model and the device it goes to. `load` makes it a `schedulers.base.ModelLoader`."""

    def __init__(
        self, resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
    ) -> None:
        self.name = resolved.name
        self._resolved = resolved
        self._folder = Path(resolved.folder)
        self._config = config
        self._device = device
        self._ledger = ledger

    def _memory(self, stack: ExitStack) -> ModelMemory:
        """The model's share of memory; what it reserves is released with `stack`."""
        return ModelMemory(self.name, self._config, self._device, self._ledger, stack)


class TokenLoader(DeviceLoader):
    """One model whose steps draw tokens over a paged cache."""

    def _check_invariance(self, native: NativeKernels | None, *, is_native: bool) -> None:
        """Raise `ConfigError` where rows depend on their batch and must not."""
        wanted = self._config.device.enable_deterministic_inference
        if wanted and (native is None or not is_native):
            raise ConfigError(
                f"--enable-deterministic-inference: {self.name} runs on"
                f" {'torch alone' if is_native else 'transformers'}, where sums follow from the"
                " batch; serve it with our decoder and the CPU kernels, or leave it out."
            )

    def _cache(self, layout: KvLayout, num_pages: int, native: NativeKernels | None) -> KvCache:
        """The memory of the pages. Raises `ConfigError` as `_check_invariance` does."""
        kv = KvCache(layout, num_pages, self._device.torch, native)
        if self._config.device.enable_deterministic_inference and kv.native is None:
            raise ConfigError(
                f"--enable-deterministic-inference: the CPU kernels cannot hold the cache of"
                f" {self.name} ({str(layout.dtype).removeprefix('torch.')}, pages of"
                f" {layout.page_size}); try --kv-cache-format auto, or leave it out."
            )
        return kv

    def _sampler(self, num_logits: int, native: NativeKernels | None) -> Sampler:
        """What draws for all rows of a step."""
        return Sampler(
            vocab_size=num_logits,
            max_batch_size=self._config.schedule.max_batch_size,
            device=self._device.torch,
            native=native,
        )

    def _pool(self, layout: KvLayout, num_pages: int, *, shares: bool = True) -> PagePool:
        """The pages. With `shares` prompts that begin alike share them, unless switched off."""
        return PagePool(
            num_pages=num_pages,
            page_size=layout.page_size,
            enable_prefix_caching=shares and self._config.cache.enable_prefix_caching,
        )

    def _namespace(self, layout: KvLayout, max_length: int) -> bytes:
        """Cached prompts are found again only by the same weights in the same cache format."""
        return f"{self._resolved.digest} {layout} {max_length}".encode()
