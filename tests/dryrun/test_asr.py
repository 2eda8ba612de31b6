"""Steps of recognition: what is waited for, and nothing else."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import torch

from support.asr import END, FIRST_TIME, noise, transcribe_request, write_folder
from support.dry_run import dry_run
from support.fake_cuda import FakeCuda
from triptych.core.options.config import Config
from triptych.modalities.asr.engine.loader import AsrLoader


def test_a_recording_waits_for_its_tokens_alone(
    gpu: FakeCuda, tmp_path: Path, config: Config
) -> None:
    """A token's grammar and temperature follow from those before it, which the host must know."""
    write_folder(tmp_path)
    run = dry_run(gpu, AsrLoader, tmp_path, config)
    sampled = cycle((FIRST_TIME, 65, 66, END))
    gpu.deliver = lambda host: (
        host.shape == (2,) and host.copy_(torch.tensor((next(sampled), -0.1)))
    )
    run.submit("a", transcribe_request(noise(4), has_word_times=True))
    run.end_well()
    assert [fault for fault in gpu.faults if "waits for an event" not in fault] == []
    assert run.runner.reads.keys() >= {"listen", "encode", "decode", "align"}
