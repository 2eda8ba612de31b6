"""Weights in blocks of integers: memory, closeness and decode speed, with bfloat16 and llama.cpp.

Writes SmolLM2-135M as GGUF files of the given types, from the embedded model's, and measures for
each: loaded memory and the file's size; logits and perplexity compared with the same file unpacked
to float32, and the distance of these from the given model's: the format's own error; decode steps
of 1, 8 and 32 rows over 512 tokens of context, in turns with our bfloat16 decoder and, given a
Python that has llama-cpp-python, with llama.cpp on the same file. Figures are medians of turns, and
of the ratios within a turn.

    python samples/benchmarks/quantized.py MODEL.gguf --kinds q8_0 q4_0
    python samples/benchmarks/quantized.py MODEL.gguf --llama ~/peers/llama/bin/python
    python samples/benchmarks/quantized.py MODEL.gguf --turns 0 --windows windows.jsonl

`--windows` is a file for the results of each window of text: an interrupted run continues from
there.

On a shared machine, `--cpu-time` with one thread counts processor seconds, which exclude
waiting.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from native_step import CONTEXT, PAGE_SIZE, PAGES_PER_ROW, make_step
from tokenizers import Tokenizer

from triptych.core.process.threads import num_usable_cores
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.kernels.native.build import supported_levels
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.layers.attention import KvCache, PagedStep
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.quantize import quantize_blocks
from triptych.core.weights.encoding import WeightEncoding
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.progress import SilentProgress

CPU = torch.device("cpu")
ROWS = (1, 8, 32)
WINDOW = 512
Figures = dict[str, float]


def write_as(kind: str, source: Path, target: Path) -> None:
    """The GGUF file `source` with its matrices in blocks of `kind`, or in its fallback format."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = entry.types[-1] if len(entry.types) > 1 else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type)
    encoding = WeightEncoding(kind)
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        is_vocabulary = tensor.name.startswith(("token_embd", "output."))
        form = (
            encoding.format_of(tensor.name, values.shape[-1], is_vocabulary=is_vocabulary)
            if values.dim() == 2
            else None
        )
        if form is None:
            writer.add_tensor(tensor.name, values.numpy())
            continue
        raw_dtype = GGMLQuantizationType[form.name.upper()]
        writer.add_tensor(
            tensor.name, quantize_blocks(values, form).blocks_OB.numpy(), raw_dtype=raw_dtype
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(folder: Path, encoding: str, dtype: torch.dtype, native: NativeKernels | None) -> Decoder:
    """The decoder in a converted folder."""
    with Checkpoint.open(folder) as checkpoint:
        blueprint = NativeBlueprint(
            checkpoint.config,
            max_length=2 * CONTEXT,
            dtype=dtype,
            device=CPU,
            native=native,
            encoding=WeightEncoding.of(encoding, checkpoint.tensors),
        )
        return blueprint.build(checkpoint, lambda _: None)


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of the projections and norms of a decoder."""
    linears = [decoder.head]
    norms = [decoder.norm]
    for layer in decoder.layers:
        linears += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
        norms += [layer.input_norm, layer.mlp_norm]
    packed = sum(linear.native.num_bytes for linear in linears if linear.native is not None)
    return packed + sum(norm.weight_C.nbytes for norm in norms)


def read_text(folder: Path, num_tokens: int) -> torch.Tensor:
    """Tokens of Python's help texts, in windows, `[num_windows, WINDOW]`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics))).ids
    num_windows = min(num_tokens, len(ids)) // WINDOW
    return torch.tensor(ids[: num_windows * WINDOW]).view(num_windows, WINDOW)


def score(
    decoder: Decoder,
    ids_T: torch.Tensor,
    native: NativeKernels | None,
    cache: torch.dtype | None = None,
) -> torch.Tensor:
    """Logits of a window, computed as one prompt; keys and values of the decoder's type or another.

    A prompt reads its keys back from the pages.
    """
    layout = decoder.config.kv_layout(PAGE_SIZE, cache or decoder.dtype)
    kv = KvCache(layout, PAGES_PER_ROW, CPU, native)
    length, positions_T = np.array([len(ids_T)]), torch.arange(len(ids_T))
    batch = AttentionBatch(
        page_table_BM=torch.arange(PAGES_PER_ROW).view(1, -1),
        context_lengths_B=torch.from_numpy(length),
        query_starts_B=torch.zeros(1, dtype=torch.int64),
        write_slots_T=positions_T,
        num_decode_rows=0,
        host_query_lengths_B=length,
        host_context_lengths_B=length,
        native=kv.native,
    )
    with torch.inference_mode():
        return decoder.logits(decoder.forward(ids_T, positions_T, PagedStep(kv, batch)))


COMPUTED_IN = ("float32", "bfloat16")


def closeness(decoders: dict[str, Decoder], ids_T: torch.Tensor, native: NativeKernels) -> Figures:
    """Of one window: mean negative log-likelihoods, and squares of logits' differences.

    `error_*` is the error of our kernels against the reference, the file computed in float32;
    `format_error` is the reference's own distance from the original weights.
    """
    logits = {name: score(decoder, ids_T, native) for name, decoder in decoders.items()}
    found = {
        f"loss_{name}": torch.nn.functional.cross_entropy(values_TV[:-1], ids_T[1:]).item()
        for name, values_TV in logits.items()
    }
    reference_TV = logits["reference"]
    for dtype in COMPUTED_IN:
        found[f"error_{dtype}"] = (logits[dtype] - reference_TV).square().sum().item()
    found["format_error"] = (reference_TV - logits["original"]).square().sum().item()
    found["size"] = (reference_TV - reference_TV.mean(-1, keepdim=True)).square().sum().item()
    return found


def compare(
    folder: Path, original: Path, kind: str, args: argparse.Namespace, native: NativeKernels
) -> Figures:
    """Perplexities, and errors of logits relative to the reference's."""
    decoders = {
        dtype: load(folder, kind, getattr(torch, dtype), native) for dtype in COMPUTED_IN
    } | {
        "reference": load(folder, "float32", torch.float32, native),
        "original": load(original, "float32", torch.float32, native),
    }
    text, windows = read_text(folder, args.tokens), read_windows(args.windows, kind)
    for index, ids_T in enumerate(text):
        if index in windows:
            continue
        windows[index] = closeness(decoders, ids_T, native)
        if args.windows:
            with args.windows.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "window": index, **windows[index]}) + "\n")
        print(f"  {kind}: {len(windows)} of {len(text)} windows", end="\r", flush=True)
    sums = {name: sum(windows[index][name] for index in range(len(text))) for name in windows[0]}
    found = {"tokens": float(text.numel())}
    for name, total in sums.items():
        if name.startswith("loss_"):
            found[name.replace("loss", "perplexity")] = math.exp(total / len(text))
        elif "error" in name:
            found[name] = math.sqrt(total / sums["size"])
    return found


def read_windows(file: Path | None, kind: str) -> dict[int, Figures]:
    """The results of an earlier run, by window."""
    if file is None or not file.is_file():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {line.pop("window"): line for line in lines if line.pop("kind") == kind}


class Llama:
    """llama.cpp in a child process."""

    def __init__(self, python: str, model: Path, clock: str) -> None:
        command = [python, str(Path(__file__).with_name("llama_steps.py")), str(model)]
        command += [str(torch.get_num_threads()), str(CONTEXT), str(max(ROWS)), clock]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready"

    def step_s(self, num_rows: int) -> float:
        """Seconds of a decode step."""
        assert self._child.stdin is not None
        print(num_rows, 1, file=self._child.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()


@contextmanager
def llama(python: str, model: Path, clock: str) -> Iterator[Llama | None]:
    """The peer, if there is one."""
    if not python:
        yield None
        return
    peer = Llama(python, model, clock)
    try:
        yield peer
    finally:
        peer.close()


def time_steps(
    decoders: Sequence[Decoder],
    peer: Llama | None,
    native: NativeKernels,
    args: argparse.Namespace,
) -> dict[int, Any]:
    """Seconds of decode steps by number of rows, `[turns, decoders and peer]`; all take turns."""
    found, clock = {}, getattr(time, args.clock)

    def elapsed_s(step: Callable[[], object]) -> float:
        started_s = clock()
        step()
        return float(clock() - started_s)

    for num_rows in ROWS:
        calls = []
        for decoder in decoders:
            layout = decoder.config.kv_layout(PAGE_SIZE, decoder.dtype)
            kv = KvCache(layout, num_rows * PAGES_PER_ROW, CPU, native)
            for pages in kv.tensors:
                pages.normal_()
            calls.append(partial(elapsed_s, make_step(decoder, kv, num_rows, 1)))
        if peer is not None:
            calls.append(partial(peer.step_s, num_rows))
        with torch.inference_mode():
            turns = [[call() for call in calls] for _ in range(args.turns + 2)]
        found[num_rows] = np.array(turns[2:])
    return found


def report(kind: str, steps: dict[int, Any]) -> dict[str, dict[str, float]]:
    """Print and return medians in milliseconds, and the ratios of the other times to ours."""
    figures = {}
    for num_rows, seconds in steps.items():
        medians, ratios = np.median(seconds, axis=0), np.median(seconds / seconds[:, :1], axis=0)
        figures[f"{num_rows} rows"] = {
            f"{name}{unit}": float(f"{value:.4g}")
            for unit, values in (("_ms", medians * 1e3), ("_ratio", ratios))
            for name, value in zip(("own", "bfloat16", "llama_cpp"), values, strict=False)
        }
        print(f"  {kind} {num_rows} rows: {figures[f'{num_rows} rows']}", flush=True)
    return figures


def measure(kind: str, args: argparse.Namespace, native: NativeKernels, scratch: Path) -> Any:
    """All figures of one type of file."""
    file, folder = scratch / f"{kind}.gguf", scratch / kind
    folder.mkdir()
    write_as(kind, args.model, file)
    convert_gguf(file, folder, SilentProgress())
    own, plain = (load(folder, encoding, torch.bfloat16, native) for encoding in (kind, "bfloat16"))
    figures: dict[str, Any] = {
        "file_bytes": sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors),
        "loaded_bytes": weight_bytes(own),
    }
    print(f"{kind}: loaded / file {figures['loaded_bytes'] / figures['file_bytes']:.3f}")
    if args.turns:
        with llama(args.llama, file, args.clock) as peer:
            figures["steps"] = report(kind, time_steps((own, plain), peer, native, args))
    if args.tokens:
        original = scratch / "original"
        if not original.exists():
            original.mkdir()
            convert_gguf(args.model, original, SilentProgress())
        figures["closeness"] = compare(folder, original, kind, args, native)
        print(f"  {figures['closeness']}", flush=True)
    return figures


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file to make the others from")
    parser.add_argument("--kinds", nargs="+", default=("q8_0", "q4_0", "q4_1", "q4_k", "q6_k"))
    parser.add_argument("--isa", choices=supported_levels(), default=supported_levels()[0])
    parser.add_argument("--llama", default="", help="a Python that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--turns", type=int, default=30, help="of decode steps; 0: none")
    parser.add_argument(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const="process_time",
        default="perf_counter",
    )
    parser.add_argument("--tokens", type=int, default=20_000, help="of perplexity; 0: none")
    parser.add_argument(
        "--windows", type=Path, help="a file of results by window of text, to continue from"
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        native = NativeKernels.open("native", Path(scratch, "kernels"), args.isa)
        assert native is not None
        figures = {kind: measure(kind, args, native, Path(scratch)) for kind in args.kinds}
    if args.output:
        args.output.write_text(json.dumps({"isa": args.isa, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
