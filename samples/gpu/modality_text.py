"""Chat on a device: three shapes of decoders, every way to draw, every way to keep numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from agreement import Figures, Tokens, apart_in_logprobs, same_tokens
from engines import Waves
from model_case import FLOAT32_LIMIT, Ask, EngineCase, in_float32, in_type, must
from safetensors.torch import load_file, save_file

from support.decoder_families import save_family
from support.text_models import byte_tokenizer
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.grammar.source import to_grammar

VOCAB_SIZE = 1000
NUM_WORDS = 250
"""Ids of prompts: those of the tokenizer."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
LLAMA = ("Llama", SHAPE)
MOE = (
    "Qwen3Moe",
    SHAPE
    | {
        "head_dim": 128,
        "num_attention_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
)
OLMO2 = ("Olmo2", SHAPE | {"num_attention_heads": 4})
"""A model that transformers runs on our cache."""
LATENT = {
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
INDEXED = (
    "DeepseekV32",
    SHAPE | LATENT | {"index_topk": 32, "index_n_heads": 8} | {"index_head_dim": 64},
)
"""Prompts are longer than the keys that a token chooses."""
RECURRENT = (
    "Qwen3Next",
    SHAPE
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
)
FEW_PAGES = MappingProxyType(
    {
        "kv_cache_memory_mb": 1,
        "max_length": 512,
        "max_batch_input_tokens": 64,
        "max_batch_size": 16,
    }
)
"""Pages for one row of the whole context, so that rows are preempted, and prompts cut in chunks."""
LIKELY = SamplingParams(temperature=0.0, max_tokens=24, top_logprobs=5)
DRAWS = (
    SamplingParams(seed=1, max_tokens=24),
    SamplingParams(seed=2, temperature=0.7, top_k=20, max_tokens=24),
    SamplingParams(seed=3, top_p=0.8, max_tokens=24),
    SamplingParams(seed=4, top_k=50, top_p=0.9, min_p=0.05, max_tokens=24),
    SamplingParams(seed=5, repetition_penalty=1.2, max_tokens=24),
    SamplingParams(seed=6, frequency_penalty=0.4, presence_penalty=0.3, max_tokens=24),
    SamplingParams(seed=7, logit_bias=((5, 4.0), (9, -100.0)), max_tokens=24),
    SamplingParams(
        temperature=0.0, min_tokens=8, stop_token_ids=tuple(range(3, 99)), max_tokens=24
    ),
)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def save(shape: tuple[str, dict[str, Any]], folder: Path) -> None:
    """A random model with the tokenizer of bytes."""
    family, fields = shape
    save_family(folder, family, **fields)
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def words(length: int, seed: int) -> tuple[int, ...]:
    """A random prompt."""
    chance = random.Random(f"{length} {seed}")
    return tuple(chance.randrange(3, NUM_WORDS) for _ in range(length))


def row(length: int, seed: int, sampling: SamplingParams, grammar: str = "") -> TokenRequest:
    """A request for a random prompt."""
    return TokenRequest(prompt_ids=words(length, seed), sampling=sampling, grammar=grammar)


def chats(folder: Path) -> Waves:
    """Prompts of many lengths, longer ones that begin alike, a crowd, and every way to draw."""
    lengths = (1, 7, 40, 150, 33, 64)
    first = [row(length, 0, LIKELY) for length in lengths]
    again = [
        TokenRequest(prompt_ids=words(length, 0) + words(20, 1), sampling=LIKELY)
        for length in (150, 64)
    ]
    long = SamplingParams(temperature=0.0, max_tokens=64, top_logprobs=5)
    crowd = [row(9 + index, 2, long) for index in range(12)]
    drawn = [row(10 + 3 * index, 3, sampling) for index, sampling in enumerate(DRAWS)]
    held = SamplingParams(seed=8, max_tokens=24, stop_token_ids=(0,))
    drawn += [
        row(12, 4, held, to_grammar("json_schema", json.dumps(SCHEMA))),
        row(14, 4, held, to_grammar("choice", '["yes", "no", "perhaps"]')),
    ]
    return first, again, crowd, drawn


def forced(folder: Path) -> Waves:
    """Rows whose every token is prescribed: what is compared never parts.

    A bias forces the answers; log-probabilities are those before it.
    """
    rows = []
    for index, length in enumerate((3, 17, 64, 150, 33)):
        bias = ((20 + index, 100.0),)
        sampling = SamplingParams(
            temperature=0.0,
            logit_bias=bias,
            max_tokens=24,
            top_logprobs=20,
            prompt_logprobs=index % 2 == 0,
        )
        rows.append(row(length, 5, sampling))
    return (rows,)


def equal_chats(ask: Ask) -> Figures:
    """Every token in float32, and that the cases were what they are meant to be."""
    got = ask(dtype="float32")
    found = same_tokens(got, ask(is_reference=True, dtype="float32"), FLOAT32_LIMIT)
    rows = [Tokens.of(each) for each in got]
    found["preemptions"] = sum(each.num_preemptions for each in rows)
    found["cached"] = sum(each.num_cached for each in rows[6:8])
    must(found["preemptions"] > 0, "no row was preempted")
    must(found["cached"] >= 150, "no prefix was found")
    return found


def chat_case(name: str, shape: tuple[str, dict[str, Any]]) -> EngineCase:
    """Chats under memory pressure."""
    write = partial(save, shape)
    return EngineCase(
        name=name, write=write, requests=chats, compare=equal_chats, options=FEW_PAGES
    )


def forced_case(
    name: str,
    write: Callable[[Path], object],
    compare: Callable[[Ask], Figures],
    **options: Any,
) -> EngineCase:
    """Prescribed tokens, with chunks and without pressure."""
    given = {"max_length": 512, "max_batch_input_tokens": 64, "max_batch_size": 8, **options}
    return EngineCase(name=name, write=write, requests=forced, compare=compare, options=given)


# ---- checkpoints in formats of their own ---------------------------------------------------------


def save_stored(method: dict[str, Any], shape: tuple[str, dict[str, Any]], folder: Path) -> None:
    """A random model whose projections are stored as `quantization_config` says."""
    save(shape, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    chance = torch.Generator().manual_seed(12)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts = stored(method, tensors.pop(name), chance)
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


def stored(
    method: dict[str, Any], weight: torch.Tensor, chance: torch.Generator
) -> dict[str, torch.Tensor]:
    """The tensors of a projection: for float8 its own numbers, for integers any."""
    num_outputs, num_inputs = weight.shape
    kind = method["quant_method"]
    if kind == "fp8":
        return _float8(weight, has_squares="weight_block_size" in method)
    groups, width = num_inputs // 128, 8

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=chance, dtype=torch.int32)

    scales = (torch.rand(groups, num_outputs, generator=chance) + 0.5) / 60
    scales = (scales * weight.std()).mul(12).half()
    if kind == "awq":
        return {
            "qweight": integers(num_inputs, num_outputs // width),
            "qzeros": integers(groups, num_outputs // width),
            "scales": scales,
        }
    if kind == "gptq":
        return {
            "qweight": integers(num_inputs // width, num_outputs),
            "qzeros": integers(groups, num_outputs // width),
            "scales": scales,
            "g_idx": torch.arange(num_inputs, dtype=torch.int32) // 128,
        }
    return {
        "weight_packed": integers(num_outputs, num_inputs // width),
        "weight_scale": scales.t().contiguous(),
    }


def _float8(weight: torch.Tensor, *, has_squares: bool) -> dict[str, torch.Tensor]:
    largest = torch.finfo(torch.float8_e4m3fn).max
    if not has_squares:
        scale = weight.abs().max() / largest
        return {
            "weight": (weight / scale).to(torch.float8_e4m3fn),
            "weight_scale": scale.reshape(1).float(),
        }
    rows, columns = (-(-size // 128) for size in weight.shape)
    spread = weight.new_zeros(rows * 128, columns * 128)
    spread[: weight.shape[0], : weight.shape[1]] = weight
    scale = spread.view(rows, 128, columns, 128).abs().amax((1, 3)) / largest
    scaled = spread / scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {
        "weight": scaled[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(),
        "weight_scale_inv": scale,
    }


METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}
FLOAT8 = {"quant_method": "fp8"}
FLOAT8_SQUARES = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PLAIN_ROWS = {"cpu_kernels": "torch"}
"""Our CPU kernels round the rows of activations to eight bits, which a GPU does not."""
FLOAT8_LIMIT = 0.15
"""Rows of activations are rounded to four bits on a GPU with units for float8, not on a CPU."""
CELLS_LIMIT = 0.03
"""A key between two of few values may be rounded to either."""


def far(limit: float) -> Callable[[Ask], Figures]:
    """In bfloat16 on the device, within a share of float32 on the CPU."""

    def compare(ask: Ask) -> Figures:
        wanted = ask(is_reference=True, dtype="float32")
        share = apart_in_logprobs(ask(dtype="bfloat16"), wanted)
        must(share <= limit, f"{share:.3g} of the spread, more than {limit}")
        return {"gpu": share}

    return compare


def _forced_cases() -> Sequence[EngineCase]:
    bf16, float32 = in_type(apart_in_logprobs), in_float32(apart_in_logprobs)
    llama, moe, olmo = (partial(save, shape) for shape in (LLAMA, MOE, OLMO2))
    found = [
        forced_case("chat, llama, bfloat16", llama, bf16),
        forced_case("chat, llama, float16", llama, in_type(apart_in_logprobs, "float16")),
        forced_case("chat, qwen3-moe, bfloat16", moe, bf16),
        forced_case("chat, olmo2, bfloat16", olmo, bf16),
        forced_case("chat, deepseek-v3.2, float32", partial(save, INDEXED), float32),
        forced_case("chat, qwen3-next, float32", partial(save, RECURRENT), float32),
        forced_case("chat, llama, deterministic", llama, bf16, enable_deterministic_inference=True),
    ]
    for encoding in ("q8_0", "q6_k", "q4_k", "q4_1", "q4_0"):
        for kind, compare in (("float32", float32), ("bfloat16", bf16)):
            name = f"chat, llama, {encoding}, {kind}"
            options = {"quantization_encoding": encoding, **PLAIN_ROWS}
            found.append(forced_case(name, llama, compare, **options))
    stored = [*((method, "llama", LLAMA) for method in METHODS), ("awq", "moe", MOE)]
    for method, kind, shape in stored:
        write = partial(save_stored, METHODS[method], shape)
        name = f"chat, {kind}, {method}, bfloat16"
        found.append(forced_case(name, write, bf16, **PLAIN_ROWS))
    for name, shape, fields in (
        ("fp8", LLAMA, FLOAT8),
        ("fp8 in squares", LLAMA, FLOAT8_SQUARES),
        ("moe, fp8 in squares", MOE, FLOAT8_SQUARES),
    ):
        write = partial(save_stored, fields, shape)
        found.append(forced_case(f"chat, {name}, bfloat16", write, far(FLOAT8_LIMIT)))
    blocks = {"quantization_encoding": "q8_0", **PLAIN_ROWS}
    found.append(forced_case("chat, moe, q8_0, float32", moe, float32, **blocks))
    write = partial(save_stored, METHODS["gptq"], MOE)
    found.append(forced_case("chat, moe, gptq, bfloat16", write, bf16, **PLAIN_ROWS))
    for cells in ("float8_e4m3fn", "int8"):
        name = f"chat, llama, cache in {cells}"
        compare = in_float32(apart_in_logprobs, CELLS_LIMIT)
        found.append(forced_case(name, llama, compare, kv_cache_format=cells))
    return found


CASES: Sequence[EngineCase] = (
    chat_case("chat, llama, float32", LLAMA),
    chat_case("chat, qwen3-moe, float32", MOE),
    chat_case("chat, olmo2, float32", OLMO2),
    *_forced_cases(),
)
