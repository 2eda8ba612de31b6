"""The places of a checkpoint's tensors around the residual streams of Gemma 3n and 4.

Owns the names of layers' own inputs and of alternating updates. Knows no file.
"""

from __future__ import annotations

from collections.abc import Iterator

from triptych.core.runtime.decoders.projection_targets import (
    ProjectionTarget,
    fused_targets,
    norm_targets,
)
from triptych.core.runtime.layers.altup import AltUp, Streams
from triptych.core.runtime.layers.altup_layer import AltUpLayer
from triptych.core.runtime.layers.decoder import DecoderStack
from triptych.core.runtime.layers.decoder_layer import DecoderLayer
from triptych.core.runtime.layers.layer_inputs import InputGate, LayerInputs
from triptych.core.runtime.layers.shards import Shard
from triptych.core.runtime.tensors.loading import Target, TensorTarget
from triptych.core.weights.encoding import WeightEncoding


def stream_targets(prefix: str, stack: DecoderStack, encoding: WeightEncoding) -> Iterator[Target]:
    """The destinations of all layers' inputs and streams, with `prefix` before the names."""
    if stack.layer_inputs is not None:
        yield from _layer_input_targets(prefix, stack.layer_inputs, encoding)
    if stack.streams is not None:
        yield from _altup_stack_targets(prefix.rstrip("."), stack.streams, encoding)


def layer_stream_targets(
    name: str, layer: DecoderLayer, encoding: WeightEncoding
) -> Iterator[Target]:
    """The destinations of the layer `name`'s input, of its scale and of its maps of streams."""
    if layer.input_gate is not None:
        yield from _input_gate_targets(name, layer.input_gate, encoding)
    if layer.scale_1 is not None:
        yield TensorTarget(f"{name}.layer_scalar", layer.scale_1)
    if isinstance(layer, AltUpLayer):
        yield from _altup_targets(name, layer.altup, encoding)


def _layer_input_targets(
    prefix: str, inputs: LayerInputs, encoding: WeightEncoding
) -> Iterator[Target]:
    whole = Shard.whole(inputs.table.num_outputs)
    table = f"{prefix}embed_tokens_per_layer.weight"
    yield ProjectionTarget(table, inputs.table, 0, whole, encoding, is_vocabulary=True)
    rows = [("per_layer_model_projection", Shard.whole(inputs.projection.num_outputs))]
    yield from fused_targets(prefix.rstrip("."), inputs.projection, rows, encoding)
    yield from norm_targets(f"{prefix}per_layer_projection_norm", inputs.norm)


def _input_gate_targets(name: str, gate: InputGate, encoding: WeightEncoding) -> Iterator[Target]:
    rows = [("per_layer_input_gate", Shard.whole(gate.gate.num_outputs))]
    yield from fused_targets(name, gate.gate, rows, encoding)
    rows = [("per_layer_projection", Shard.whole(gate.projection.num_outputs))]
    yield from fused_targets(name, gate.projection, rows, encoding)
    yield from norm_targets(f"{name}.post_per_layer_input_norm", gate.norm)


def _altup_stack_targets(body: str, streams: Streams, encoding: WeightEncoding) -> Iterator[Target]:
    whole = Shard.whole(streams.config.hidden_size)
    rows = [(f"altup_projections.{number}", whole) for number in range(len(streams.gather))]
    yield from fused_targets(body, streams.spread, rows, encoding)
    for number, linear in enumerate(streams.gather):
        name = f"altup_unembed_projections.{number}"
        yield from fused_targets(body, linear, [(name, whole)], encoding)


def _altup_targets(layer: str, altup: AltUp, encoding: WeightEncoding) -> Iterator[Target]:
    yield from norm_targets(f"{layer}.altup.router_norm", altup.router_norm)
    tensors = {
        "modality_router.weight": altup.router_NC,
        "prediction_coefs.weight": altup.predict_SN,
        "correction_coefs.weight": altup.correct_NN,
        "correct_output_scale": altup.scale_C,
    }
    for name, tensor in tensors.items():
        yield TensorTarget(f"{layer}.altup.{name}", tensor)
    laurel = altup.laurel
    for name, linear in (("linear_left", laurel.left), ("linear_right", laurel.right)):
        rows = [(name, Shard.whole(linear.num_outputs))]
        yield from fused_targets(f"{layer}.laurel", linear, rows, encoding)
    yield from norm_targets(f"{layer}.laurel.post_laurel_norm", laurel.norm)
