"""Configurations: what is read, what is refused, and what a family means."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.core.errors import SetupError, WeightsError
from triptych.core.runtime.decoders.families.table import FAMILIES, is_native, read_decoder_config
from triptych.core.runtime.decoders.tensor_names import decoder_targets
from triptych.core.runtime.layers.attention import AttentionConfig
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.mamba2 import Mamba2Config
from triptych.core.runtime.layers.mixers import mixer_parts
from triptych.core.runtime.layers.rotary import rope_frequencies

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
}


def config(architecture: str = "LlamaForCausalLM", **fields: Any) -> dict[str, Any]:
    return BASE | {"architectures": [architecture]} | fields


@pytest.mark.parametrize("architectures", [["BloomForCausalLM"], [], None, "LlamaForCausalLM", [3]])
def test_an_unknown_architecture_is_refused_with_those_we_run(architectures: Any) -> None:
    with pytest.raises(SetupError, match=r"LlamaForCausalLM.*Qwen3ForCausalLM"):
        read_decoder_config(BASE | {"architectures": architectures})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"hidden_size": 30}, "does not split into 4 heads"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"head_dim": 7}, "rotated dims"),
    ],
)
def test_unfit_fields_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsError, match=named):
        read_decoder_config(config(**fields))


@pytest.mark.parametrize("field", ["layer_types", "no_rope_layers"])
def test_lists_shorter_than_the_model_are_refused(field: str) -> None:
    with pytest.raises(WeightsError, match=field):
        read_decoder_config(config("SmolLM3ForCausalLM", **{field: []}))


def test_an_unknown_layer_type_is_refused() -> None:
    fields = {"layer_types": ["linear_attention"] * 4, "use_sliding_window": True}
    with pytest.raises(WeightsError, match="linear_attention"):
        read_decoder_config(config("Qwen3ForCausalLM", **fields))


@pytest.mark.parametrize(
    ("field", "layers"),
    [
        ("layers_block_type", [["mamba"]]),
        ("layers_block_type", ["mamba", "cake"]),
        ("hybrid_override_pattern", "M|*-"),
    ],
)
def test_unknown_layers_of_a_hybrid_are_refused(field: str, layers: Any) -> None:
    fields = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], field: layers}
    with pytest.raises(WeightsError, match=field):
        read_decoder_config(fields)


def test_fields_that_name_code_are_ignored() -> None:
    plain = read_decoder_config(config())
    assert read_decoder_config(config(auto_map={"AutoModel": "evil.py"}, unknown=1)) == plain


@pytest.mark.parametrize("kind_field", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_is_read_from_old_and_new_places(place: str, kind_field: str) -> None:
    scaling = {kind_field: "linear", "factor": 2}
    rope = read_decoder_config(config(rope_theta=7.0, **{place: scaling})).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 7.0)


def test_the_served_length_reaches_the_frequencies() -> None:
    assert read_decoder_config(config()).rope.max_length == 128
    assert read_decoder_config(config(), max_length=40).rope.max_length == 40


def test_longrope_takes_its_trained_length_from_either_place() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"rope_type": "longrope", **factors}
    outside = read_decoder_config(
        config(rope_scaling=scaling, original_max_position_embeddings=32)
    ).rope
    inside = read_decoder_config(
        config(rope_scaling=scaling | {"original_max_position_embeddings": 32})
    ).rope
    assert outside == inside
    assert (outside.trained_length, outside.factor) == (32, 4.0)


def test_families_differ_where_they_should() -> None:
    smollm3 = read_decoder_config(config("SmolLM3ForCausalLM"))
    assert [layer.uses_rope for layer in smollm3.attention] == [True, True, True, False]
    assert smollm3.has_tied_embeddings
    mistral = read_decoder_config(config("MistralForCausalLM"))
    assert {layer.window for layer in mistral.attention} == {4096}
    qwen2 = read_decoder_config(config("Qwen2ForCausalLM"))
    assert {layer.window for layer in qwen2.attention} == {None}
    assert all(layer.has_qkv_bias and not layer.has_out_bias for layer in qwen2.attention)
    qwen3 = read_decoder_config(config("Qwen3ForCausalLM"))
    assert {layer.head_dim for layer in qwen3.attention} == {128}
    assert all(layer.head_norm for layer in qwen3.attention)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_begin_at_a_layer(architecture: str) -> None:
    fields = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
    layers = read_decoder_config(config(architecture, **fields)).attention
    assert [layer.window for layer in layers] == [None, None, None, 16]


def test_kimi_linear_is_read_as_published_and_as_transformers_saves_it() -> None:
    sizes = {"num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1}
    linear = {"head_dim": 16, "num_heads": 2, "short_conv_kernel_size": 3}
    layers = {"full_attn_layers": [2, 4], "kda_layers": [1, 3]}
    published = {"linear_attn_config": linear | layers, "moe_renormalize": False}
    saved = {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "linear_conv_kernel_dim": 3,
        "norm_topk_prob": False,
    }
    found = [
        read_decoder_config(config("KimiLinearForCausalLM", **sizes, **each))
        for each in (published, saved)
    ]
    assert found[0] == found[1]
    assert [isinstance(layer, LatentConfig) for layer in found[0].attention] == [False, True] * 2
    assert rope_frequencies(found[0].rope)[0].count_nonzero() == 0
    with pytest.raises(WeightsError, match="mla_use_nope"):
        read_decoder_config(config("KimiLinearForCausalLM", **sizes, mla_use_nope=False))
    yarn = {"type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}  # its class reads none of these
    unread = {"tie_word_embeddings": True, "rope_scaling": yarn}
    assert (
        read_decoder_config(config("KimiLinearForCausalLM", **sizes, **published, **unread))
        == (found[0])
    )


@pytest.mark.parametrize(
    ("fields", "uses_rope"),
    [
        ({}, True),
        ({"rope_theta": None}, False),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None}, True),
    ],
)
def test_olmo_hybrid_without_a_base_rotates_nothing(
    fields: dict[str, Any], *, uses_rope: bool
) -> None:
    decoder = read_decoder_config(config("OlmoHybridForCausalLM", **fields))
    assert decoder.attending == [decoder.attention[3]]
    assert [each.uses_rope for each in decoder.attending] == [uses_rope]
    assert decoder.pre_normed == {0, 1, 2}


def test_mistral_4_takes_its_rope_from_either_place() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    yarn |= {"llama_4_scaling_beta": 0.2, "partial_rotary_factor": 0.5}
    places = "rope_parameters", "rope_scaling"
    found = [read_decoder_config(config("Mistral4ForCausalLM", **{each: yarn})) for each in places]
    assert found[0] == found[1]
    assert found[0].query_scaling is not None
    assert found[0].query_scaling.length == 64


@pytest.mark.parametrize("rope", [1, "yarn", [1], {"partial_rotary_factor": "half"}])
def test_a_rope_of_another_kind_is_refused(rope: Any) -> None:
    with pytest.raises(WeightsError, match="rope_parameters"):
        read_decoder_config(config("Mistral4ForCausalLM", rope_parameters=rope))


@pytest.mark.parametrize("name", ["Qwen3Next", "OlmoHybrid", "KimiLinear", "FalconH1"])
def test_another_activation_is_left_to_the_class(name: str) -> None:
    """It would follow convolutions, too."""
    assert not is_native(config(f"{name}ForCausalLM", hidden_act="gelu_pytorch_tanh"))


def test_a_type_that_is_no_name_is_of_no_family() -> None:
    assert is_native(config(model_type=["exaone"]))


def test_layers_of_one_half_are_read_from_letters() -> None:
    pattern = {"hybrid_override_pattern": "M-*E", "mamba_d_conv": 3}
    decoder = read_decoder_config(config("NemotronHForCausalLM", **pattern))
    mamba, mlp, attention, experts = decoder.attention
    assert isinstance(mamba, Mamba2Config)
    assert isinstance(attention, AttentionConfig)
    assert (mamba.width, mlp, experts) == (3, None, None)
    assert [size > 0 for size in decoder.mlp_sizes] == [False, True, False, False]
    assert decoder.moe is not None
    assert decoder.moe.dense_layers == {0, 1, 2}
    latent = config("NemotronHForCausalLM", **pattern, moe_latent_size=16)
    assert not is_native(latent)


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_an_index_of_keys_is_left_out_where_it_would_choose_all(architecture: str) -> None:
    given = config(architecture, index_topk=50, q_lora_rank=8)
    assert read_decoder_config(given, max_length=50).key_index is None
    index = read_decoder_config(given, max_length=51).key_index
    assert index is not None
    assert (index.num_chosen, index.is_interleaved) == (50, architecture.startswith("Glm"))
    assert index == read_decoder_config(given).key_index


@pytest.mark.parametrize("field", ["partial_rotary_factor", "rope_parameters"])
def test_a_part_of_the_rotated_values_is_left_to_the_class(field: str) -> None:
    """Some classes rotate all of them whatever the share is."""
    share = 0.5 if field == "partial_rotary_factor" else {"partial_rotary_factor": 0.5}
    assert is_native(config("DeepseekV3ForCausalLM"))
    assert not is_native(config("DeepseekV3ForCausalLM", **{field: share}))


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, "FFFF"),
        ({"index_topk_freq": 2}, "FFSF"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSF"),
        ({"index_topk_pattern": "FSFS"}, "FSFS"),
        ({"indexer_types": ["full", "full", "shared", "shared"]}, "FFSS"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, None),
        ({"index_topk_pattern": "FX"}, None),
        ({"index_head_dim": 4, "qk_rope_head_dim": 8}, None),
        ({"q_lora_rank": None}, None),
    ],
)
def test_layers_with_an_index_of_their_own(fields: dict[str, Any], kinds: str | None) -> None:
    given = config("GlmMoeDsaForCausalLM", **{"index_topk": 50, "q_lora_rank": 8} | fields)
    if kinds is None:
        with pytest.raises(WeightsError, match=r"config.json: .*index"):
            read_decoder_config(given)
        return
    layers = read_decoder_config(given).attending
    assert [bool(len(layer.shapes) > 1) for layer in layers] == [kind == "F" for kind in kinds]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"intermediate_size": [64, 80, 80]}, "3 values"),
        ({"intermediate_size": [64, "80"]}, "mlp_sizes"),
        ({"activation_sparsity_pattern": [1.0] * 4}, "activation_sparsity_pattern"),
        ({"altup_num_inputs": 9}, "altup_num_inputs"),
        ({"altup_active_idx": 1}, "altup_active_idx"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
        ({}, None),
    ],
)
def test_streams_of_other_kinds_are_refused(fields: dict[str, Any], error: str | None) -> None:
    given = config("Gemma3nForCausalLM", num_kv_shared_layers=0, head_dim=8, **fields)
    if error is None:
        assert read_decoder_config(given).gate_deviations == (0.0,) * 4
        return
    with pytest.raises(WeightsError, match=error):
        read_decoder_config(given)


def sections_of(architecture: str) -> list[int]:
    """Qwen3 has heads of 128 dims, Qwen3.5 of 256, the others here of 8."""
    if architecture.startswith("Qwen3_5"):
        return [44, 42, 42]
    return [24, 20, 20] if architecture.startswith("Qwen3") else [2, 1, 1]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_targets_cover_every_parameter_once(architecture: str) -> None:
    """The views of all targets together are exactly the decoder's memory."""
    share = 0.5 if architecture == "Mistral4ForCausalLM" else 1.0
    rope = {"mrope_section": sections_of(architecture), "partial_rotary_factor": share}
    fields: dict[str, Any] = {"attention_bias": True, "rope_parameters": rope}
    if architecture in ("BambaForCausalLM", "GraniteMoeHybridForCausalLM"):
        fields["layer_types"] = ["mamba", "attention", "mamba", "attention"]
        fields["attn_layer_indices"] = [1, 3]
    if architecture == "KimiLinearForCausalLM":
        fields["layer_types"] = ["linear_attention", "full_attention"] * 2
        fields |= {"num_experts": 8, "attention_bias": False}  # files have no bias of queries
    fields["mlp_bias"] = architecture != "NemotronHForCausalLM"  # its experts have none
    fields |= {"mamba_d_ssm": None, "num_kv_shared_layers": 0}
    decoder = Decoder(
        read_decoder_config(config(architecture, **fields)),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    spans = sorted(
        (t.into.data_ptr(), t.into.data_ptr() + t.into.numel() * 4)
        for t in decoder_targets(decoder)
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    holders = [decoder, *decoder.layers]
    holders += [layer.mlp for layer in decoder.layers]
    holders += [part for layer in decoder.layers for part in mixer_parts(layer.attention)]
    holders += [getattr(decoder, name) for name in ("embedding", "head", "norm")]
    for layer in decoder.layers:
        holders += [*layer.linears(), *layer.norms]
        xielu = getattr(layer.mlp, "xielu", None)
        holders += [] if xielu is None else [SimpleNamespace(**xielu.tensors)]
        holders += [x for part in mixer_parts(layer.attention) for x in vars(part).values()]
        if (altup := getattr(layer, "altup", None)) is not None:
            holders += [altup, altup.router_norm, altup.laurel.norm]
    if (inputs := decoder.layer_inputs) is not None:
        holders += [inputs.table, inputs.projection, inputs.norm]
    if decoder.streams is not None:
        holders += decoder.streams.linears()
    storages = {}
    for holder in holders:
        for name in names_of(holder):
            value = getattr(holder, name)
            if isinstance(value, torch.Tensor):
                storages[value.data_ptr()] = value.numel() * 4
    assert sum(end - start for start, end in spans) == sum(storages.values())


def names_of(holder: Any) -> list[str]:
    """The attributes of an object, with or without slots."""
    slots = [name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(holder, "__dict__", ())]
