"""The embedding and the head of a target, as its heads use them, and the part of these heads.

Owns that no adapter changes them: drafts of a row with an adapter are those of the plain model.

Shapes: T tokens, R rows of logits, C hidden, V vocabulary.
"""

from __future__ import annotations

import torch

from triptych.core.runtime.layers.decoder import Decoder


class TargetEnds:
    """The parts of `target` before and after its layers."""

    def __init__(self, target: Decoder) -> None:
        self._target = target

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        return self._target.vocab_size

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """The inputs of the target's layers, `x_TC`."""
        return self._target.scale_embedded(self._target.embedding.rows(token_ids_T))

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary as the target does: `logits_RV`, float32."""
        logits_RV = self._target.head(hidden_RC, out_dtype=torch.float32)
        return self._target.scale_logits(logits_RV)


class HeadWithEnds:
    """The base of heads whose embedding and projection are those of `target`.

    Without a target it is there for its sizes.
    """

    def __init__(self, target: Decoder | None) -> None:
        self._ends = None if target is None else TargetEnds(target)

    @property
    def ends(self) -> TargetEnds:
        """The target's embedding and head."""
        assert self._ends is not None, "it was made without its target, for its sizes"
        return self._ends

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        return self.ends.vocab_size

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary: `logits_RV`, float32."""
        return self.ends.logits(hidden_RC)
