"""Rows with LoRA adapters against models that PEFT has merged, through every path."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from support.decoder_families import LATENT, TINY, save_family
from support.decoder_rig import Rig, Row, decoder_rig
from support.kernel_levels import LEVELS
from support.text_adapters import ATTENTION, MLP, adapted_decoder, save_adapter
from triptych.core.runtime.kernels.native.library import NativeKernels

PATTERNS = {"rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 3}, "r": 6, "lora_alpha": 9}
REGEX = r".*layers\.[02]\.(self_attn\.(q|v)_proj|mlp\.down_proj)"
SEPARATE = {"tie_word_embeddings": False}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "by-module": (
        "Llama",
        {"attention_bias": True},
        {**PATTERNS, "alpha_pattern": {"v_proj": 20}, "target_modules": ATTENTION + MLP},
    ),
    "rs-by-pattern": ("Qwen2", {}, {"use_rslora": True, "target_modules": REGEX}),
    "fused": ("Phi3", {"head_dim": 8}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "latent": (
        "Youtu",
        LATENT,
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
    "vocabulary": ("Llama", SEPARATE, {"target_modules": ["lm_head", "embed_tokens", "q_proj"]}),
    "trained-copies": (
        "Llama",
        SEPARATE,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
}
ADAPTERS = (-1, 0, 1, 0, 1)
OpenRig = Callable[..., tuple[Rig, list[Any]]]


@pytest.fixture
def open_rig(tmp_path: Path, kernels_of: Callable[[str], NativeKernels]) -> OpenRig:
    """A rig with two adapters, and the models that rows with -1, 0 and 1 must equal."""

    def open_rig(case: str, level: str, **options: Any) -> tuple[Rig, list[Any]]:
        family, extra, config = CASES[case]
        base = save_family(tmp_path / "model", family, **extra)
        folders = [tmp_path / name for name in "ab"]
        merged = [save_adapter(folder, base, seed, **config) for seed, folder in enumerate(folders)]
        native = kernels_of(level) if level != "torch" else None
        decoder = adapted_decoder(tmp_path / "model", folders, native=native, **options)
        return decoder_rig(decoder, native=native), [base, *merged]

    return open_rig


def rows_of(rig: Rig) -> list[Row]:
    rows = []
    for length, adapter in zip((21, 9, 30, 14, 14), ADAPTERS, strict=True):
        source = random.Random(length)
        rows.append(rig.open([source.randrange(TINY["vocab_size"]) for _ in range(length)]))
        rows[-1].adapter = adapter
    return rows


def run(rig: Rig, rows: list[Row]) -> None:
    """Chunks, decoding in a mixed batch, a row that is preempted, and one that shares pages."""
    rig.step(*((row, 5) for row in rows))
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=3)
    rig.preempt(rows[1])
    mate = rig.open(rows[2].tokens[:20] + rows[0].tokens[:5])
    mate.adapter = rows[2].adapter
    rig.share(mate, rows[2], 5)
    rig.prefill(rows[1], mate)
    rows.append(mate)
    rig.decode(*rows, num_steps=2)


def logits_of(models: list[Any], row: Row) -> torch.Tensor:
    with torch.inference_mode():
        found = models[row.adapter + 1](torch.tensor([row.tokens[:-1]])).logits[0].float()
    return found[[position - 1 for position in row.logits]]


@pytest.mark.parametrize(
    ("case", "level"),
    [
        *((case, level) for case in CASES for level in LEVELS[:1]),
        *(("by-module", level) for level in LEVELS[1:]),
        *((case, "torch") for case in ("by-module", "rs-by-pattern", "fused", "latent")),
    ],
)
def test_rows_equal_merged_models(open_rig: OpenRig, case: str, level: str) -> None:
    rig, models = open_rig(case, level)
    rows = rows_of(rig)
    run(rig, rows)
    for row in rows:
        wanted, found = logits_of(models, row), torch.stack(list(row.logits.values()))
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
        if row.adapter >= 0:
            assert float((found - logits_of(models[:1] * 3, row)).abs().max()) > 0.1


@pytest.mark.parametrize("level", LEVELS[:1])
def test_rows_err_no_more_than_merged_models_in_bfloat16(open_rig: OpenRig, level: str) -> None:
    rig, models = open_rig("by-module", level, dtype=torch.bfloat16)
    rows = rows_of(rig)
    run(rig, rows)
    exact = torch.cat([logits_of(models, row) for row in rows])
    rounded = [model.bfloat16() for model in models]
    theirs = torch.cat([logits_of(rounded, row) for row in rows]) - exact
    ours = torch.stack([x for row in rows for x in row.logits.values()]) - exact
    assert float(ours.norm()) <= 1.5 * float(theirs.norm())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_bitwise_the_same_in_any_company(
    open_rig: OpenRig, dtype: torch.dtype, level: str
) -> None:
    rig, _ = open_rig("vocabulary", level, dtype=dtype)
    rows = rows_of(rig)
    alone = [rig.open(row.tokens) for row in rows]
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=3)
    for row, own in zip(rows, alone, strict=True):
        own.adapter = row.adapter
        rig.step((own, 4))
        rig.prefill(own)
        rig.decode(own, num_steps=3)
        assert own.tokens == row.tokens
        for position, logits_V in row.logits.items():
            assert torch.equal(own.logits[position], logits_V)


def test_a_loaded_adapter_keeps_nothing_of_its_file(
    tmp_path: Path, kernels_of: Callable[[str], NativeKernels]
) -> None:
    base = save_family(tmp_path / "model", "Llama", **SEPARATE)
    save_adapter(tmp_path / "a", base, r=1, target_modules=["embed_tokens"])
    file = tmp_path / "a" / "adapter_model.safetensors"
    pairs = {name: each for name, each in load(file.read_bytes()).items() if "lora_" in name}
    save_file(pairs, file)  # without the whole table
    decoder = adapted_decoder(tmp_path / "model", [tmp_path / "a"], native=kernels_of(LEVELS[0]))
    rows, adapters = decoder.adapter_rows, decoder.vocabulary_adapters
    assert rows is not None
    assert adapters is not None
    rows.select(torch.zeros(4, dtype=torch.int64))
    before, after = torch.zeros(2, 4, TINY["hidden_size"])
    adapters.change_embedded(torch.arange(4), before)
    with file.open("r+b") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        stream.write(bytes(size))
    adapters.change_embedded(torch.arange(4), after)
    assert before.abs().max() > 0
    assert torch.equal(before, after)
