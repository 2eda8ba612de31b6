"""Steps of recognizers on transformers' classes: they compute on a device, and wait for tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.asr import noise, transcribe_request
from support.dry_run import dry_run
from support.fake_cuda import FakeCuda
from support.recognizers import write_recognizer
from triptych.core.options.config import Config
from triptych.modalities.asr.engine.loader import AsrLoader


@pytest.mark.parametrize("family", ["parakeet_ctc", "parakeet_tdt", "canary", "voxtral"])
def test_a_recording_waits_for_its_tokens_alone(
    gpu: FakeCuda, tmp_path: Path, config: Config, family: str
) -> None:
    """One family of each way of decoding."""
    write_recognizer(family, tmp_path)
    run = dry_run(gpu, AsrLoader, tmp_path, config)

    def deliver(host: torch.Tensor) -> None:
        if host.dtype == torch.float64:  # a token with its log-probability, or its span between
            host.fill_(-0.1)
            host.view(-1)[0] = 5.0

    gpu.deliver = deliver
    run.submit("a", transcribe_request(noise(2), language="en" if family == "canary" else ""))
    run.end_well()
    assert [fault for fault in gpu.faults if "waits for an event" not in fault] == []
    assert run.runner.reads.keys() >= {"listen", "encode", "decode"}
