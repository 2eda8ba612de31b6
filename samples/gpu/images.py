"""One FLUX.1 transformer at 1024 x 1024, computed in several ways, on weights made on the device.

Products in bfloat16 and float8, the autoencoder in both memory formats, then blocks and the whole
denoise step: as diffusers has them, compiled block by block, and fused. Distances of blocks are
from float32, those of steps from diffusers' own.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import diffusers
import torch
from image_figures import AUTOENCODER, TINY_AUTOENCODER, TINY_TRANSFORMER, TRANSFORMER, randomized
from place import Place, Record, attempt, record
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from triptych.core.block_formats import FLOAT8_ROWS
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.runtime.layers.attention_order import CUDNN_FIRST, TORCHS_OWN, attention_order
from triptych.core.runtime.layers.block_layers import BlockDevice, block_places
from triptych.core.runtime.tensors.quantize import quantize_float8
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.diffusion.engine.families.fused_blocks import fuse_blocks, gelu_linear
from triptych.modalities.diffusion.engine.families.fused_norms import fuse_norms
from triptych.modalities.diffusion.engine.families.model import Batch, Conditioning, DenoiseModel
from triptych.modalities.diffusion.engine.families.table import family_of, open_model

LEAST_TO_COMPILE_S = 20
GRAPH_BYTES = 16 * 2**30

Call = Callable[[], Any]


def run(place: Place) -> Iterator[Record]:
    """Parts of the model, then the transformer."""
    with torch.inference_mode():
        shape = Shape.of(place)
        yield from products(place, shape)
        yield from decoders(place)
        yield from transformers(place, shape)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the transformer, and the numbers of tokens of an image and its prompt."""

    fields: dict[str, Any]
    num_image: int
    num_text: int

    @classmethod
    def of(cls, place: Place) -> Shape:
        """FLUX.1's for an image of 1024 x 1024; small ones for a rehearsal."""
        return cls(TINY_TRANSFORMER, 64, 16) if place.is_tiny else cls(TRANSFORMER, 4096, 512)

    @property
    def num_tokens(self) -> int:
        """The tokens of one run."""
        return self.num_image + self.num_text

    @property
    def num_heads(self) -> int:
        """The heads of attention."""
        return int(self.fields["num_attention_heads"])

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return int(self.fields["attention_head_dim"])

    @property
    def width(self) -> int:
        """The width of hidden states."""
        return self.num_heads * self.head_dim


# ---- parts ---------------------------------------------------------------------------------------


def products(place: Place, shape: Shape) -> Iterator[Record]:
    """The linear layers of a single block, by themselves and with what is fused into them."""
    width = shape.width
    for num_outputs, num_inputs in ((3 * width, width), (4 * width, width), (width, 5 * width)):
        layer = randomized_linear(place, num_inputs, num_outputs)
        x = random(place, 1, shape.num_tokens, num_inputs)
        ways: dict[str, Call] = {"bfloat16": partial(layer, x)}
        if num_outputs == 3 * width:
            ways["bfloat16, three of a third"] = partial(in_parts, layer, x)
        if num_outputs == 4 * width:
            ways["bfloat16, then gelu"] = lambda x=x, layer=layer: gelu(
                layer(x), approximate="tanh"
            )
            ways["bfloat16 with gelu"] = partial(gelu_linear, layer, x)
        if place.is_gpu:
            ways |= float8_ways(layer, x)
        num_products = 2 * x.shape[1] * num_inputs * num_outputs
        for name, way in ways.items():
            yield attempt(
                f"product {num_inputs} x {num_outputs}, {name}",
                partial(product_figures, place, way, num_products),
            )


def product_figures(place: Place, way: Call, num_products: int) -> dict[str, float]:
    """The time of a product and its rate."""
    seconds = place.device_s(way)
    return {"ms": 1e3 * seconds, "tflops": num_products / seconds / 1e12}


def in_parts(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    """The product as three of a third of the outputs."""
    assert layer.bias is not None
    parts = zip(layer.weight.chunk(3), layer.bias.chunk(3), strict=True)
    return [linear(x, weight, bias) for weight, bias in parts]


def float8_ways(layer: nn.Linear, x: Tensor) -> dict[str, Call]:
    """The product in float8 with scales of rows, alone and with the quantization of its input."""
    from triptych.core.runtime.kernels.triton.fp8_linear import quantize_rows

    weight = quantize_float8(layer.weight)
    x_TI = x.flatten(0, 1)

    def multiply(quantized_TI: Tensor, scale_RT: Tensor, is_fast: bool) -> Tensor:
        return torch._scaled_mm(
            quantized_TI,
            weight.weight_OI.t(),
            scale_a=scale_RT.t(),
            scale_b=weight.scale[None],
            bias=layer.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=is_fast,
        )

    quantize = partial(quantize_rows, x_TI, x_TI.shape[1])
    quantized_TI, scale_RT = quantize()
    return {
        "float8": partial(multiply, quantized_TI, scale_RT, False),
        "float8, fast sums": partial(multiply, quantized_TI, scale_RT, True),
        "float8, fast sums, quantized": lambda: multiply(*quantize(), True),
    }


def decoders(place: Place) -> Iterator[Record]:
    """Decode one image by the autoencoder in both memory formats, cuDNN's search off and on."""
    side = 8 if place.is_tiny else 128
    fields = TINY_AUTOENCODER if place.is_tiny else AUTOENCODER
    vae = randomized(diffusers.AutoencoderKL, fields, place.device)
    latents = random(place, 1, 16, side, side)
    expected = vae.decode(latents, return_dict=False)[0]

    def figures() -> dict[str, float]:
        seconds = place.device_s(partial(vae.decode, latents, return_dict=False), 3)
        if place.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        found = vae.decode(latents, return_dict=False)[0]
        peak_bytes = torch.cuda.max_memory_allocated() if place.is_gpu else 0
        distance = relative(found, expected)
        return {"ms": 1e3 * seconds, "distance": distance, "peak_bytes": peak_bytes}

    for memory_format in (torch.contiguous_format, torch.channels_last):
        vae.to(memory_format=memory_format)
        for searches in (False, True):
            with torch.backends.cudnn.flags(enabled=True, benchmark=searches):
                yield attempt(f"decode, {memory_format}, search {searches}", figures)


# ---- transformer ---------------------------------------------------------------------------------


def transformers(place: Place, shape: Shape) -> Iterator[Record]:
    """The transformer as diffusers has it, fused, and compiled, in both orders of attention."""
    theirs: Any = randomized(diffusers.FluxTransformer2DModel, shape.fields, place.device)
    ours = copy.deepcopy(theirs, {id(each): each for each in theirs.parameters()})
    batch = random_batch(place, shape)
    arguments = DenoiseModel(theirs, family_of(theirs)).arguments(batch)
    step = partial(theirs, **arguments)
    inputs = random_inputs(place, shape, theirs)
    measured = Measured(place, inputs, exact_blocks(theirs, inputs), step()[0])
    for order, attending in orders(place):
        with attending():
            yield from measured.way(f"diffusers, {order}", theirs, step)
    model = open_model(ours)
    fuse_norms(ours)  # where there is no GPU, these are not fused yet
    fuse_blocks(ours)
    for order, attending in orders(place):
        with attending():
            yield from measured.way(f"fused, {order}", ours, partial(ours, **arguments))
    if place.is_gpu:
        graphs = CapturedSteps("flux", place.device, budget_bytes=GRAPH_BYTES)
        model.graphs = graphs
        yield measured.step("fused, captured", lambda: [model.velocity(batch)])
        yield record("captured", num_captured=graphs.num_captured, num_bytes=graphs.num_bytes)
        model.graphs = None
        halved = in_float8(theirs, place)
        with attention_order(place.device, CUDNN_FIRST):
            yield from measured.way(
                "fused, float8, cuDNN first", halved, partial(halved, **arguments)
            )
        del halved
    yield from compiled(place, measured, theirs, step)


def in_float8(module: Any, place: Place) -> Any:
    """The transformer fused, with the weights of its blocks in float8."""
    made = copy.deepcopy(module, {id(each): each for each in module.parameters()})
    where = BlockDevice(device=place.device, dtype=torch.bfloat16)
    for found in block_places(made, WeightEncoding(FLOAT8_ROWS.name)):
        found.put(quantize_float8(found.layer.weight), where)
    open_model(made)
    return made


def compiled(place: Place, measured: Measured, theirs: Any, step: Call) -> Iterator[Record]:
    """Diffusers' blocks compiled one by one; attention's order is fixed when they are."""
    for order, attending in orders(place):
        if place.is_gpu and place.left_s < LEAST_TO_COMPILE_S:
            yield record(f"compiled, {order}", f"{place.left_s:.0f} s are left: too few")
            return
        torch._dynamo.reset()
        started_s = time.perf_counter()
        with attending():
            # A rehearsal does without a compiler, which takes minutes on a small machine.
            theirs.compile_repeated_blocks(
                fullgraph=True, backend="inductor" if place.is_gpu else "eager"
            )
            step()
            place.wait()
            yield record(f"compile, {order}", seconds=time.perf_counter() - started_s)
            yield from measured.way(f"compiled, {order}", theirs, step)


def orders(place: Place) -> list[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    """The orders of attention kernels."""
    named = {"torch's order": TORCHS_OWN, "cuDNN first": CUDNN_FIRST}
    return [(name, partial(attention_order, place.device, each)) for name, each in named.items()]


@dataclass(frozen=True, slots=True)
class Measured:
    """Inputs of a double and a single block, their outputs in float32, and a step's output."""

    place: Place
    inputs: dict[str, Any]
    exact: list[Tensor]
    expected: Tensor

    def way(self, name: str, module: Any, step: Call) -> Iterator[Record]:
        """Both blocks, and the step."""
        lists = module.transformer_blocks, module.single_transformer_blocks
        for kind, blocks, exact in zip(("double", "single"), lists, self.exact, strict=True):
            yield attempt(f"{kind} block, {name}", partial(self._block, blocks[0], exact))
        yield self.step(name, step)

    def step(self, name: str, step: Call) -> Record:
        """A denoise step."""

        def figures() -> dict[str, float]:
            found = step()[0]
            seconds = self.place.device_s(step, 5)
            wall_s = self.place.wall_s(step, 3)
            distance = relative(found, self.expected)
            return {"ms": 1e3 * seconds, "wall_ms": 1e3 * wall_s, "distance": distance}

        return attempt(f"step, {name}", figures)

    def _block(self, block: Any, exact: Tensor) -> dict[str, float]:
        run = partial(block, **self.inputs)
        distance = relative(run()[1], exact)
        return {"ms": 1e3 * self.place.device_s(run, 10), "distance": distance}


def exact_blocks(module: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The image tokens after the first double block and the first single block, in float32."""
    wide = {
        name: value if isinstance(value, tuple) else value.float() for name, value in inputs.items()
    }
    firsts = module.transformer_blocks[0], module.single_transformer_blocks[0]
    return [copy.deepcopy(block).float()(**wide)[1] for block in firsts]


def random_inputs(place: Place, shape: Shape, module: Any) -> dict[str, Any]:
    """The arguments of a block."""
    text_ids, image_ids = position_ids(place, shape)
    return {
        "hidden_states": random(place, 1, shape.num_image, shape.width),
        "encoder_hidden_states": random(place, 1, shape.num_text, shape.width),
        "temb": random(place, 1, shape.width),
        "image_rotary_emb": module.pos_embed(torch.cat([text_ids, image_ids])),
    }


def random_batch(place: Place, shape: Shape) -> Batch:
    """A step of one image."""
    text_ids, image_ids = position_ids(place, shape)
    rows = {
        "encoder_hidden_states": random(place, shape.num_text, shape.fields["joint_attention_dim"]),
        "pooled_projections": random(place, shape.fields["pooled_projection_dim"]),
        "guidance": torch.full((), 3.5, device=place.device),
    }
    conditioning = Conditioning(rows=rows, shared={"txt_ids": text_ids, "img_ids": image_ids})
    return Batch(
        samples=random(place, 1, shape.num_image, shape.fields["in_channels"]).float(),
        times=torch.full((1,), 500.0, device=place.device),
        conditioning=[conditioning],
    )


def position_ids(place: Place, shape: Shape) -> tuple[Tensor, Tensor]:
    """The positions of a prompt's tokens, all 0, and of a square image's."""
    side = math.isqrt(shape.num_image)
    places = torch.arange(side, device=place.device, dtype=torch.float32)
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    image_ids = torch.stack([torch.zeros_like(rows), rows, columns], 2).flatten(0, 1)
    return image_ids.new_zeros(shape.num_text, 3), image_ids


# ---- tensors -------------------------------------------------------------------------------------


def random(place: Place, *sizes: int) -> Tensor:
    """Normal values in bfloat16."""
    return torch.randn(*sizes, device=place.device).bfloat16()


def randomized_linear(place: Place, num_inputs: int, num_outputs: int) -> nn.Linear:
    """A layer with weights of a usual size."""
    layer = nn.Linear(num_inputs, num_outputs, device=place.device, dtype=torch.bfloat16)
    nn.init.normal_(layer.weight, std=num_inputs**-0.5)
    return layer.requires_grad_(False)


def relative(found: Tensor, expected: Tensor) -> float:
    """The size of the difference by that of what is expected."""
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference)
