"""Texts laid end to end give the states that transformers gives them one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from support.embedding_models import FAMILIES, WORDS, build, save
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.embedding.architecture import EncoderSizes
from triptych.modalities.embedding.engine import rotary_encoder
from triptych.modalities.embedding.engine.encoder import load_encoder
from triptych.modalities.embedding.engine.packed_texts import PackedEncoder, group_lengths

TEXTS = [[5, 6, 7], [9] * 40, [11, 12, 13, 14], [8], list(range(4, 60)), [10, 11, 12, 13]]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PackedEncoder:
    with Checkpoint.open(folder) as checkpoint:
        return load_encoder(checkpoint, dtype=dtype, device=torch.device("cpu"))


@torch.inference_mode()
def expected(model: Any, text: list[int]) -> torch.Tensor:
    states: torch.Tensor = model(torch.tensor([text])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("max_padding", [1.0, 1.2])
@pytest.mark.parametrize("kind", sorted(FAMILIES))
@torch.inference_mode()
def test_equals_transformers(kind: str, max_padding: float, tmp_path: Path) -> None:
    save(tmp_path, kind)
    model, encoder = build(kind), load(tmp_path)
    encoder.max_padding = max_padding
    for text, states in zip(TEXTS, encoder(TEXTS), strict=True):
        torch.testing.assert_close(states, expected(model, text), atol=1e-5, rtol=0)
        torch.testing.assert_close(encoder([text])[0], states, atol=1e-5, rtol=0)


def test_weights_below_a_head_are_found_and_the_head_is_not_missed(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"bert.{name}": value for name, value in load_file(file).items()}
    save_file({**tensors, "cls.predictions.bias": torch.zeros(3)}, file)
    torch.testing.assert_close(load(tmp_path)([[5]])[0], expected(build("bert"), [5]))


def test_a_tensor_that_nothing_here_would_use_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "encoder.layer.0.adapter.weight": torch.zeros(3)}, file)
    with pytest.raises(WeightsError, match=r"adapter\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "t5"}, "not a supported encoder"),
        ({"model_type": "bert", "hidden_act": "sine"}, "activation 'sine'"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "absolute positions"),
        ({"model_type": "bert"}, "has no vocab_size"),
    ],
)
def test_configurations_that_would_be_read_wrongly_are_refused(
    fields: dict[str, str], complaint: str
) -> None:
    with pytest.raises(WeightsError, match=complaint):
        EncoderSizes.read(fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", sorted(FAMILIES))
@torch.inference_mode()
def test_a_text_is_the_same_with_any_others(
    kind: str, dtype: torch.dtype, tmp_path: Path, native: NativeKernels
) -> None:
    save(tmp_path, kind)
    if not native.can_pack(torch.zeros(2, 2, dtype=dtype)):
        pytest.skip(f"the kernels do not project {dtype} on this processor")
    encoder = load(tmp_path, dtype)
    pack_linears(encoder, native)
    for text, states in zip(TEXTS, encoder(TEXTS), strict=True):
        assert torch.equal(encoder([text])[0], states)
        assert torch.equal(encoder([[5] * 12, text, [9] * len(text)])[1], states)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.sampled_from([1.0, 1.2]))
def test_groups_hold_every_text_once_and_waste_little(
    lengths: list[int], max_padding: float
) -> None:
    lengths.sort()
    groups = list(group_lengths(lengths, max_padding))
    assert [length for _, members in groups for length in members] == lengths
    starts = [first for first, _ in groups]
    assert starts == [
        sum(lengths[: sum(len(m) for _, m in groups[:i])]) for i in range(len(groups))
    ]
    for _, members in groups:
        assert len(members) * max(members) <= max_padding * sum(members)


def test_blocks_of_a_long_text_see_their_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window's queries go in blocks; these are shorter than the text."""
    monkeypatch.setattr(rotary_encoder, "_BLOCK", 5)
    save(tmp_path, "modernbert")
    model, encoder = build("modernbert"), load(tmp_path)
    encoder.max_padding = 1.2
    texts = [list(range(4, 64)), [7] * 58]
    for text, states in zip(texts, encoder(texts), strict=True):
        torch.testing.assert_close(states, expected(model, text), atol=1e-5, rtol=0)


def test_older_configurations_say_where_a_layer_sees_all() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = {"model_type": "modernbert", **sizes, "num_hidden_layers": 3, "local_attention": 8}
    read = EncoderSizes.read({**config, "global_attn_every_n_layers": 2, "local_rope_theta": 100.0})
    windows = [(reach.window, reach.theta) for reach in read.layer_windows]
    assert windows == [(0, 160_000.0), (4, 100.0), (0, 160_000.0)]
    for other in (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 7.0}}},
    ):
        with pytest.raises(WeightsError, match="rotary positions"):
            EncoderSizes.read({**config, **other})


def test_the_vocabulary_is_the_tokenizers() -> None:
    assert len(WORDS) == 64
