"""Decode steps whose keys an index chooses, against full attention, on the CPU kernels.

Times a small GLM-5 with random weights (1,024 features, 16 heads, 4 layers without experts): one
step of a row over long contexts, with an index that chooses 2,048 keys, with layers that share its
choice, and without an index. All take turns; a ratio is the median of the ratios within a turn.

    python samples/benchmarks/key_index.py
    python samples/benchmarks/key_index.py --rows 4 --contexts 8192
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import numpy as np
import torch
from native_step import CPU, PAGE_SIZE, make_step, pages_of_row, take_turns

from triptych.core.process.threads import num_usable_cores
from triptych.core.runtime.decoders.tensor_names import decoder_targets
from triptych.core.runtime.kernels.native.build import supported_levels
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.key_index import KeyIndexConfig
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.rotary import RopeConfig

MAX_LENGTH, NUM_LAYERS = 65_536, 4
FULL = LatentConfig(
    hidden_size=1024,
    num_heads=16,
    nope_dim=192,
    rope_dim=64,
    value_dim=256,
    kv_rank=512,
    q_rank=512,
    scale=256**-0.5,
)
INDEXED = replace(FULL, index=KeyIndexConfig(num_heads=32, head_dim=128, num_chosen=2048))
KINDS = {
    "index in every layer": (INDEXED,) * NUM_LAYERS,
    "index in one of four": (INDEXED, *(FULL,) * (NUM_LAYERS - 1)),
    "no index": (FULL,) * NUM_LAYERS,
}


def make_decoder(layers: tuple[LatentConfig, ...], native: NativeKernels) -> Decoder:
    """A decoder with random weights, ready to run."""
    config = DecoderConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        norm_eps=1e-5,
        attention=layers,
        rope=RopeConfig(num_rotated_dims=64, max_length=MAX_LENGTH, trained_length=MAX_LENGTH),
    )
    decoder = Decoder(config, dtype=torch.bfloat16, device=CPU)
    for target in decoder_targets(decoder):
        target.into.normal_(std=0.05)
    decoder.prepare(native)
    return decoder


def measure(contexts: list[int], num_rows: int, num_turns: int, native: NativeKernels) -> None:
    """Print the medians of all kinds, for each context."""
    decoders = {name: make_decoder(layers, native) for name, layers in KINDS.items()}
    for context in contexts:
        steps = []
        for decoder in decoders.values():
            layout = decoder.config.kv_layout(PAGE_SIZE, torch.bfloat16)
            kv = KvCache(layout, num_rows * pages_of_row(context), CPU, native)
            for pages in kv.tensors:
                pages.normal_()
            steps.append(make_step(decoder, kv, num_rows, 1, context))
        with torch.inference_mode():
            seconds = take_turns(steps, num_turns)
        ratios = np.median(seconds[:, -1:] / seconds, axis=0)
        print(f"\n{num_rows} rows of {context:,} tokens, {torch.get_num_threads()} threads")
        for name, step_s, ratio in zip(KINDS, np.median(seconds, axis=0), ratios, strict=True):
            print(f"  {name:<22} {1e3 * step_s:8.2f} ms   {ratio:5.2f} times as fast as without")


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", choices=supported_levels(), default=supported_levels()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--turns", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        native = NativeKernels.open("native", Path(folder), args.isa)
        assert native is not None
        measure(args.contexts, args.rows, args.turns, native)


if __name__ == "__main__":
    main()
