"""Which tokens may be sampled (top-k, top-p, min-p), and the sample itself.

Owns the mathematics on probabilities. Knows nothing of slots, penalties or random generators.

A filter is a probability threshold per row: top-k keeps tokens at least as likely as the k-th,
top-p tokens at least as likely as the last of the nucleus (Holtzman et al., "The Curious Case of
Neural Text Degeneration", 2020; the nucleus is taken from the tokens that top-k kept), min-p tokens
at least `min_p` times as likely as the likeliest (Nguyen et al., "Turning Up the Heat", 2024).
Tokens of equal probability are therefore kept or dropped together, and neither the order of a sort
nor the batch shape can change a sample.

Shapes: B rows, V vocabulary, K candidates, G blocks of the vocabulary, S tokens of a block.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_BLOCK_SIZE = 256
_CANDIDATES = (128, 2048)


def nucleus_thresholds(
    probs_BV: torch.Tensor,
    top_k_B: torch.Tensor,
    top_p_B: torch.Tensor,
) -> torch.Tensor:
    """Least probability that top-k (0: off) and then top-p (1: off) keep, one per row.

    On a CPU few candidates are sorted first, and more only for rows that may keep more. On a GPU a
    full sort is cheaper than waiting to learn which rows those are.
    """
    vocab_size = probs_BV.shape[-1]
    top_k_B = torch.where(top_k_B < vocab_size, top_k_B, 0).long()
    sizes = [size for size in _CANDIDATES if size < vocab_size and probs_BV.device.type == "cpu"]
    thresholds_B = probs_BV.new_zeros(len(probs_BV))
    open_B = torch.arange(len(probs_BV), device=probs_BV.device)
    for size in sizes:
        found_B, last_B = _candidate_thresholds(
            probs_BV[open_B], top_k_B[open_B], top_p_B[open_B], size
        )
        thresholds_B[open_B] = found_B
        open_B = open_B[found_B <= last_B]
        if not len(open_B):
            return thresholds_B
    thresholds_B[open_B] = _candidate_thresholds(
        probs_BV[open_B], top_k_B[open_B], top_p_B[open_B], vocab_size
    )[0]
    return thresholds_B


def _candidate_thresholds(
    probs_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds found among the likeliest tokens only, and the least likely of these tokens.

    A threshold above that token is exact: the kept set, with its ties, ends among the candidates.
    """
    sorted_BK = probs_BV.topk(num_candidates, dim=-1).values
    has_top_k_B1 = (top_k_B > 0)[:, None]
    kth_B1 = sorted_BK.gather(-1, (top_k_B - 1).clamp(0, num_candidates - 1)[:, None])
    least_B1 = torch.where(has_top_k_B1, kth_B1, 0.0)
    kept_BK = torch.where(sorted_BK >= least_B1, sorted_BK, 0.0).double()
    ends_BK = kept_BK.cumsum(-1)
    mass_B1 = torch.where(has_top_k_B1, ends_BK[:, -1:], total_mass(probs_BV)[:, None])
    # A token belongs to the nucleus while the mass of those before it is short of top_p.
    is_kept_BK = (ends_BK - kept_BK < top_p_B.double()[:, None] * mass_B1) & (kept_BK > 0)
    num_kept_B1 = is_kept_BK.sum(-1, keepdim=True).clamp(min=1)
    nucleus_B1 = sorted_BK.gather(-1, num_kept_B1 - 1)
    found_B = torch.where(top_p_B < 1, nucleus_B1[:, 0], least_B1[:, 0])
    return torch.where(top_k_B > num_candidates, 0.0, found_B), sorted_BK[:, -1]


def total_mass(probs_BV: torch.Tensor) -> torch.Tensor:
    """Each row's sum in float64, by blocks: threads would split a single long row."""
    return _blocks(probs_BV).sum(-1, dtype=torch.float64).sum(-1)


def sample(probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sample in vocabulary order: the token whose share of the mass contains `u`.

    `probs_BV` need not add up to 1 (dropped tokens are 0); `uniforms_B` are float64 in [0, 1). The
    mass is summed by blocks, then token by token inside the chosen block, so no pass over the
    vocabulary is sequential. A row of NaN yields an id in range.
    """
    blocks_BGS = _blocks(probs_BV)
    ends_BG = blocks_BGS.sum(-1, dtype=torch.float64).cumsum(-1)
    targets_B1 = uniforms_B[:, None] * ends_BG[:, -1:]
    block_B1 = _first_above(ends_BG, targets_B1)
    start_B1 = torch.where(block_B1 > 0, ends_BG.gather(-1, (block_B1 - 1).clamp(min=0)), 0.0)
    share_B1 = (targets_B1 - start_B1) / (ends_BG.gather(-1, block_B1) - start_B1)
    block_BS = blocks_BGS[torch.arange(len(blocks_BGS), device=probs_BV.device), block_B1[:, 0]]
    ends_BS = block_BS.double().cumsum(-1)
    token_B1 = _first_above(ends_BS, share_B1.clamp(0, 1 - 2.0**-52) * ends_BS[:, -1:])
    return (block_B1 * _BLOCK_SIZE + token_B1)[:, 0]


def _blocks(probs_BV: torch.Tensor) -> torch.Tensor:
    num_missing = -probs_BV.shape[-1] % _BLOCK_SIZE
    if num_missing:
        probs_BV = functional.pad(probs_BV, (0, num_missing))
    return probs_BV.view(len(probs_BV), -1, _BLOCK_SIZE)


def _first_above(ends_BN: torch.Tensor, targets_B1: torch.Tensor) -> torch.Tensor:
    """Index (B, 1) of the first running sum above the target: never an entry of no mass."""
    return (ends_BN > targets_B1).byte().argmax(-1, keepdim=True)
