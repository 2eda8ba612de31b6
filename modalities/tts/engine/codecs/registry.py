"""Which family decodes which model class."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from triptych.core.errors import WeightsError
from triptych.modalities.tts.engine.codecs.decoder import Adapter, StreamingDecoder
from triptych.modalities.tts.engine.codecs.families.dac import dac, xcodec
from triptych.modalities.tts.engine.codecs.families.seanet import encodec, mimi
from triptych.modalities.tts.engine.codecs.families.snac import snac

# By name: transformers' files are large, and not every release has every class.
_FAMILIES: MappingProxyType[str, Callable[[Any], Adapter]] = MappingProxyType(
    {
        "DacModel": dac,
        "EncodecModel": encodec,
        "HiggsAudioV2TokenizerModel": xcodec,
        "MimiModel": mimi,
        "Snac": snac,
        "XcodecModel": xcodec,
    }
)


def adapter_for(model: nn.Module) -> Adapter:
    """The adapter of a model's family. Raises `WeightsError` if no family claims its class."""
    name = type(model).__name__
    if name not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise WeightsError(f"No streaming decoder for {name}; there are ones for {known}.")
    return _FAMILIES[name](model)


def build_decoder(model: nn.Module, *, num_rows: int, verify: bool = True) -> StreamingDecoder:
    """A streaming decoder of `num_rows` rows over a codec model, where it is, sharing its weights.

    The model is put in eval mode, and its weight norms are folded into plain weights. Raises
    `WeightsError`, naming the module, where the model cannot stream, or if a probe decoded in
    chunks differs from the model's own decoding.
    """
    fold_weight_norms(model.eval())
    return StreamingDecoder(adapter_for(model), num_rows=num_rows, verify=verify)


def fold_weight_norms(model: nn.Module) -> None:
    """Replace each parametrised weight, computed anew at every use, by its value."""
    for module in [m for m in model.modules() if parametrize.is_parametrized(m)]:
        names = module.parametrizations
        assert isinstance(names, nn.ModuleDict)
        for name in tuple(names):
            parametrize.remove_parametrizations(module, name)
