"""The supported classes of denoising models, by diffusers' class name.

Owns the facts of each: how its diffusers pipeline calls it, and what its blocks return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from triptych.core.errors import ConfigError, WeightsError
from triptych.modalities.diffusion.engine.families.fused_blocks import fuse_blocks
from triptych.modalities.diffusion.engine.families.fused_norms import fuse_norms
from triptych.modalities.diffusion.engine.families.model import Blocks, DenoiseModel, DenoiserFamily
from triptych.modalities.diffusion.engine.families.span import SpanModel, replaced
from triptych.modalities.diffusion.engine.parallel.sequence import (
    IMAGE,
    TEXT,
    LocalAttention,
    SequenceParallel,
    TokenAxis,
)

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

_TEXT_FIRST = ("encoder_hidden_states", "hidden_states")
_IMAGE_FIRST = ("hidden_states", "encoder_hidden_states")


def _dual(*names: str, streams: tuple[str, ...] = _TEXT_FIRST) -> tuple[Blocks, ...]:
    return tuple(Blocks(name, streams, hidden="hidden_states") for name in names)


_BLOCKS = (Blocks("transformer_blocks"),)
_STREAMS = {"hidden_states": IMAGE, "encoder_hidden_states": TEXT}
_TURNS = TokenAxis("image", -3)
_THOUSAND = 1000.0
_FLUX = DenoiserFamily(
    time_unit=_THOUSAND,
    span=_dual("transformer_blocks", "single_transformer_blocks"),
    tokens={**_STREAMS, "txt_ids": TEXT, "img_ids": IMAGE},
)
_FLUX_LIKE = replace(
    _FLUX, span=(*_dual("transformer_blocks"), Blocks("single_transformer_blocks"))
)

FAMILIES: MappingProxyType[str, DenoiserFamily] = MappingProxyType(
    {
        "AuraFlowTransformer2DModel": DenoiserFamily(
            time_unit=_THOUSAND,
            span=(*_dual("joint_transformer_blocks"), Blocks("single_transformer_blocks")),
        ),
        "ChromaTransformer2DModel": _FLUX_LIKE,
        "ErnieImageTransformer2DModel": DenoiserFamily(
            ragged={"text_bth": ""}, span=(Blocks("layers", row_axis=1),)
        ),
        "Flux2Transformer2DModel": _FLUX_LIKE,
        "FluxTransformer2DModel": _FLUX,
        "GlmImageTransformer2DModel": DenoiserFamily(
            time_offset=-1.0,
            time_is_exact=True,
            span=_dual("transformer_blocks", streams=_IMAGE_FIRST),
        ),
        "HiDreamImageTransformer2DModel": DenoiserFamily(
            time="timesteps",
            negates=True,
            axes={"encoder_hidden_states_llama3": 1},
            span=(
                *_dual("double_stream_blocks", streams=_IMAGE_FIRST),
                Blocks("single_stream_blocks"),
            ),
        ),
        "HunyuanImageTransformer2DModel": DenoiserFamily(
            span=_dual("transformer_blocks", "single_transformer_blocks", streams=_IMAGE_FIRST)
        ),
        "LongCatImageTransformer2DModel": _FLUX,
        "Lumina2Transformer2DModel": DenoiserFamily(
            time_unit=_THOUSAND, time_flips=True, negates=True, span=(Blocks("layers"),)
        ),
        "OvisImageTransformer2DModel": _FLUX,
        "PixArtTransformer2DModel": DenoiserFamily(halves=True, span=_BLOCKS),
        "QwenImage21Transformer2DModel": DenoiserFamily(
            time_unit=_THOUSAND, sample_last=True, span=_BLOCKS
        ),
        "QwenImageTransformer2DModel": DenoiserFamily(
            time_unit=_THOUSAND,
            ragged={"encoder_hidden_states": "encoder_hidden_states_mask"},
            span=_dual("transformer_blocks"),
            block_tokens={
                **_STREAMS,
                "image_rotary_emb": (IMAGE, TEXT),
                "modulate_index": TokenAxis("image", -1),
            },
        ),
        "SD3Transformer2DModel": DenoiserFamily(
            span=_dual("transformer_blocks"), block_tokens=_STREAMS
        ),
        "SanaTransformer2DModel": DenoiserFamily(span=_BLOCKS),
        "UNet2DConditionModel": DenoiserFamily(sample="sample"),
        "WanTransformer3DModel": DenoiserFamily(
            span=(Blocks("blocks"),),
            tap="condition_embedder",
            block_tokens={"hidden_states": IMAGE, "rotary_emb": (_TURNS, _TURNS)},
            local_attention="attn2",
        ),
        "ZImageTransformer2DModel": DenoiserFamily(
            sample="x",
            time="t",
            time_unit=_THOUSAND,
            time_flips=True,
            negates=True,
            lists=frozenset({"x", "cap_feats"}),
            span=(Blocks("layers"),),
        ),
    }
)


def family_of(module: nn.Module) -> DenoiserFamily:
    """The family of a model's class. Raises `WeightsError` if it is unknown."""
    name = type(module).__name__
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise WeightsError(f"Unknown denoising model {name}; known are: {known}.")
    # Sana's configurations state the time unit of their training; Sprint uses the scheduler's.
    config = getattr(module, "config", None)
    is_sprint = getattr(config, "guidance_embeds", False)
    own_scale = 1.0 if is_sprint else getattr(config, "timestep_scale", 1.0)
    family = replace(FAMILIES[name], time_unit=FAMILIES[name].time_unit / own_scale)
    # Distilled HunyuanImage predicts the mean velocity up to the next step.
    takes_next = getattr(config, "use_meanflow", False)
    return replace(family, next_time="timestep_r") if takes_next else family


def open_model(module: nn.Module, ranks: RankGroup | None = None) -> DenoiseModel:
    """A model ready to run, as a `SpanModel` if its family allows.

    On a GPU its adaptive norms, and FLUX's blocks, are replaced by fused ones. With `ranks`, each
    rank computes some tokens of every run; call `check_divisible` first.
    """
    family = family_of(module)
    if next(module.parameters()).is_cuda:
        fuse_norms(module)
        fuse_blocks(module)
    sequence = None
    if ranks is not None:
        tokens = family.tokens or family.block_tokens
        sequence = SequenceParallel(ranks, tokens, is_in_blocks=not family.tokens)
        if family.local_attention:
            module = _with_local_attention(module, family.local_attention, sequence)
    model = SpanModel(module, family) if family.span else DenoiseModel(module, family)
    model.sequence = sequence
    return model


def _with_local_attention(module: nn.Module, name: str, sequence: SequenceParallel) -> nn.Module:
    """A view of the module in which attention of this name covers only a rank's own tokens."""
    apart = {
        path: LocalAttention(attention, sequence)
        for path, attention in module.named_modules()
        if path.endswith(f".{name}")
    }
    return replaced(module, apart)


def check_divisible(class_name: str, config: Mapping[str, Any], num_ranks: int) -> None:
    """Raise `ConfigError` if runs of this class cannot be divided over `num_ranks` ranks."""
    family = FAMILIES.get(class_name)
    if family is None or not (family.tokens or family.block_tokens):
        known = ", ".join(n for n, each in FAMILIES.items() if each.tokens or each.block_tokens)
        raise ConfigError(
            f"--ulysses-degree {num_ranks}: {class_name} is not divided by tokens; these are:"
            f" {known}. Leave the option out, or use --cfg-parallel-size 2."
        )
    num_heads = config.get("num_attention_heads", num_ranks)
    if num_heads < num_ranks:
        raise ConfigError(
            f"--ulysses-degree {num_ranks}: {class_name} has {num_heads} heads here, and each"
            " rank needs one; lower it."
        )
