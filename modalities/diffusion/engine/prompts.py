"""A cache of encoded prompts, shared by all images with the same prompt.

Owns the keys. The recipe encodes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

from triptych.core.process.content_cache import ContentCache
from triptych.modalities.diffusion.engine.families.model import RowAdapters
from triptych.modalities.diffusion.engine.recipes.recipe import BranchPrompt, EncodedText, Recipe
from triptych.modalities.diffusion.wire import AdapterUse


@dataclass(eq=False, slots=True)
class EncodedPrompts:
    """An image's encoded prompts, one per branch, held in the cache until `release`."""

    texts: list[EncodedText]
    _keys: list[str]
    _cache: ContentCache[EncodedText]

    def release(self) -> None:
        """Release the prompts; a second call does nothing."""
        while self._keys:
            self._cache.release(self._keys.pop())


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """An image's prompts, their tenant, and the adapters acting on the text encoders."""

    prompts: Sequence[BranchPrompt]
    tenant: str
    adapters: tuple[AdapterUse, ...] = ()


class PromptCache:
    """Keeps at most `capacity_bytes` of encoded prompts that no image uses.

    `identity` is that of the weights. Tenants never share entries.
    """

    def __init__(
        self, recipe: Recipe, adapters: RowAdapters, identity: str, capacity_bytes: int
    ) -> None:
        self._recipe = recipe
        self._adapters = adapters
        self._identity = identity
        self._cache: ContentCache[EncodedText] = ContentCache(capacity_bytes, copy=_copied)

    @property
    def num_references(self) -> int:
        """The number of references to prompts in use."""
        return self._cache.num_references

    def acquire(self, images: Sequence[ImagePrompts]) -> list[EncodedPrompts]:
        """The encoded prompts of images; new prompts are encoded together."""
        keys = [[self._key(each, prompt) for prompt in each.prompts] for each in images]
        unknown: defaultdict[tuple[AdapterUse, ...], dict[str, BranchPrompt]] = defaultdict(dict)
        with ExitStack() as stack:
            for found, each in zip(keys, images, strict=True):
                for key, prompt in zip(found, each.prompts, strict=True):
                    if self._cache.acquire(key) is None:
                        unknown[each.adapters][key] = prompt
                    else:
                        stack.callback(self._cache.release, key)
            for adapters, prompts in unknown.items():
                self._encode(adapters, prompts, stack)
            return [self._hold(found) for found in keys]

    def close(self) -> None:
        """Release everything; asserts that no image uses a prompt."""
        self._cache.clear()
        assert not self._cache.num_bytes, "a finished image still holds its prompts"

    def _encode(
        self, adapters: tuple[AdapterUse, ...], prompts: dict[str, BranchPrompt], stack: ExitStack
    ) -> None:
        with self._adapters.applied([adapters]) if adapters else nullcontext():
            encoded = self._encode_texts(list(prompts.values()))
        for key, text in zip(prompts, encoded, strict=True):
            self._cache.insert(key, text, sum(tensor.nbytes for tensor in text.values()))
            stack.callback(self._cache.release, key)

    def _encode_texts(self, prompts: list[BranchPrompt]) -> list[EncodedText]:
        """Encode one by one on a CPU, where sharing a run would change the last bits."""
        if self._recipe.device.type != "cpu":
            return self._recipe.encode_all(prompts)
        return [text for prompt in prompts for text in self._recipe.encode_all([prompt])]

    def _hold(self, keys: Sequence[str]) -> EncodedPrompts:
        texts = [self._cache.acquire(key) for key in keys]
        return EncodedPrompts([text for text in texts if text is not None], list(keys), self._cache)

    def _key(self, image: ImagePrompts, prompt: BranchPrompt) -> str:
        acting = [f"{use.name}={use.scale!r}" for use in image.adapters]
        named = (self._identity, image.tenant, *acting, prompt.digest)
        return hashlib.sha256("\0".join(named).encode()).hexdigest()


def _copied(text: EncodedText) -> EncodedText:
    """Copy, so that a slice does not keep its whole batch in memory."""
    return {name: tensor.clone() for name, tensor in text.items()}
