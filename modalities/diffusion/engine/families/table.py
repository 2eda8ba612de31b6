"""The classes of denoising models that recipes use, by diffusers' class name.

Owns the facts of each: how its pipeline in diffusers calls it, and what its blocks return.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from torch import nn

from triptych.core.errors import WeightsError
from triptych.modalities.diffusion.engine.families.fused_norms import fuse_norms
from triptych.modalities.diffusion.engine.families.model import Blocks, DenoiseModel, DenoiserFamily
from triptych.modalities.diffusion.engine.families.span import SpanModel

_TEXT_FIRST = ("encoder_hidden_states", "hidden_states")
_PICTURE_FIRST = ("hidden_states", "encoder_hidden_states")


def _dual(*names: str, streams: tuple[str, ...] = _TEXT_FIRST) -> tuple[Blocks, ...]:
    return tuple(Blocks(name, streams, hidden="hidden_states") for name in names)


_BLOCKS = (Blocks("transformer_blocks"),)
_THOUSAND = 1000.0
_FLUX = DenoiserFamily(
    time_unit=_THOUSAND, span=_dual("transformer_blocks", "single_transformer_blocks")
)
_FLUX_LIKE = DenoiserFamily(
    time_unit=_THOUSAND, span=(*_dual("transformer_blocks"), Blocks("single_transformer_blocks"))
)

FAMILIES: MappingProxyType[str, DenoiserFamily] = MappingProxyType(
    {
        "AuraFlowTransformer2DModel": DenoiserFamily(
            time_unit=_THOUSAND,
            span=(*_dual("joint_transformer_blocks"), Blocks("single_transformer_blocks")),
        ),
        "ChromaTransformer2DModel": _FLUX_LIKE,
        "Flux2Transformer2DModel": _FLUX_LIKE,
        "FluxTransformer2DModel": _FLUX,
        "HiDreamImageTransformer2DModel": DenoiserFamily(
            time="timesteps",
            negates=True,
            axes={"encoder_hidden_states_llama3": 1},
            span=(
                *_dual("double_stream_blocks", streams=_PICTURE_FIRST),
                Blocks("single_stream_blocks"),
            ),
        ),
        "Lumina2Transformer2DModel": DenoiserFamily(
            time_unit=_THOUSAND, time_flips=True, negates=True, span=(Blocks("layers"),)
        ),
        "OvisImageTransformer2DModel": _FLUX,
        "PixArtTransformer2DModel": DenoiserFamily(halves=True, span=_BLOCKS),
        "QwenImageTransformer2DModel": DenoiserFamily(
            time_unit=_THOUSAND,
            ragged=frozenset({"encoder_hidden_states"}),
            span=_dual("transformer_blocks"),
        ),
        "SD3Transformer2DModel": DenoiserFamily(span=_dual("transformer_blocks")),
        "SanaTransformer2DModel": DenoiserFamily(span=_BLOCKS),
        "UNet2DConditionModel": DenoiserFamily(sample="sample"),
        "WanTransformer3DModel": DenoiserFamily(span=(Blocks("blocks"),), tap="condition_embedder"),
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
    """The family of a model's class. Raises `WeightsError` if it is not known."""
    name = type(module).__name__
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise WeightsError(f"{name} is no denoising model known here; these are: {known}.")
    # Sana's configurations name the unit of time of their training; Sprint takes the scheduler's.
    config = getattr(module, "config", None)
    is_sprint = getattr(config, "guidance_embeds", False)
    own_scale = 1.0 if is_sprint else getattr(config, "timestep_scale", 1.0)
    return replace(FAMILIES[name], time_unit=FAMILIES[name].time_unit / own_scale)


def open_model(module: nn.Module) -> DenoiseModel:
    """A model ready to be asked, in parts where its family allows.

    On a GPU its adaptive norms are replaced by twins of one kernel each.
    """
    family = family_of(module)
    if next(module.parameters()).is_cuda:
        fuse_norms(module)
    return SpanModel(module, family) if family.span else DenoiseModel(module, family)
