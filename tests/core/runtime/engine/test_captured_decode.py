"""What a runner promises of captured steps: who is padded, what padding touches, who falls back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.captured import CPU, CountingCalls, verified_steps
from support.decoder_rig import Recorder, Rig, Row, decoder_rig, small_decoder
from triptych.core.runtime.graphs.backend import Call, Captured
from triptych.core.runtime.graphs.buckets import Bucket, DecodeBuckets
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.layers.decoder import Decoder

BUCKETS = DecodeBuckets.choose(6, 24, wanted=(2, 4, 6))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return small_decoder(tmp_path_factory.mktemp("captured"), **heads)


def captured_rig(decoder: Decoder, **options: object) -> tuple[Rig, CountingCalls]:
    steps, backend = verified_steps()
    return decoder_rig(decoder, graphs=DecodeGraphs(steps, BUCKETS), **options), backend


def open_rows(rig: Rig, count: int) -> list[Row]:
    rows = [rig.open(tuple(range(n + 1, 3 * n + 4))) for n in range(count)]
    rig.prefill(*rows)
    return rows


def tokens_after(rig: Rig, count: int, num_steps: int) -> list[list[int]]:
    rows = open_rows(rig, count)
    rig.decode(*rows, num_steps=num_steps)
    return [row.tokens for row in rows]


def test_torch_alone_samples_the_same_tokens(decoder: Decoder) -> None:
    rig, backend = captured_rig(decoder)
    assert tokens_after(rig, 3, 20) == tokens_after(decoder_rig(decoder), 3, 20)
    assert backend.num_replays == 20


def test_layers_with_pages_of_their_own_have_the_limits_of_the_others(decoder: Decoder) -> None:
    found: list[tuple[list[int], list[int]]] = []

    class Limits(Recorder):
        def forward(
            self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep
        ) -> torch.Tensor:
            assert step.batch.windowed is not None
            batches = step.batch, step.batch.windowed
            full, own = (batch.host_context_lengths_B.tolist() for batch in batches)
            found.append((full, own))
            return super().forward(ids, positions, step)

    steps, _ = verified_steps()
    layout = decoder.config.kv_layout(4, decoder.dtype)
    shapes = tuple(replace(shape, window=9) for shape in layout.shapes)
    layout = replace(layout, shapes=shapes, num_window_pages=40)
    rig = Rig(decoder, layout, graphs=DecodeGraphs(steps, BUCKETS), recorder=Limits)
    tokens_after(rig, 3, 20)
    assert all(full == own for full, own in found), found


def test_only_steps_of_answers_are_replayed(decoder: Decoder) -> None:
    rig, backend = captured_rig(decoder)
    first, *_ = open_rows(rig, 2)
    assert backend.num_replays == 0
    rig.step((first, 0), (rig.open((1, 2, 3)), 3))
    assert backend.num_replays == 0
    rig.decode(first)
    assert backend.num_replays == 1


def test_batches_beyond_the_largest_bucket_run_eagerly(decoder: Decoder) -> None:
    rig, backend = captured_rig(decoder)
    assert tokens_after(rig, 7, 3) == tokens_after(decoder_rig(decoder), 7, 3)
    assert backend.num_replays == 0


def test_padding_writes_to_its_own_page_alone(decoder: Decoder) -> None:
    rig, _ = captured_rig(decoder)
    rows = open_rows(rig, 3)
    for pages in rig.kv.tensors:
        pages.zero_()
    rig.decode(*rows)
    own = {row.pages[(row.num_cached - 1) // rig.page_size] for row in rows}
    padding_page, null_page = rig.kv.num_pages - 2, rig.kv.num_pages - 1
    for pages in rig.kv.tensors:
        written = set(pages.flatten(1).any(dim=1).nonzero().flatten().tolist())
        assert written == own | {padding_page}
        assert null_page not in written


class Poisoned(Recorder):
    """Hidden states and the cache are NaN wherever token 66 goes in."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        hidden_TC = super().forward(ids, positions, step)
        hidden_TC[ids == 66] = torch.nan
        return hidden_TC


def test_nan_of_one_row_stays_its_own_in_a_replay(decoder: Decoder) -> None:
    rig, backend = captured_rig(decoder, recorder=Poisoned)
    rows = open_rows(rig, 3)
    rig.runner._head._last_tokens[rows[1].slot] = 66  # type: ignore[attr-defined]
    result = rig.step(*((row, 0) for row in rows))
    assert [row.is_finite for row in result.rows] == [True, False, True]
    assert backend.num_replays == 1


class Full(CountingCalls):
    """Has no memory for steps of more than two rows."""

    def capture(self, run: Call) -> Captured:
        captured = super().capture(run)
        if len(captured.replay()[0]) > 2:
            raise torch.OutOfMemoryError("no room")
        return captured


def test_without_memory_a_bucket_runs_eagerly(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    steps = CapturedSteps("m", CPU, budget_bytes=2**26, backend=Full())
    rig = decoder_rig(decoder, graphs=DecodeGraphs(steps, BUCKETS))
    assert tokens_after(rig, 3, 5) == tokens_after(decoder_rig(decoder), 3, 5)
    assert steps.num_captured == 0
    assert len(caplog.messages) == 1
    assert f"m: the step of {Bucket(4, 4, 16)} runs eagerly: no memory is left" in caplog.text
    assert tokens_after(rig, 2, 5) == tokens_after(decoder_rig(decoder), 2, 5)
    assert steps.num_captured == 1


def test_all_sizes_can_be_captured_before_the_first_row(decoder: Decoder) -> None:
    rig, _ = captured_rig(decoder)
    assert rig.runner._graphs is not None
    rig.runner.capture()
    assert rig.runner._graphs.steps.num_captured == len(BUCKETS.all())
    assert tokens_after(rig, 3, 5) == tokens_after(decoder_rig(decoder), 3, 5)
    assert rig.runner._graphs.steps.num_captured == len(BUCKETS.all())
