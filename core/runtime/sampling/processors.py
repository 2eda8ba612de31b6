"""Edits of logits before they become probabilities: bias, forbidden stops, penalties, masks.

Owns the per-slot state of these edits on the device. Knows nothing of temperature or filters.
The edits are applied in the order of this file, each only to the rows that asked for it.

Shapes: B rows of the step, R rows with a mask, S slots, V vocabulary, M bytes of a mask, E sparse
entries of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch.nn import functional

from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.devices.upload import Uploads

_IS_IN_PROMPT = 2**30
"""Bit of a penalty count that marks a prompt token; the bits below count output tokens."""


class SparseEdits:
    """A few values added to each slot's logits: `logit_bias`, or minus infinity on stop tokens.

    Slots are padded with zeros for token 0, up to the longest list so far.
    """

    def __init__(self, max_batch_size: int, device: torch.device, uploads: Uploads) -> None:
        self._uploads = uploads
        self._ids_SE = torch.zeros(max_batch_size, 0, dtype=torch.int64, device=device)
        self._values_SE = torch.zeros(max_batch_size, 0, device=device)

    def bind(self, slot: int, entries: Sequence[tuple[int, float]]) -> None:
        """Replace the slot's entries; of several for one token the last is used."""
        unique = dict(entries)
        missing = len(unique) - self._ids_SE.shape[1]
        if missing > 0:
            self._ids_SE = torch.nn.functional.pad(self._ids_SE, (0, missing))
            self._values_SE = torch.nn.functional.pad(self._values_SE, (0, missing))
        self._ids_SE[slot] = 0
        self._values_SE[slot] = 0
        ids_E = np.array(list(unique), np.int64)
        values_E = np.array(list(unique.values()), np.float64)
        given = slice(len(unique))
        self._ids_SE[slot, given], self._values_SE[slot, given] = self._uploads.send(
            (ids_E, values_E)
        )

    def apply(self, logits_BV: torch.Tensor, slots_B: torch.Tensor) -> torch.Tensor:
        """Logits with each row's entries added."""
        return logits_BV.scatter_add(-1, self._ids_SE[slots_B], self._values_SE[slots_B])


class Penalties:
    """Repetition, frequency and presence penalties, and the token counts they need.

    Repetition counts prompt and output, as transformers does (Keskar et al., "CTRL", 2019).
    Frequency and presence count the output only, as OpenAI and vLLM do. Counts live on the device
    and grow with each sample there, so that the next step can start before the host has read a
    token; they are allocated when the first row asks for a penalty.
    """

    def __init__(
        self, vocab_size: int, max_batch_size: int, device: torch.device, uploads: Uploads
    ) -> None:
        self._uploads = uploads
        self._shape = (max_batch_size, vocab_size)
        self._counts_SV: torch.Tensor | None = None
        self._scales_S3 = torch.zeros(max_batch_size, 3, device=device)

    def bind(
        self,
        slot: int,
        scales: tuple[float, float, float],
        prompt: Sequence[int],
        output: Sequence[int],
    ) -> None:
        """Start a slot: `scales` are repetition, frequency and presence; the ids its history."""
        device = self._scales_S3.device
        if self._counts_SV is None:
            self._counts_SV = torch.zeros(self._shape, dtype=torch.int32, device=device)
        arrays = (np.array(scales), np.array(prompt, np.int64), np.array(output, np.int64))
        self._scales_S3[slot], prompt_ids, output_ids = self._uploads.send(arrays)
        counts_V = self._counts_SV[slot].zero_()
        counts_V.index_fill_(0, prompt_ids, _IS_IN_PROMPT)
        counts_V.index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))

    def apply(self, logits_BV: torch.Tensor, slots_B: torch.Tensor) -> torch.Tensor:
        """Return penalized logits of rows whose slots are all bound here."""
        assert self._counts_SV is not None
        if logits_BV.is_cuda:
            from triptych.core.runtime.kernels.triton.penalties import penalized

            penalized_BV: torch.Tensor = penalized(
                logits_BV, self._counts_SV, self._scales_S3, slots_B, _IS_IN_PROMPT - 1
            )
            return penalized_BV
        counts_BV = self._counts_SV[slots_B]
        repetition_B1, frequency_B1, presence_B1 = self._scales_S3[slots_B, :, None].unbind(1)
        num_output_BV = counts_BV & (_IS_IN_PROMPT - 1)
        scaled_BV = torch.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
        return (
            torch.where(counts_BV > 0, scaled_BV, logits_BV)
            - frequency_B1 * num_output_BV
            - presence_B1 * (num_output_BV > 0)
        )

    def of_rows(self, index_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All counts and scales, for a kernel that penalizes the rows `index_R` while sampling."""
        assert self._counts_SV is not None
        return self._counts_SV, self._scales_S3, index_R

    def count(
        self, slots_B: torch.Tensor, token_ids_B: torch.Tensor, counts_B: torch.Tensor | int = 1
    ) -> None:
        """Record one sampled token per slot, so many times; no slot may appear twice."""
        assert self._counts_SV is not None
        self._counts_SV[slots_B, token_ids_B] += counts_B


def keep_allowed(logits_BV: torch.Tensor, allowed: Sequence[bytes]) -> torch.Tensor:
    """Logits with minus infinity for tokens that a row's mask (`TokenRow`) excludes.

    Rows without a mask, whose bytes are empty, keep their logits. The masks are sent as bytes and
    expanded on the device, by a table of the values that each byte adds to the logits of its eight
    tokens.
    """
    device, vocab_size = logits_BV.device, logits_BV.shape[-1]
    masked = [row for row, mask in enumerate(allowed) if mask]
    bytes_N = np.frombuffer(b"".join(allowed), np.uint8)
    bytes_RM = to_device(torch.from_numpy(bytes_N.astype(np.int32)), device).view(len(masked), -1)
    added_RV = functional.embedding(bytes_RM, _added_by_byte(device)).flatten(1)[:, :vocab_size]
    if len(masked) == len(logits_BV):
        return logits_BV + added_RV
    return logits_BV.index_add(0, to_device(torch.tensor(masked), device), added_RV)


def mask_words(allowed: Sequence[bytes], vocab_size: int, device: torch.device) -> torch.Tensor:
    """The masks of all rows as words of 32 tokens, `[B, W]`; without one all tokens are allowed.

    For a kernel that reads masks while sampling, instead of logits that are edited first.
    """
    num_bytes = 4 * -(-vocab_size // 32)
    everything = b"\xff" * num_bytes
    joined = bytearray().join((mask or everything)[:num_bytes] for mask in allowed)
    words_BW = np.frombuffer(joined, np.int32).reshape(len(allowed), -1)
    return to_device(torch.from_numpy(words_BW), device)


@cache
def _added_by_byte(device: torch.device) -> torch.Tensor:
    """A table: 0 for a token whose bit is set, minus infinity for others; 256 bytes by 8 tokens."""
    is_set = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(is_set > 0, 0.0, -torch.inf).to(device)
