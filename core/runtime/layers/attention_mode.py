"""Replaces the attention of other libraries' models.

Owns the interception of torch's attention calls. Knows no model, and not the replacement.

Shapes: B rows, H heads, T tokens, D a head's width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class AttentionMode(TorchFunctionMode, ABC):
    """While active, `attend` replaces `scaled_dot_product_attention`."""

    @abstractmethod
    def attend(
        self,
        compute: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return attention `[B, H, T, D]` of queries, keys and values; `compute` is torch's own."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attend(func, *args, **(kwargs or {}))
