"""Prompts encoded once, for all images of the same prompt, now or later.

Owns the keys. What an encoding is, and how it comes about, is the recipe's.
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
class HeldTexts:
    """An image's encoded prompts, branch by branch: they stay until `release`."""

    texts: list[EncodedText]
    _keys: list[str]
    _cache: ContentCache[EncodedText]

    def release(self) -> None:
        """This image needs them no more; a second call does nothing."""
        while self._keys:
            self._cache.release(self._keys.pop())


@dataclass(frozen=True, slots=True)
class Asked:
    """An image's prompts: whose they are, and which adapters act on the text encoders."""

    prompts: Sequence[BranchPrompt]
    tenant: str
    adapters: tuple[AdapterUse, ...] = ()


class PromptCache:
    """At most `capacity_bytes` of encoded prompts that no image uses.

    `identity` is of the weights. What one tenant's prompts took is never found by another's.
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
        """Prompts in use, each as often as it is."""
        return self._cache.num_references

    def hold(self, asked: Sequence[Asked]) -> list[HeldTexts]:
        """The encoded prompts of images; what is new is encoded together."""
        keys = [[self._key(each, prompt) for prompt in each.prompts] for each in asked]
        unknown: defaultdict[tuple[AdapterUse, ...], dict[str, BranchPrompt]] = defaultdict(dict)
        with ExitStack() as stack:
            for found, each in zip(keys, asked, strict=True):
                for key, prompt in zip(found, each.prompts, strict=True):
                    if self._cache.acquire(key) is None:
                        unknown[each.adapters][key] = prompt
                    else:
                        stack.callback(self._cache.release, key)
            for adapters, prompts in unknown.items():
                self._encode(adapters, prompts, stack)
            return [self._hold(found) for found in keys]

    def close(self) -> None:
        """Forget everything; asserts that no image uses any of it."""
        self._cache.clear()
        assert not self._cache.num_bytes, "an image that is over still holds its prompts"

    def _encode(
        self, adapters: tuple[AdapterUse, ...], prompts: dict[str, BranchPrompt], stack: ExitStack
    ) -> None:
        with self._adapters.applied([adapters]) if adapters else nullcontext():
            encoded = self._encoded(list(prompts.values()))
        for key, text in zip(prompts, encoded, strict=True):
            self._cache.insert(key, text, sum(tensor.nbytes for tensor in text.values()))
            stack.callback(self._cache.release, key)

    def _encoded(self, prompts: list[BranchPrompt]) -> list[EncodedText]:
        """On a CPU one by one, since what shares a run there differs in its last bits."""
        if self._recipe.device.type != "cpu":
            return self._recipe.encode_all(prompts)
        return [text for prompt in prompts for text in self._recipe.encode_all([prompt])]

    def _hold(self, keys: Sequence[str]) -> HeldTexts:
        texts = [self._cache.acquire(key) for key in keys]
        return HeldTexts([text for text in texts if text is not None], list(keys), self._cache)

    def _key(self, asked: Asked, prompt: BranchPrompt) -> str:
        acting = [f"{use.name}={use.scale!r}" for use in asked.adapters]
        named = (self._identity, asked.tenant, *acting, prompt.digest)
        return hashlib.sha256("\0".join(named).encode()).hexdigest()


def _copied(text: EncodedText) -> EncodedText:
    """So that a slice of a batch does not keep the whole."""
    return {name: tensor.clone() for name, tensor in text.items()}
