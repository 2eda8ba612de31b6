"""Steps of a model whose last layers stay in host memory: nothing waits, and it is told before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.decoder_families import FAMILIES, save_family
from support.dry_run import dry_run
from support.embedding_models import save
from support.fake_cuda import CUDA, FakeCuda
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import ConfigError
from triptych.core.options.config import Config, DeviceOptions
from triptych.modalities.embedding.engine.loader import open_embedding_loader
from triptych.modalities.llm.engine import host_memory
from triptych.modalities.llm.engine.host_memory import _link_rate
from triptych.modalities.llm.engine.loader import LlmLoader

GIB = 2**30
LAYERS = 4


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_steps_copy_layers_without_waiting(
    gpu: FakeCuda, tmp_path: Path, config: Config, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level("INFO")
    family, extra = FAMILIES[name]
    save_family(tmp_path, family, **extra)
    plain = dry_run(gpu, LlmLoader, tmp_path, config)
    before = plain.ledger.by_owner()["tiny/weights"]
    device = DeviceOptions(cpu_offload_gb=1.0)
    run = dry_run(gpu, LlmLoader, tmp_path, replace(config, device=device))
    (told,) = (line for line in caplog.messages if "host memory" in line)
    assert told.startswith(f"tiny: layers 0 to {LAYERS - 1} stay in host memory")
    assert "each step copies them, in about" in told
    weights = run.ledger.by_owner()["tiny/weights"]
    assert weights < before
    for job in range(3):
        sampling = SamplingParams(temperature=0.0, max_tokens=3)
        run.submit(
            str(job), TokenRequest(prompt_ids=tuple(range(3, 9 + 9 * job)), sampling=sampling)
        )
    run.end_well()
    assert gpu.faults == []
    assert gpu.num_replays == 0


@pytest.mark.parametrize(
    ("family", "device", "message"),
    [
        ("Llama", DeviceOptions(cpu_offload_gb=1e-6), "fewer than three save nothing"),
        (
            "Llama",
            DeviceOptions(cpu_offload_gb=1.0, device_graph_capture=True),
            "leave it or --cpu-offload-gb out",
        ),
        ("Youtu", DeviceOptions(cpu_offload_gb=1.0), "latent attention stay on the device"),
        ("GPTNeoX", DeviceOptions(cpu_offload_gb=1.0), "does not run on our decoder"),
    ],
)
def test_what_is_not_offered_is_refused_before_loading(
    gpu: FakeCuda, tmp_path: Path, config: Config, family: str, device: DeviceOptions, message: str
) -> None:
    extra = FAMILIES["youtu"][1] if family == "Youtu" else {}
    save_family(tmp_path, family, **extra)
    with pytest.raises(ConfigError, match=message):
        dry_run(gpu, LlmLoader, tmp_path, replace(config, device=device))


def test_the_link_is_timed_on_its_own_device(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event without a stream is recorded on the first device."""
    streams: list[object] = []
    monkeypatch.setattr(
        torch.cuda.Event, "record", lambda event, stream=None: streams.append(stream)
    )
    _link_rate(CUDA)
    assert [stream is None for stream in streams] == [False, False]


def test_memory_that_a_model_before_had_pinned_is_free(
    gpu: FakeCuda, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleeping server would not wake up."""
    save_family(tmp_path, "Llama")
    kept = [GIB]
    monkeypatch.setattr(torch._C, "_host_emptyCache", kept.clear)
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: GIB - sum(kept))
    device = DeviceOptions(cpu_offload_gb=1.0)
    dry_run(gpu, LlmLoader, tmp_path, replace(config, device=device))


def test_an_encoder_is_refused(gpu: FakeCuda, tmp_path: Path, config: Config) -> None:
    save(tmp_path, "bert")
    device = DeviceOptions(cpu_offload_gb=1.0)
    with pytest.raises(ConfigError, match="is an encoder and keeps its layers"):
        dry_run(gpu, open_embedding_loader, tmp_path, replace(config, device=device))
