"""Captured steps on a device: bit for bit the eager ones, in memory that is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.decoder_families import save_family
from support.decoder_rig import Recorder, Rig, Row, decoder_rig, load_decoder
from triptych.core.runtime.graphs.backend import open_backend
from triptych.core.runtime.graphs.buckets import DecodeBuckets
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.layers.decoder import Decoder

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
BUCKETS = DecodeBuckets.choose(6, 24, wanted=(2, 4, 6))
SLEEP = 200_000_000
"""Clocks: a tenth of a second."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(5)
    save_family(folder, "Llama")
    return folder


def steps_on(device: torch.device, **options: Any) -> CapturedSteps:
    return CapturedSteps("m", device, budget_bytes=2**30, **options)


def captured_rig(
    decoder: Decoder, device: torch.device, recorder: type[Recorder] = Recorder
) -> tuple[Rig, CapturedSteps]:
    steps = steps_on(device, verifies=True)
    graphs = DecodeGraphs(steps, BUCKETS)
    return decoder_rig(decoder, graphs=graphs, device=device, recorder=recorder), steps


def open_rows(rig: Rig, count: int) -> list[Row]:
    rows = [rig.open(tuple(range(n + 1, 3 * n + 4))) for n in range(count)]
    rig.prefill(*rows)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_replays_are_the_eager_step_bit_for_bit(
    cuda: torch.device, folder: Path, dtype: torch.dtype
) -> None:
    rig, steps = captured_rig(load_decoder(folder, dtype=dtype, device=cuda), cuda)
    rows = open_rows(rig, 3)
    rig.decode(*rows, num_steps=30)
    rig.decode(*rows, *open_rows(rig, 2), num_steps=10)
    assert steps.num_captured >= 2, "of two numbers of rows"
    if dtype is torch.float32:
        expected = decoder_rig(load_decoder(folder))
        rows_of_cpu = open_rows(expected, 3)
        expected.decode(*rows_of_cpu, num_steps=30)
        for row, row_of_cpu in zip(rows, rows_of_cpu, strict=True):
            assert row.tokens[: len(row_of_cpu.tokens)] == row_of_cpu.tokens


class Poisoned(Recorder):
    """Hidden states are NaN wherever token 66 goes in."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        hidden_TC = super().forward(ids, positions, step)
        return hidden_TC.masked_fill((ids == 66)[:, None], torch.nan)


def test_nan_of_one_row_stays_its_own(cuda: torch.device, folder: Path) -> None:
    decoder, tokens = load_decoder(folder, device=cuda), []
    for recorder in (Recorder, Poisoned):
        rig, steps = captured_rig(decoder, cuda, recorder)
        rows = open_rows(rig, 3)
        rig.runner._head._last_tokens[rows[1].slot] = 66  # type: ignore[attr-defined]
        result = rig.step(*((row, 0) for row in rows))
        assert [row.is_finite for row in result.rows] == [True, recorder is Recorder, True]
        assert steps.num_captured == 1
        tokens.append([rows[0].tokens, rows[2].tokens])
    assert tokens[0] == tokens[1]


def test_replays_take_inputs_in_order_from_pinned_memory(cuda: torch.device) -> None:
    """While the device is behind, and the host's arrays are written again after an event."""
    steps, found = steps_on(cuda), []
    numbers = [torch.full((100,), float(n)).pin_memory() for n in range(20)]

    def body(inputs: Any) -> list[torch.Tensor]:
        return [inputs[0] * 2 + 1]

    with steps.ahead():
        steps.run("step", body, [numbers[0]])
    for given in numbers:
        torch.cuda._sleep(SLEEP // 10)
        outputs = steps.run("step", body, [given])
        assert outputs is not None
        found.append(outputs[0].clone())
    assert steps.num_captured == 1
    assert [each.unique().tolist() for each in found] == [[2.0 * n + 1] for n in range(20)]


def test_a_body_that_waits_runs_eagerly_and_the_process_goes_on(
    cuda: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    steps, x = steps_on(cuda, verifies=True), torch.arange(5.0, device=cuda)
    assert steps.run("step", lambda inputs: [inputs[0] * inputs[0].sum().item()], [x]) is None
    assert "cannot be captured" in caplog.text
    assert not torch.cuda.is_current_stream_capturing()
    assert (x * 2).sum().item() == 20
    outputs = steps_on(cuda, verifies=True).run("step", lambda inputs: [inputs[0] * 3], [x])
    assert outputs is not None, "other steps are captured still"
    assert outputs[0].sum().item() == 30


def test_memory_of_graphs_is_counted_and_goes_back(cuda: torch.device) -> None:
    graphs, x = open_backend(cuda), torch.zeros(2**22, device=cuda)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    captured = graphs.capture(lambda: [x.sin().cos()])
    of_driver = graphs.held_bytes - (torch.cuda.memory_reserved() - before)
    assert x.nbytes <= graphs.held_bytes
    assert of_driver <= 2**26, "of an executable graph and two kernels"
    torch.cuda.synchronize()
    captured.release()
    torch.cuda.empty_cache()
    assert graphs.held_bytes == 0
    assert torch.cuda.memory_reserved() <= before


def test_without_memory_a_step_runs_eagerly(
    cuda: torch.device, caplog: pytest.LogCaptureFixture, limit_memory: Any
) -> None:
    steps, x = steps_on(cuda, verifies=True), torch.ones(2**20, device=cuda)

    def body(inputs: Any) -> list[torch.Tensor]:
        return [inputs[0].expand(200, -1).contiguous().sum()]  # 800 MiB

    with limit_memory(2**28):
        assert steps.run("step", body, [x]) is None
    assert "no memory is left for it" in caplog.text
    assert not torch.cuda.is_current_stream_capturing()
    small = steps.run("small", lambda inputs: [inputs[0].sum()], [x])
    assert small is not None, "smaller ones are captured"
    assert small[0].item() == 2**20
