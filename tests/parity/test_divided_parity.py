"""A decoder divided over ranks gives what the whole one gives, through every path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from support.decoder_families import FAMILIES, LATENT, TINY, VARIANTS
from support.decoder_rig import CPU, Rig, Row, decoder_rig
from support.dense_families import DENSE
from support.kernel_levels import LEVELS
from support.mixture_families import MIXTURES, SMALL
from support.rank_threads import RandomTensors, StoredDecoder, drive_divided
from support.tiers import among, first
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import ConfigError, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.decoders.division import divide
from triptych.core.runtime.decoders.families.table import read_decoder_config
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.decoders.projection_targets import ProjectionTarget
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.packed_linear import Int4Weight
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.shards import Shard
from triptych.core.weights.encoding import WeightEncoding
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, resolve

_AXES = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2]}}
_MORE: dict[str, dict[str, Any]] = {
    "GemmaModel": {},
    "Gemma3TextModel": {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
    },
    "Qwen2VLTextModel": _AXES,
    "Qwen2_5_VLTextModel": _AXES,
    "Qwen3VLTextModel": _AXES,
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: TINY | extra | {"architectures": [f"{family}ForCausalLM"]}
    for name, (family, extra) in FAMILIES.items()
} | {name: TINY | extra | {"architectures": [name]} for name, extra in _MORE.items()}
CONFIGS |= {
    name: TINY
    | DENSE[name][1]
    | {"architectures": [f"{DENSE[name][0]}ForCausalLM".replace("Text", "")]}
    for name in ("gemma4", "phi3", "cohere", "stablelm")
}
CONFIGS |= {
    name: SMALL | MIXTURES[name][1] | {"architectures": [f"{MIXTURES[name][0]}ForCausalLM"]}
    for name in ("gpt-oss", "glm-4.5", "granite")
}
CONFIGS["glm-5"] = {
    **(TINY | LATENT),
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "index_topk": 8,
    "index_n_heads": 4,
    "index_head_dim": 12,
    "index_topk_pattern": "FSFS",
    "architectures": ["GlmMoeDsaForCausalLM"],
}


def tensors_of(name: str, **edits: Any) -> RandomTensors:
    return RandomTensors(read_decoder_config(CONFIGS[name] | edits))


def prompt(length: int, seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(TINY["vocab_size"], (length,), generator=source).tolist()


def drive(rig: Rig) -> list[Row]:
    """Chunks, a mixed step, a shared prefix, a preempted row and samples that are not greedy."""
    long = rig.open(prompt(29, 1))
    rig.step((long, 13))
    rig.step((long, 16))
    short = rig.open(
        prompt(5, 2), SamplingParams(temperature=1.1, top_p=0.9, seed=5, top_logprobs=3)
    )
    rig.step((long, 0), (short, 5))
    rig.decode(long, short, num_steps=3)
    shared = rig.open(long.tokens[:20])
    rig.share(shared, long, 4)
    rig.prefill(shared)
    rig.preempt(short)
    rig.prefill(short)
    rig.decode(long, short, shared, num_steps=2)
    return [long, short, shared]


def assert_same(rows: list[Row], expected: list[Row], close: float = 1e-5) -> None:
    for row, wanted in zip(rows, expected, strict=True):
        assert row.tokens == wanted.tokens
        assert row.logits.keys() == wanted.logits.keys()
        for position, logits_V in row.logits.items():
            torch.testing.assert_close(logits_V, wanted.logits[position], atol=close, rtol=close)


@pytest.mark.parametrize("name", among(CONFIGS, CONFIGS.keys() - VARIANTS))
def test_two_ranks_give_the_logits_of_one(name: str) -> None:
    tensors = tensors_of(name)
    expected = drive(decoder_rig(tensors.decoder()))
    close = 5e-4 if name == "gemma4" else 1e-5  # its scores are not scaled: rounding grows
    assert_same(drive_divided(tensors, 2, drive), expected, close)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("mixtral", 2), ("qwen3-moe", 2), ("qwen3-moe-normed", 3), ("gpt-oss", 4), ("glm-4.5", 2)],
)
def test_ranks_with_whole_experts_give_the_logits_of_one(name: str, num_ranks: int) -> None:
    """5 experts on two ranks, and 4 on three, do not divide evenly."""
    tensors = tensors_of(name)
    expected = drive(decoder_rig(tensors.decoder()))
    tensors.by_experts = True
    assert_same(drive_divided(tensors, num_ranks, drive), expected)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_more_ranks_than_key_heads_share_them(num_ranks: int) -> None:
    """6 query heads, 2 of keys; 80 features and 199 tokens do not divide evenly either."""
    tensors = tensors_of("llama-biased-tied")
    expected = drive(decoder_rig(tensors.decoder()))
    assert_same(drive_divided(tensors, num_ranks, drive), expected)


@pytest.mark.parametrize("name", ["qwen3", "Gemma3TextModel", "glm-5"])
def test_on_the_native_kernels(
    name: str, kernels_of: Callable[[str | None], NativeKernels]
) -> None:
    tensors, native = tensors_of(name), kernels_of(LEVELS[0])
    expected = drive(decoder_rig(tensors.decoder(native=native), native=native))
    assert_same(drive_divided(tensors, 2, drive, native), expected)


BLOCKS = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 768}


@pytest.mark.parametrize(
    ("encoding", "name", "num_ranks"),
    [("q8_0", "llama-biased-tied", 3), ("q4_k", "qwen3", 2), ("q4_0", "mixtral", 2)],
)
@pytest.mark.parametrize("has_kernels", [False, True])
def test_weights_in_blocks(
    encoding: str,
    name: str,
    num_ranks: int,
    has_kernels: bool,
    kernels_of: Callable[[str | None], NativeKernels],
) -> None:
    """Three ranks have 3, 3 and 2 heads; 768 features are three blocks of 256.

    Kernels round inputs to bytes, some to others after sums that differ in their last bits. They
    are some hundred times closer to each other than to the products of torch.
    """
    native = kernels_of(LEVELS[0]) if has_kernels else None
    tensors = tensors_of(name, **BLOCKS)
    tensors.encoding = WeightEncoding(encoding)
    expected = drive(decoder_rig(tensors.decoder(native=native), native=native))
    assert_same(
        drive_divided(tensors, num_ranks, drive, native),
        expected,
        close=0.3 if has_kernels else 1e-4,
    )


@pytest.mark.parametrize(("encoding", "num_heads"), [("q4_k", 4), ("q8_0", 16)])
def test_blocks_on_two_ranks_are_refused(encoding: str, num_heads: int) -> None:
    heads = {"num_attention_heads": num_heads, "head_dim": 64 if num_heads == 4 else 12}
    blueprint = NativeBlueprint(
        CONFIGS["llama"] | BLOCKS | heads | {"hidden_size": 768},
        max_length=0,
        dtype=torch.float32,
        device=CPU,
        encoding=WeightEncoding(encoding),
    )
    with pytest.raises(ConfigError, match=r"o_proj\.weight is held in blocks of"):
        blueprint.check_divisible(3 if num_heads == 16 else 2)


def test_stored_groups_on_two_ranks_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where weights stay as they are stored: 128 inputs share a scale."""
    part = Linear(64, 8, has_bias=False, dtype=torch.float32, device=CPU)
    stored = WeightEncoding(stored={"a.weight": "q4_0"})
    target = ProjectionTarget("a.weight", part, 0, Shard.whole(8), stored, Shard(64, 64, 256))
    words, scales = torch.zeros(256, 1, dtype=torch.int32), torch.ones(2, 8)
    held = Int4Weight(words, scales, None, None, "awq")
    monkeypatch.setattr(ProjectionTarget, "_read_held", lambda target, source: held)
    with pytest.raises(WeightsError, match=r"a\.weight: .* of size 128"):
        target.fill(tensors_of("llama"))


def test_uneven_key_heads() -> None:
    tensors = tensors_of("llama", num_attention_heads=9, num_key_value_heads=3)
    expected = drive(decoder_rig(tensors.decoder()))
    assert_same(drive_divided(tensors, 2, drive), expected)


def test_a_row_alone_and_in_a_batch_is_the_same_to_the_bit(
    kernels_of: Callable[[str | None], NativeKernels],
) -> None:
    """Three ranks: sums of two numbers do not show the order that they are added up in."""
    native = kernels_of(LEVELS[0])

    def drive_alone_and_together(rig: Rig) -> list[Row]:
        rows = [rig.open(prompt(12, 3)) for _ in range(2)]
        rig.prefill(rows[0])
        rig.prefill(rig.open(prompt(7, 4)), rig.open(prompt(9, 5)), rows[1])
        return rows

    alone, together = drive_divided(tensors_of("llama"), 3, drive_alone_and_together, native)
    for position, logits_V in alone.logits.items():
        assert torch.equal(logits_V, together.logits[position])


@pytest.mark.embedded
@pytest.mark.parametrize("encoding", first(["q8_0", "bfloat16"]))
def test_the_embedded_model_token_for_token(
    encoding: str, kernels_of: Callable[[str | None], NativeKernels]
) -> None:
    """9 heads in 3 groups: one rank has two of these. More in samples/benchmarks/divided.py."""
    resolved = resolve(
        EMBEDDED_REFERENCE, name=None, options=ModelOptions(), progress=SilentProgress()
    )
    stored, native = StoredDecoder(Path(resolved.folder), encoding), kernels_of(LEVELS[0])
    tokenizer = Tokenizer.from_file(str(stored.folder / "tokenizer.json"))

    def answer(rig: Rig) -> list[list[int]]:
        rows = [
            rig.open(tokenizer.encode(text).ids)
            for text in ("Once upon a time,", "def add(a, b):", "The capital of France is")
        ]
        rig.prefill(*rows)
        rig.decode(*rows, num_steps=7)
        return [row.tokens for row in rows]

    expected = answer(decoder_rig(stored.decoder(native=native), native=native))
    assert drive_divided(stored, 2, answer, native) == expected


def test_scores_of_a_prompt() -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=True, top_logprobs=2)

    def scores(rig: Rig) -> list[float]:
        row = rig.open(prompt(11, 6), sampling)
        (result,) = rig.step((row, 11)).rows
        return [entry.logprob for entry in result.prompt_logprobs]

    tensors = tensors_of("llama")
    expected = scores(decoder_rig(tensors.decoder()))
    assert len(expected) == 10
    assert drive_divided(tensors, 2, scores) == pytest.approx(expected, abs=1e-5)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="divided by 6 at most"):
        divide(read_decoder_config(CONFIGS["llama"]), 0, 7)
    with pytest.raises(ConfigError, match="experts can be divided by 4 at most"):
        divide(read_decoder_config(CONFIGS["qwen3-moe-normed"]), 0, 5, by_experts=True)
