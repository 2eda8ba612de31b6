"""Decode steps of models in today's shapes, with random weights, and llama.cpp on the same file.

Writes a GGUF file of about 200 million weights in the shape of a published model, loads it as the
server does, and times decode steps of 1 and 8 rows over 512 tokens of context: ours with the stored
blocks, ours with plain bfloat16, and llama.cpp's. All take turns; figures are medians of turns, and
of the ratios within a turn.

    python samples/benchmarks/shapes.py --llama ~/peers/llama/bin/python
    python samples/benchmarks/shapes.py --shapes gpt-oss --output shapes.json

The peer needs llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from native_step import PAGE_SIZE, PAGES_PER_ROW, elapsed_s, make_step
from quantized import Llama, llama, load

from triptych.core.block_formats import FORMATS
from triptych.core.process.threads import num_usable_cores
from triptych.core.runtime.kernels.native.build import supported_levels
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.tensors.quantize import quantize_blocks
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.progress import SilentProgress

CPU = torch.device("cpu")
ROWS = (1, 8)
VOCABULARY = 32_768
Keys = dict[str, int | float | str]


@dataclass(frozen=True)
class Shape:
    """A GGUF file: its architecture, the keys below it, and its tensors with their types.

    `encoding` is the value of --quantization-encoding that keeps the blocks.
    """

    architecture: str
    keys: Keys
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    encoding: str


def gpt_oss(width: int = 512, num_layers: int = 6, num_experts: int = 32) -> Shape:
    """gpt-oss-20b with a sixth of its width and a quarter of its layers: 32 experts, 4 for a token.

    Types are those of its published file: experts in MXFP4, other matrices in Q8_0.
    """
    heads, kv_heads, size = 16, 2, 64
    keys: Keys = {
        "context_length": 131_072,
        "embedding_length": width,
        "block_count": num_layers,
        "feed_forward_length": width,
        "expert_feed_forward_length": width,
        "expert_count": num_experts,
        "expert_used_count": 4,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 128,
        "rope.freq_base": 150_000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }
    layer = {
        "attn_norm.weight": ("f32", (width,)),
        "attn_q.weight": ("q8_0", (heads * size, width)),
        "attn_q.bias": ("f32", (heads * size,)),
        "attn_k.weight": ("q8_0", (kv_heads * size, width)),
        "attn_k.bias": ("f32", (kv_heads * size,)),
        "attn_v.weight": ("q8_0", (kv_heads * size, width)),
        "attn_v.bias": ("f32", (kv_heads * size,)),
        "attn_output.weight": ("q8_0", (width, heads * size)),
        "attn_output.bias": ("f32", (width,)),
        "attn_sinks.weight": ("f32", (heads,)),
        "post_attention_norm.weight": ("f32", (width,)),
        "ffn_gate_inp.weight": ("f32", (num_experts, width)),
        "ffn_gate_inp.bias": ("f32", (num_experts,)),
    }
    for part in ("gate", "up", "down"):
        layer[f"ffn_{part}_exps.weight"] = ("mxfp4", (num_experts, width, width))
        layer[f"ffn_{part}_exps.bias"] = ("f32", (num_experts, width))
    return Shape("gpt-oss", keys, with_layers(layer, num_layers, width), "mxfp4")


SHAPES: Mapping[str, Callable[[], Shape]] = {"gpt-oss": gpt_oss}


def with_layers(
    layer: Mapping[str, tuple[str, tuple[int, ...]]], num_layers: int, width: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of a model: the layers', the vocabulary's and the last norm."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("q8_0", (VOCABULARY, width)),
        "output.weight": ("q8_0", (VOCABULARY, width)),
        "output_norm.weight": ("f32", (width,)),
    }
    for index in range(num_layers):
        tensors |= {f"blk.{index}.{name}": each for name, each in layer.items()}
    return tensors


def write_shape(shape: Shape, target: Path) -> int:
    """Write the file; returns the number of its weights."""
    writer = GGUFWriter(target, shape.architecture)
    for name, value in shape.keys.items():
        write_key = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        write_key[type(value)](f"{shape.architecture}.{name}", value)
    write_vocabulary(writer)
    generator, total = torch.Generator().manual_seed(0), 0
    for name, (kind, dims) in shape.tensors.items():
        values = torch.randn(dims, generator=generator) * dims[-1] ** -0.5
        values = values + 1 if "norm" in name else values
        total += values.numel()
        if kind == "f32":
            writer.add_tensor(name, values.numpy())
            continue
        blocks = quantize_blocks(values.view(-1, dims[-1]), FORMATS[kind]).blocks_OB
        raw = blocks.view(*dims[:-1], -1).numpy()
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def write_vocabulary(writer: GGUFWriter) -> None:
    """Write a tokenizer of bytes, and of words that no text has."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + n) for n in range(256 - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    merged = letters[0] + letters[1]
    writer.add_token_list([*letters, merged, *(f"<{n}>" for n in range(VOCABULARY - 257))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(VOCABULARY - 1)


def calls_of(
    decoders: Mapping[str, Decoder], peer: Llama | None, num_rows: int, native: NativeKernels
) -> Iterator[tuple[str, Callable[[], float]]]:
    """A step of each, by name."""
    for name, decoder in decoders.items():
        layout = decoder.config.kv_layout(PAGE_SIZE, decoder.dtype)
        kv = KvCache(layout, num_rows * PAGES_PER_ROW, CPU, native, num_slots=num_rows)
        for pages in kv.tensors:
            pages.normal_()
        yield name, partial(elapsed_s, make_step(decoder, kv, num_rows, 1))
    if peer is not None:
        yield "llama_cpp", partial(peer.step_s, num_rows)


def measure(
    shape: Shape, args: argparse.Namespace, native: NativeKernels, scratch: Path
) -> dict[str, Any]:
    """All figures of one shape."""
    file, folder = scratch / f"{shape.architecture}.gguf", scratch / shape.architecture
    folder.mkdir()
    figures: dict[str, Any] = {"weights": write_shape(shape, file)}
    figures["file_bytes"] = file.stat().st_size
    convert_gguf(file, folder, SilentProgress())
    decoders = {
        name: load(folder, encoding, torch.bfloat16, native)
        for name, encoding in (("own", shape.encoding), ("bfloat16", "bfloat16"))
    }
    with llama(args.llama, file, "perf_counter") as peer, torch.inference_mode():
        for num_rows in ROWS:
            calls = dict(calls_of(decoders, peer, num_rows, native))
            turns = [[call() for call in calls.values()] for _ in range(args.turns + 2)][2:]
            seconds = np.array(turns)
            ratios = np.median(seconds / seconds[:, :1], axis=0)
            medians = np.median(seconds, axis=0)
            figures[f"{num_rows} rows"] = {
                name: {"ms": round(1e3 * s, 3), "ratio": round(ratio, 3)}
                for name, s, ratio in zip(calls, medians.tolist(), ratios.tolist(), strict=True)
            }
            print(
                f"{shape.architecture}, {num_rows} rows: {figures[f'{num_rows} rows']}", flush=True
            )
    return figures


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--isa", choices=supported_levels(), default=supported_levels()[0])
    parser.add_argument("--llama", default="", help="a Python that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        native = NativeKernels.open("native", Path(scratch, "kernels"), args.isa)
        assert native is not None
        figures = {
            name: measure(SHAPES[name](), args, native, Path(scratch)) for name in args.shapes
        }
    if args.output:
        args.output.write_text(json.dumps({"isa": args.isa, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
