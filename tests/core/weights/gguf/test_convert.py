"""GGUF to safetensors: values, row order, names and configs, against transformers and by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM

from support.weight_files import HEADS, HIDDEN, KV_HEADS, tiny_tensors, write_gguf
from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.gguf.convert import UNPACKED_KINDS, block_format, convert_gguf
from triptych.core.weights.gguf.describe import describe
from triptych.core.weights.gguf.header import open_gguf
from triptych.core.weights.progress import Action, SilentProgress


def convert(file: Path) -> Path:
    folder = file.with_suffix("")
    folder.mkdir()
    convert_gguf(file, folder, SilentProgress())
    return folder


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(folder) as checkpoint:
        return {name: checkpoint.read(name).clone() for name in checkpoint.tensors}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_same_model_as_transformers_reads(architecture: str, tmp_path: Path) -> None:
    # Of qwen3, transformers ignores the file's head size and takes 128.
    head = 128 if architecture == "qwen3" else HIDDEN // HEADS
    file = write_gguf(
        tmp_path / "tiny.gguf",
        architecture,
        metadata={f"{architecture}.attention.key_length": head},
        tensors=tiny_tensors(architecture, head=head),
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype="float32")
    ours = AutoModelForCausalLM.from_pretrained(convert(file), dtype="float32")
    assert type(ours) is type(theirs)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    ids = torch.arange(20).reshape(1, -1)
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)
    for key in ("rope_parameters", "max_position_embeddings", "vocab_size", "eos_token_id"):
        assert getattr(ours.config, key) == getattr(theirs.config, key)


def test_rows_of_rotated_heads_are_put_back(tmp_path: Path) -> None:
    """Against the forward direction, `LlamaModel.permute` of llama.cpp's converter."""
    tensors = tiny_tensors("llama")
    original = {"q": tensors["blk.0.attn_q.weight"], "k": tensors["blk.0.attn_k.weight"]}
    for name, num_heads in (("q", HEADS), ("k", KV_HEADS)):
        w = original[name]
        halves = w.reshape(num_heads, 2, w.shape[0] // num_heads // 2, *w.shape[1:])
        tensors[f"blk.0.attn_{name}.weight"] = halves.swapaxes(1, 2).reshape(w.shape)
        bias = np.arange(w.shape[0], dtype=np.float32)
        halves = bias.reshape(num_heads, 2, -1)
        tensors[f"blk.0.attn_{name}.bias"] = halves.swapaxes(1, 2).reshape(-1)
    read = read_all(convert(write_gguf(tmp_path / "tiny.gguf", tensors=tensors)))
    for name, w in original.items():
        assert np.array_equal(read[f"model.layers.0.self_attn.{name}_proj.weight"].numpy(), w)
        bias = read[f"model.layers.0.self_attn.{name}_proj.bias"]
        assert bias.tolist() == list(range(w.shape[0]))


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        (Kind.F32, torch.float32, 0.0),
        (Kind.F16, torch.float16, 2**-11),
        (Kind.BF16, torch.bfloat16, 2**-8),
        (Kind.Q8_0, torch.bfloat16, 0.02),
        (Kind.Q5_1, torch.bfloat16, 0.1),
        (Kind.Q5_0, torch.bfloat16, 0.15),
        (Kind.Q4_1, torch.bfloat16, 0.2),
        (Kind.Q4_0, torch.bfloat16, 0.3),
    ],
)
def test_quantized_values_come_back(
    kind: Kind, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    expected = tiny_tensors("llama")
    read = read_all(convert(write_gguf(tmp_path / "tiny.gguf", kind=kind)))
    value = read["model.layers.1.mlp.down_proj.weight"]
    source = torch.from_numpy(expected["blk.1.ffn_down.weight"])
    assert {tensor.dtype for tensor in read.values()} == {dtype}
    assert (value.float() - source).abs().max() <= tolerance * source.abs().max()
    # Rounding to bfloat16 is torch's own: to nearest, ties to even.
    raw = dequantize(quantize(expected["blk.1.ffn_down.weight"], kind), kind)
    assert torch.equal(value, torch.from_numpy(raw).to(dtype))
    norm = torch.from_numpy(expected["output_norm.weight"]).to(dtype)
    assert torch.equal(read["model.norm.weight"], norm)


def scales_and_mins(packed: bytes, i: int) -> tuple[int, int]:
    """`get_scale_min_k4` of ggml-quants.c."""
    if i < 4:
        return packed[i] & 63, packed[i + 4] & 63
    high, low = packed[i - 4] >> 6, packed[i] >> 6
    return (packed[i + 4] & 15) | high << 4, (packed[i + 4] >> 4) | low << 4


def q4_k(block: bytes, i: int) -> float:
    d, dmin = np.frombuffer(block[:4], np.float16).astype(float)
    scale, minimum = scales_and_mins(block[4:16], i // 32)
    nibble = block[16 + i // 64 * 32 + i % 32] >> (i // 32 % 2 * 4) & 15
    return float(d * scale * nibble - dmin * minimum)


def q5_k(block: bytes, i: int) -> float:
    d, dmin = np.frombuffer(block[:4], np.float16).astype(float)
    scale, minimum = scales_and_mins(block[4:16], i // 32)
    nibble = block[48 + i // 64 * 32 + i % 32] >> (i // 32 % 2 * 4) & 15
    fifth = block[16 + i % 32] >> (i // 32) & 1
    return float(d * scale * (nibble | fifth << 4) - dmin * minimum)


def q6_k(block: bytes, i: int) -> float:
    half, rest = divmod(i, 128)
    nibble = block[half * 64 + rest % 64] >> (rest // 64 * 4) & 15
    high = block[128 + half * 32 + rest % 32] >> (rest // 32 * 2) & 3
    scale = np.frombuffer(block[192:208], np.int8)[i // 16]
    d = float(np.frombuffer(block[208:210], np.float16)[0])
    return d * int(scale) * ((nibble | high << 4) - 32)


@pytest.mark.parametrize(
    ("kind", "block_bytes", "scales_at", "reference"),
    [
        (Kind.Q4_K, 144, (0, 2), q4_k),
        (Kind.Q5_K, 176, (0, 2), q5_k),
        (Kind.Q6_K, 210, (208,), q6_k),
    ],
)
def test_k_quants_by_hand(
    kind: Kind,
    block_bytes: int,
    scales_at: tuple[int, ...],
    reference: Callable[[bytes, int], float],
    tmp_path: Path,
) -> None:
    """The library cannot quantize these: random blocks against scalar readings of ggml's C."""
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (4, block_bytes), dtype=np.uint8)
    for at in scales_at:
        blocks[:, at : at + 2] = rng.uniform(0.01, 1, (4, 1)).astype(np.float16).view(np.uint8)
    file = write_gguf(tmp_path / "k.gguf", blocks={"blk.0.ffn_up.weight": (kind, blocks)})
    value = read_all(convert(file))["model.layers.0.mlp.up_proj.weight"]
    expected = [[reference(block.tobytes(), i) for i in range(256)] for block in blocks]
    assert torch.allclose(value.float(), torch.tensor(expected), rtol=2**-8, atol=1e-6)


_FLOATS_AT = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
    Kind.IQ1_M: (),
}
"""Where blocks have floats, if not only in the first place."""


@pytest.mark.parametrize(
    "kind",
    sorted(UNPACKED_KINDS | {Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4}),
    ids=lambda kind: kind.name,
)
def test_rarer_types_are_what_the_library_reads(kind: Kind, tmp_path: Path) -> None:
    num_inputs, num_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (4 * 256 // num_inputs, num_bytes), dtype=np.uint8)
    for at in _FLOATS_AT.get(kind, (0,)):
        floats = rng.uniform(0.01, 1, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = floats.view(np.uint8)
    if kind == Kind.IQ1_M:
        blocks[:, 55] &= 0x3F  # the float's upper half byte
    if kind == Kind.MXFP4:
        blocks[:, 0] = rng.integers(120, 125, len(blocks))
    rows = blocks.reshape(4, -1)
    file = write_gguf(tmp_path / "rare.gguf", blocks={"blk.0.ffn_up.weight": (kind, rows)})
    value = read_all(convert(file))["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(value, torch.from_numpy(dequantize(rows, kind)).to(torch.bfloat16))
    assert (block_format_of(file) == kind.name.lower()) is (kind not in UNPACKED_KINDS)


def block_format_of(file: Path) -> str:
    with open_gguf(file) as opened:
        return block_format(opened.tensors["blk.0.ffn_up.weight"])


def config_of(file: Path) -> dict[str, Any]:
    with open_gguf(file) as opened:
        return dict(describe(opened, "BF16").config)


def test_rope_scaling_metadata(tmp_path: Path) -> None:
    plain = config_of(write_gguf(tmp_path / "plain.gguf"))
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert plain["rms_norm_eps"] == 1e-5
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = config_of(write_gguf(tmp_path / "linear.gguf", metadata=linear))
    assert config["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 10_000.0,
        "factor": 4.0,
    }
    yarn = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 2.0,
        "qwen2.rope.scaling.original_context_length": 64,
        "qwen2.rope.scaling.yarn_beta_fast": 16.0,
    }
    config = config_of(write_gguf(tmp_path / "yarn.gguf", "qwen2", metadata=yarn))
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
    }


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_frequency_factors_are_llama3_scaling(tmp_path: Path) -> None:
    """Llama 3 files carry divisors of the frequencies; transformers drops them, we keep them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    shape = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "max_position_embeddings": 128}
    scaled = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_theta=1e4, rope_scaling=scaling))
    plain = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_theta=1e4))
    factors = (plain.inv_freq / scaled.inv_freq).numpy()
    tensors = tiny_tensors("llama") | {"rope_freqs.weight": factors}
    config = config_of(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))
    ours = LlamaRotaryEmbedding(LlamaConfig(**config))
    positions = torch.arange(128)[None]
    for mine, theirs in zip(
        ours(torch.zeros(1), positions), scaled(torch.zeros(1), positions), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_untied_output_and_window(tmp_path: Path) -> None:
    tensors = tiny_tensors("llama")
    assert config_of(write_gguf(tmp_path / "a.gguf"))["tie_word_embeddings"] is True
    tensors["output.weight"] = tensors["token_embd.weight"]
    window = {"llama.attention.sliding_window": 16}
    file = write_gguf(tmp_path / "b.gguf", tensors=tensors, metadata=window)
    config = config_of(file)
    assert config["tie_word_embeddings"] is False
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)
    assert "lm_head.weight" in read_all(convert(file))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"llama.block_count": 1}, "'blk.1.attn_norm.weight' .* an unknown name"),
        ({"llama.embedding_length": None}, "embedding_length: None"),
        ({"llama.attention.head_count": 0}, "head_count: 0"),
        ({"llama.attention.head_count": "many"}, "head_count: 'many'"),
        (
            {"llama.attention.head_count": 8, "llama.attention.key_length": 16},
            r"shape \[64, 64\], which",
        ),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.rope.scaling.type": [1, 2]}, "invalid llama.rope.scaling.type"),
        ({"llama.attention.sliding_window": [1, 2]}, "sliding_window differs between layers"),
        ({"llama.rope.freq_base": math.inf}, "rope.freq_base: inf"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16 values of a head"),
        (
            {"tokenizer.ggml.tokens": ["x"] * 2, "tokenizer.ggml.token_type": None},
            "a duplicate token",
        ),
    ],
)
def test_unfit_metadata_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=complaint):
        convert(write_gguf(tmp_path / "tiny.gguf", metadata=change))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"'mamba'.*gemma4, .*llama, .*qwen35, "):
        convert(write_gguf(tmp_path / "tiny.gguf", "mamba"))


def test_other_quantizations_are_refused_by_name(tmp_path: Path) -> None:
    blocks = {"blk.0.ffn_up.weight": (Kind.Q8_K, np.zeros((4, 292), np.uint8))}
    with pytest.raises(WeightsError, match=r"ffn_up.* type Q8_K; supported are .*Q4_K"):
        convert(write_gguf(tmp_path / "tiny.gguf", blocks=blocks))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0])
@pytest.mark.filterwarnings("ignore:overflow")  # quantizing infinity for the test
@pytest.mark.filterwarnings("ignore:invalid")
def test_infinite_weights_are_refused(kind: Kind, tmp_path: Path) -> None:
    tensors = tiny_tensors("llama")
    tensors["blk.1.ffn_up.weight"][3, 5] = math.inf
    with pytest.raises(WeightsError, match=r"'blk.1.ffn_up.weight' in tiny.gguf holds NaN"):
        convert(write_gguf(tmp_path / "tiny.gguf", tensors=tensors, kind=kind))


def test_progress_adds_up(tmp_path: Path) -> None:
    class Watch(SilentProgress):
        total = done = 0

        def start(self, action: Action, total_bytes: int) -> None:
            self.total = total_bytes

        def advance(self, num_bytes: int) -> None:
            self.done += num_bytes

    watch = Watch()
    file = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    convert_gguf(file, tmp_path / "out", watch)
    assert 0 < watch.total == watch.done
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
