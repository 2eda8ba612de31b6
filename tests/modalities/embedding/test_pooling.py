"""What stands behind an encoder is read from its folder, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from support.embedding_models import save, write, write_modules
from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.embedding.engine.encoder import load_encoder
from triptych.modalities.embedding.engine.runner import Embedder, load_dense
from triptych.modalities.embedding.pooling import PoolingSpec
from triptych.modalities.embedding.wire import EmbedRequest

TEXTS = ((5, 6, 7, 8), (9, 10))
CPU = torch.device("cpu")


def vectors(folder: Path) -> torch.Tensor:
    spec = PoolingSpec.read(folder)
    with Checkpoint.open(folder) as checkpoint:
        encoder = load_encoder(checkpoint, dtype=torch.float32, device=CPU)
    embedder = Embedder(encoder, spec, load_dense(folder, spec, CPU))
    request = EmbedRequest(texts=TEXTS)
    with torch.inference_mode():
        calls = embedder.advance([embedder.begin(request, unit) for unit in range(len(TEXTS))])
        data = [torch.frombuffer(bytearray(call().vectors), dtype=torch.float32) for call in calls]
    return torch.stack(data)


def states(folder: Path) -> list[torch.Tensor]:
    with Checkpoint.open(folder) as checkpoint, torch.inference_mode():
        return load_encoder(checkpoint, dtype=torch.float32, device=CPU)(TEXTS)


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("pooling_mode_mean_tokens", lambda s: s.mean(0)),
        ("pooling_mode_cls_token", lambda s: s[0]),
        ("pooling_mode_lasttoken", lambda s: s[-1]),
        ("pooling_mode_max_tokens", lambda s: s.amax(0)),
        ("pooling_mode_mean_sqrt_len_tokens", lambda s: s.sum(0) / len(s) ** 0.5),
    ],
)
def test_every_pooling(name: str, pool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save(tmp_path, **{name: True})
    wanted = torch.stack([nn.functional.normalize(pool(s), dim=0) for s in states(tmp_path)])
    torch.testing.assert_close(vectors(tmp_path), wanted, atol=1e-6, rtol=0)


def test_projections_follow_pooling(tmp_path: Path) -> None:
    save(tmp_path, pooling_mode_mean_tokens=True)
    write_modules(tmp_path, ["Transformer", "Pooling", "Dense"])
    linear = nn.Linear(32, 8)
    activation = "torch.nn.modules.activation.Tanh"
    config = {"in_features": 32, "out_features": 8, "bias": True, "activation_function": activation}
    write(tmp_path / "2_Dense" / "config.json", config)
    save_file(
        {f"linear.{name}": value for name, value in linear.state_dict().items()},
        tmp_path / "2_Dense" / "model.safetensors",
    )
    wanted = torch.stack([torch.tanh(linear(s.mean(0))) for s in states(tmp_path)])
    torch.testing.assert_close(vectors(tmp_path), wanted.detach(), atol=1e-6, rtol=0)


def test_a_folder_of_its_own_kind_is_averaged_and_normed(tmp_path: Path) -> None:
    save(tmp_path)
    assert PoolingSpec.read(tmp_path) == PoolingSpec(mode="mean", normalizes=True)


def test_length_and_prompts_are_read(tmp_path: Path) -> None:
    save(tmp_path, pooling_mode_cls_token=True)
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 17})
    prompts = {"prompts": {"query": "search: ", "document": ""}}
    write(tmp_path / "config_sentence_transformers.json", prompts)
    spec = PoolingSpec.read(tmp_path)
    assert (spec.max_length, spec.prompts) == (17, {"query": "search: "})


@pytest.mark.parametrize(
    ("kinds", "pooling", "complaint"),
    [
        (["Transformer", "WordWeights"], {}, "'WordWeights'"),
        (["Transformer", "Pooling"], {}, "pooling"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "not a single supported mode",
        ),
    ],
)
def test_what_is_not_known_is_refused(
    kinds: list[str], pooling: dict[str, bool], complaint: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, kinds)
    write(tmp_path / "1_Pooling" / "config.json", pooling)
    with pytest.raises(WeightsError, match=complaint):
        PoolingSpec.read(tmp_path)


def test_modules_stay_in_their_folder(tmp_path: Path) -> None:
    write(tmp_path / "modules.json", [{"type": "x.Dense", "path": "../elsewhere"}])
    with pytest.raises(WeightsError, match="outside"):
        PoolingSpec.read(tmp_path)
