"""Models of transformers on our paged cache, against themselves on their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.decoder_rig import CPU, Rig, Row
from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.llm.engine.fallback import FallbackBlueprint, FallbackModel

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 24,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gpt2": ("GPT2", {"n_positions": 96}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24},
    ),
    "gpt-neox": ("GPTNeoX", {}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 6}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "granite": ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.2}),
    "olmo2": ("Olmo2", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 16}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 7}),
    "gemma3n": (
        "Gemma3nText",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": [*("sliding_attention", "full_attention") * 2, "full_attention"],
            "intermediate_size": [48] * 5,
            "activation_sparsity_pattern": [0.0] * 5,
            "laurel_rank": 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "layer_types": [*("sliding_attention", "full_attention") * 2, "full_attention"],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "phi-moe, a window in the mask": (
        "Phimoe",
        {"sliding_window": 7, "num_local_experts": 4},
    ),
    "deepseek-v3, compressed rows": (
        "DeepseekV3",
        LATENT
        | {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4, within a chunk": (
        "Llama4Text",
        {
            "head_dim": 8,
            "attention_chunk_size": 96,
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
        },
    ),
    "bloom, biases by distance": ("Bloom", {"n_layer": 3, "n_head": 4}),
    "doge, biases in the mask": ("Doge", {"num_experts": 48}),
    "roberta, other positions": ("RobertaPreLayerNorm", {"is_decoder": True}),
    "rembert, no first pass without values": (
        "RemBert",
        {"is_decoder": True, "input_embedding_size": 16, "output_embedding_size": 24},
    ),
    "minicpm3": ("MiniCPM3", LATENT),
    "longcat-flash, whose forward reads values": (
        "LongcatFlash",
        LATENT
        | {
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "head_dim": 4,
            "qk_head_dim": 12,
        },
    ),
    "deepseek-v3.2, chosen keys": (
        "DeepseekV32",
        LATENT
        | {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "index_topk": 8,
            "index_n_heads": 8,
            "index_head_dim": 8,
        },
    ),
    "longcat, a first pass that ends early": (
        "LongcatFlash",
        {
            "num_layers": 1,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "head_dim": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "opt, a decoder within the body": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


def save(tmp_path: Path, family: str, extra: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{family}Config")(**TINY | extra, attn_implementation="eager")
    name = family.replace("Text", "").replace("GPT2", "GPT2LMHead")
    name = f"{name}Model" if family == "GPT2" else f"{name}ForCausalLM"
    torch.manual_seed(3)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(tmp_path)
    return model


def load(folder: Path) -> tuple[FallbackBlueprint, FallbackModel]:
    with Checkpoint.open(folder) as checkpoint:
        blueprint = FallbackBlueprint(
            checkpoint.config, max_length=0, dtype=torch.float32, device=CPU
        )
        return blueprint, blueprint.build(checkpoint, lambda _: None)


@pytest.mark.parametrize(("family", "extra"), MODELS.values(), ids=MODELS)
def test_logits_through_every_path(tmp_path: Path, family: str, extra: dict[str, Any]) -> None:
    reference = save(tmp_path, family, extra)
    blueprint, model = load(tmp_path)
    rig = Rig(model, blueprint.kv_layout(4, torch.float32))
    rows = [rig.open([(7 * i + 3 * n) % 92 + 5 for i in range(n)]) for n in (30, 26, 41)]
    rig.step((rows[0], 13), (rows[1], 26))
    rig.step((rows[0], 17), (rows[1], 0), (rows[2], 25))
    rig.prefill(rows[2])
    rig.decode(*rows, num_steps=3)
    rig.preempt(rows[1])
    rig.step((rows[1], len(rows[1].tokens)), (rows[0], 0))
    mate = rig.open(rows[0].tokens[:29])
    rig.share(mate, rows[0], 7)
    rig.prefill(mate)
    for row in (*rows, mate):
        check(row, reference)


@pytest.mark.parametrize(
    ("name", "num_values"),
    [("deepseek-v3, compressed rows", 20), ("deepseek-v3.2, chosen keys", 28)],
)
def test_a_token_of_latent_attention_is_one_row(tmp_path: Path, name: str, num_values: int) -> None:
    """The row, and the key of the index where there is one."""
    save(tmp_path, *MODELS[name])
    blueprint, _ = load(tmp_path)
    assert blueprint.kv_layout(4, torch.float32).page_bytes == 4 * 3 * num_values * 4


def check(row: Row, reference: Any) -> None:
    with torch.inference_mode():
        expected_TV = reference(torch.tensor([row.tokens[:-1]])).logits[0]
    for position, logits_V in row.logits.items():
        torch.testing.assert_close(logits_V, expected_TV[position - 1], atol=1e-4, rtol=1e-4)


OTHERWISE: dict[str, tuple[str, dict[str, Any], str]] = {
    "sees what comes after": ("Ernie", {}, "encoder see those after them"),
    "adds tokens": ("CpmAnt", {"dim_head": 8, "dim_ff": 48, "prompt_length": 4}, "other tokens"),
}


@pytest.mark.parametrize(("family", "extra", "reason"), OTHERWISE.values(), ids=OTHERWISE)
def test_a_model_that_would_compute_something_else_is_refused(
    tmp_path: Path, family: str, extra: dict[str, Any], reason: str
) -> None:
    save(tmp_path, family, extra)
    with pytest.raises(WeightsError, match=reason):
        load(tmp_path)


def test_a_model_that_counts_positions_along_a_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first chunk is right; only the second, and another row of the step, are not."""
    save(tmp_path, "Llama", {})
    forward = transformers.LlamaModel.forward

    def counting(self: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        given["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(
            0
        )
        return forward(self, input_ids, **given)

    monkeypatch.setattr(transformers.LlamaModel, "forward", counting)
    with pytest.raises(WeightsError, match="own positions or masks"):
        load(tmp_path)


def test_a_context_that_llama_4_scales_is_refused_with_the_length_that_is_not(
    tmp_path: Path,
) -> None:
    tuned = {"no_rope_layers": [1, 0, 1], "floor_scale": 16, "attn_temperature_tuning": True}
    sizes = {"head_dim": 8, "attention_chunk_size": 96, "num_local_experts": 4}
    save(tmp_path, "Llama4Text", {**tuned, **sizes, "intermediate_size_mlp": 48})
    with pytest.raises(WeightsError, match="--max-length 15"):
        load(tmp_path)


def test_a_head_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "Olmo2", {})
    logits = FallbackModel.logits
    monkeypatch.setattr(FallbackModel, "logits", lambda *given: 2 * logits(*given))
    with pytest.raises(WeightsError, match="other scores"):
        load(tmp_path)


@pytest.mark.parametrize("model_type", ["vit", "nonsense", None, "gemma3"])
def test_models_that_cannot_be_paged_are_refused(model_type: str | None) -> None:
    with pytest.raises(WeightsError):
        FallbackBlueprint({"model_type": model_type}, max_length=0, dtype=torch.float32, device=CPU)


def test_states_that_are_not_in_a_cache_are_refused() -> None:
    config = {"model_type": "recurrent_gemma", "num_hidden_layers": 3}
    blueprint = FallbackBlueprint(config, max_length=64, dtype=torch.float32, device=CPU)
    with pytest.raises(WeightsError, match="a recurrent state in a way of its own"):
        blueprint.kv_layout(4, torch.float32)


def test_a_configuration_cannot_choose_code(tmp_path: Path) -> None:
    """Kernels by repository name and remote classes are no fields of the class: not read."""
    save(tmp_path, "Olmo2", {})
    with Checkpoint.open(tmp_path) as checkpoint:
        evil = {
            "auto_map": {"AutoModelForCausalLM": "evil.Model"},
            "_attn_implementation": "evil/kernels",
            "_attn_implementation_internal": "evil/kernels",
            "attn_implementation": "evil/kernels",
        }
        blueprint = FallbackBlueprint(
            checkpoint.config | evil, max_length=0, dtype=torch.float32, device=CPU
        )
        assert blueprint.build(checkpoint, lambda _: None).vocab_size == 97
    assert not {"auto_map", "attn_implementation"} & set(vars(blueprint._config))


def test_an_unfit_configuration_is_refused() -> None:
    with pytest.raises(WeightsError, match="olmo2"):
        FallbackBlueprint(
            {"model_type": "olmo2", "hidden_size": "many"},
            max_length=0,
            dtype=torch.float32,
            device=CPU,
        )


@pytest.mark.parametrize("edit", ["missing", "extra", "mis-shaped"])
def test_incomplete_weights_are_refused(tmp_path: Path, edit: str) -> None:
    save(tmp_path, "Olmo2", {})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if edit == "missing":
        del tensors[name]
    elif edit == "mis-shaped":
        tensors[name] = torch.zeros(3, 3)
    else:
        name = "model.layers.1.mlp.surplus"
        tensors[name] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"in model\.safetensors") as caught:
        load(tmp_path)
    assert name in str(caught.value)


def test_frequencies_do_not_follow_the_longest_row(tmp_path: Path) -> None:
    save(tmp_path, *MODELS["phi3-longrope"])
    blueprint, model = load(tmp_path)

    def first_logits(*mates: list[int]) -> torch.Tensor:
        rig = Rig(model, blueprint.kv_layout(4, torch.float32))
        row = rig.open([5, 6, 7, 8])
        rig.prefill(row, *(rig.open(mate) for mate in mates))
        return row.logits[4]

    torch.testing.assert_close(first_logits(), first_logits([9] * 60), atol=1e-5, rtol=1e-5)
