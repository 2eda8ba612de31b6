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
from functools import partial
from pathlib import Path
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import numpy as np
import torch
from native_step import PAGE_SIZE, PAGES_PER_ROW, elapsed_s, make_step
from quantized import Llama, llama, load
from shape_files import SHAPES, Shape, write_shape

from triptych.core.process.threads import num_usable_cores
from triptych.core.runtime.kernels.native.build import supported_levels
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.progress import SilentProgress

CPU = torch.device("cpu")
ROWS = (1, 8)


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
