"""Converts a decoder's module tree to its streaming twin.

Owns the walk: containers are entered, layers with state are replaced, pointwise layers stay, and
anything else is an error that names the module. A composite class is converted by its family's
rule, named after the class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from triptych.core.errors import WeightsError
from triptych.modalities.tts.engine.codecs.layers import (
    StreamingConv1d,
    StreamingConvTranspose1d,
    StreamingLSTM,
)
from triptych.modalities.tts.engine.codecs.stages import (
    Chain,
    Padding,
    Pointwise,
    StreamingStage,
    Unstreamable,
)

# Elementwise, or by channel with channels first.
_POINTWISE = (nn.ELU, nn.GELU, nn.Identity, nn.LeakyReLU, nn.ReLU, nn.SiLU, nn.Tanh)
_PADDINGS = MappingProxyType(
    {
        "zeros": Padding.ZEROS,
        "zero": Padding.ZEROS,
        "constant": Padding.ZEROS,
        "replicate": Padding.REPLICATE,
        "reflect": Padding.REFLECT,
    }
)


class Walk:
    """One module of the tree, its path, and the rules that apply."""

    def __init__(self, module: nn.Module, rules: Rules, path: str) -> None:
        self.module, self._rules, self.path = module, rules, path

    def at(self, path: str) -> Walk:
        """The descendant at a dotted path."""
        return Walk(self.module.get_submodule(path), self._rules, f"{self.path}.{path}")

    def stage(self) -> StreamingStage:
        """The streaming twin of this module. Raises `WeightsError` if it has none."""
        module = self.module
        try:
            if (rule := self._rules.get(type(module).__name__)) is not None:
                return rule(self)
            if isinstance(module, nn.ModuleList | nn.Sequential):
                return self.chain(*[str(index) for index in range(len(module))])
            if is_pointwise(module):
                return Pointwise(module)
            return streaming_layer(module)
        except Unstreamable as reason:
            raise WeightsError(f"{self.path} ({type(module).__name__}): {reason}") from None

    def chain(self, *paths: str) -> Chain:
        """The descendants at these paths, in sequence."""
        return Chain(*[self.at(path).stage() for path in paths])


Rule = Callable[[Walk], StreamingStage]
Rules = Mapping[str, Rule]


def build(module: nn.Module, rules: Rules, *, path: str) -> StreamingStage:
    """The streaming twin of `module`; errors call it `path`."""
    return Walk(module, rules, path).stage()


def is_pointwise(module: nn.Module) -> bool:
    """Whether each output step depends on the same input step alone, channels first."""
    return isinstance(module, _POINTWISE) or type(module).__name__.endswith("Snake1d")


def streaming_layer(module: nn.Module) -> StreamingStage:
    """The twin of a single torch layer, with its own padding."""
    if isinstance(module, nn.Conv1d):
        return StreamingConv1d(module, conv_pads(module), padding_named(module.padding_mode))
    if isinstance(module, nn.ConvTranspose1d):
        return StreamingConvTranspose1d(module)
    if isinstance(module, nn.LSTM):
        return StreamingLSTM(module)
    if isinstance(module, nn.GroupNorm | nn.InstanceNorm1d):
        raise Unstreamable("normalizes over the whole utterance.")
    raise Unstreamable("has no known streaming twin; add a rule to its family.")


def conv_pads(conv: nn.Conv1d) -> tuple[int, int]:
    """Padding of a `Conv1d` on the left and right, in steps."""
    span = (conv.kernel_size[0] - 1) * conv.dilation[0]
    if isinstance(conv.padding, str):
        return (span // 2, span - span // 2) if conv.padding == "same" else (0, 0)
    return conv.padding[0], conv.padding[0]


def padding_named(mode: str) -> Padding:
    """The padding rule with a library's name `mode`."""
    if mode not in _PADDINGS:
        raise Unstreamable(f"{mode} padding needs the stream's end at its start.")
    return _PADDINGS[mode]


def require_pointwise(walk: Walk) -> None:
    """Require that every leaf below maps each step's channels separately."""
    for path, module in walk.module.named_modules():
        is_leaf = not any(True for _ in module.children())
        if is_leaf and not (is_pointwise(module) or _is_channel_map(module)):
            name = type(module).__name__
            raise WeightsError(f"{walk.path}.{path} ({name}): not known to be pointwise in time.")


def _is_channel_map(module: nn.Module) -> bool:
    """Linear layers, norms and activations with channels last, in transformers' naming."""
    if isinstance(module, nn.Linear | nn.LayerNorm | nn.Dropout):
        return True
    name, home = type(module).__name__, type(module).__module__
    return name.endswith(("LayerScale", "RotaryEmbedding")) or home == "transformers.activations"
