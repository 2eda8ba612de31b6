"""A step without memory is refused alone; the next one runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from support.decoder_families import save_family
from support.decoder_rig import Recorder, decoder_rig, load_decoder
from triptych.core.errors import OutOfMemory
from triptych.core.runtime.layers.attention import PagedStep

pytestmark = pytest.mark.gpu


class Greedy(Recorder):
    """Prompts of more than eight tokens take a gibibyte."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        if len(ids) > 8:
            torch.empty(2**30, dtype=torch.uint8, device=ids.device)
        return super().forward(ids, positions, step)


def test_a_step_that_does_not_fit_is_refused_and_the_next_runs(
    cuda: torch.device,
    tmp_path: Path,
    limit_memory: Callable[[int], AbstractContextManager[None]],
) -> None:
    save_family(tmp_path, "Llama")
    decoder = load_decoder(tmp_path, device=cuda)
    expected, rig = (
        decoder_rig(decoder, device=cuda),
        decoder_rig(decoder, device=cuda, recorder=Greedy),
    )
    tokens = []
    for each, is_limited in ((expected, False), (rig, True)):
        row = each.open((5, 6, 7))
        each.prefill(row)
        if is_limited:
            with limit_memory(2**29), pytest.raises(OutOfMemory, match="did not fit"):
                each.prefill(each.open(tuple(range(3, 30))))
        each.decode(row, num_steps=8)
        tokens.append(row.tokens)
    assert tokens[0] == tokens[1]
