"""Prompts encoded once, for all pictures that are told the same, now or later.

Owns the keys. What an encoding is, and how it comes about, is the recipe's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from triptych.core.content_cache import ContentCache
from triptych.modalities.diffusion.recipes.recipe import EncodedText, Prompt, Recipe


@dataclass(eq=False, slots=True)
class HeldTexts:
    """A picture's encoded prompts, branch by branch: they stay until `release`."""

    texts: list[EncodedText]
    _keys: list[str]
    _cache: ContentCache[EncodedText]

    def release(self) -> None:
        """This picture needs them no more; a second call does nothing."""
        while self._keys:
            self._cache.release(self._keys.pop())


class PromptCache:
    """At most `capacity_bytes` of encoded prompts that no picture uses.

    `identity` is of the weights. What one tenant's prompts took is never found by another's.
    """

    def __init__(self, recipe: Recipe, identity: str, capacity_bytes: int) -> None:
        self._recipe = recipe
        self._identity = identity
        self._cache: ContentCache[EncodedText] = ContentCache(capacity_bytes, copy=_copied)

    def hold(self, asked: Sequence[tuple[str, Sequence[Prompt]]]) -> list[HeldTexts]:
        """The encoded prompts of pictures, each of a tenant; what is new is encoded together."""
        keys = [[self._key(tenant, prompt) for prompt in prompts] for tenant, prompts in asked]
        wanted = {
            key: prompt
            for found, (_, prompts) in zip(keys, asked, strict=True)
            for key, prompt in zip(found, prompts, strict=True)
        }
        with ExitStack() as stack:
            missing = [key for key in wanted if not self._acquire(key, stack)]
            encoded = self._recipe.encode_all([wanted[key] for key in missing])
            for key, text in zip(missing, encoded, strict=True):
                self._cache.insert(key, text, sum(tensor.nbytes for tensor in text.values()))
                stack.callback(self._cache.release, key)
            return [self._hold(found) for found in keys]

    def close(self) -> None:
        """Forget everything; asserts that no picture uses any of it."""
        self._cache.clear()
        assert not self._cache.num_bytes, "a picture that is over still holds its prompts"

    def _acquire(self, key: str, stack: ExitStack) -> bool:
        """Whether the prompt is known; so, it stays until the stack ends."""
        is_known = self._cache.acquire(key) is not None
        if is_known:
            stack.callback(self._cache.release, key)
        return is_known

    def _hold(self, keys: Sequence[str]) -> HeldTexts:
        texts = [self._cache.acquire(key) for key in keys]
        return HeldTexts([text for text in texts if text is not None], list(keys), self._cache)

    def _key(self, tenant: str, prompt: Prompt) -> str:
        named = (self._identity, tenant, prompt.digest)
        return hashlib.sha256("\0".join(named).encode()).hexdigest()


def _copied(text: EncodedText) -> EncodedText:
    """So that a slice of a batch does not keep the whole."""
    return {name: tensor.clone() for name, tensor in text.items()}
