"""Pages of one byte a cell: memory, closeness and decode speed compared with bfloat16's.

For each format: tokens in a GiB; perplexity of a GGUF file's model, its logits' error and
how often the likeliest token differs, compared with the same weights over bfloat16 pages; and
decode steps over a context, all formats in turns. Figures are medians of turns, and of the ratios
within a turn.

    python samples/benchmarks/cache_formats.py MODEL.gguf
    python samples/benchmarks/cache_formats.py MODEL.gguf --turns 0 --tokens 8192 --isa avx2

On a shared machine, `--cpu-time` with one thread counts processor seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import numpy as np
import torch
from native_step import CPU, PAGE_SIZE, PAGES_PER_ROW, make_step
from quantized import load, read_text, score
from torch.nn.functional import cross_entropy

from triptych.core.process.threads import num_usable_cores
from triptych.core.runtime.kernels.native.build import supported_levels
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.progress import SilentProgress

FORMATS = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""The first is the baseline."""
LONGEST = PAGES_PER_ROW * PAGE_SIZE


@dataclass(slots=True)
class Agreement:
    """How one format's logits compare with those over bfloat16 pages."""

    loss: float = 0.0
    reference_loss: float = 0.0
    error: float = 0.0
    size: float = 0.0
    num_windows: int = 0
    num_tokens: int = 0
    num_others: int = 0

    def add(self, own_TV: torch.Tensor, reference_TV: torch.Tensor, ids_T: torch.Tensor) -> None:
        """Add the counts of one window."""
        self.loss += cross_entropy(own_TV[:-1], ids_T[1:]).item()
        self.reference_loss += cross_entropy(reference_TV[:-1], ids_T[1:]).item()
        self.error += (own_TV - reference_TV).square().sum().item()
        self.size += (reference_TV - reference_TV.mean(-1, keepdim=True)).square().sum().item()
        self.num_windows += 1
        self.num_tokens += len(ids_T)
        self.num_others += int((own_TV.argmax(-1) != reference_TV.argmax(-1)).sum())

    def figures(self) -> dict[str, float]:
        """The printed figures."""
        perplexity, reference = (
            math.exp(total / self.num_windows) for total in (self.loss, self.reference_loss)
        )
        return {
            "tokens": self.num_tokens,
            "perplexity": perplexity,
            "bfloat16_perplexity": reference,
            "perplexity_change": perplexity / reference - 1,
            "logits_error": math.sqrt(self.error / self.size),
            "other_likeliest_token": self.num_others / self.num_tokens,
        }


def compare(
    decoder: Decoder, text: torch.Tensor, native: NativeKernels
) -> dict[str, dict[str, float]]:
    """All formats on the windows of a text."""
    reference, *others = FORMATS
    found = {name: Agreement() for name in others}
    for ids_T in text:
        expected = score(decoder, ids_T, native, FORMATS[reference])
        for name, agreement in found.items():
            agreement.add(score(decoder, ids_T, native, FORMATS[name]), expected, ids_T)
    return {name: agreement.figures() for name, agreement in found.items()}


def filled_cache(
    decoder: Decoder, dtype: torch.dtype, num_rows: int, native: NativeKernels
) -> KvCache:
    """Random keys and values near 1 for `num_rows` rows."""
    kv = KvCache(decoder.config.kv_layout(PAGE_SIZE, dtype), num_rows * PAGES_PER_ROW, CPU, native)
    for pages in kv.pages:
        for cells in (pages.k_NPKD, pages.v_NPKD):
            if dtype is torch.int8:
                cells.random_(-127, 128)
            else:
                cells.copy_(torch.randn(cells.shape).clamp_(-3, 3))
        for scale in pages.tensors[2:]:
            scale.fill_(3 / 127)
    return kv


def time_steps(
    decoder: Decoder, num_rows: int, native: NativeKernels, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Decode steps by format: milliseconds, and bfloat16's time divided by the format's."""
    clock = getattr(time, args.clock)

    def elapsed_s(step: Callable[[], object]) -> float:
        started_s = clock()
        step()
        return float(clock() - started_s)

    calls: Sequence[Callable[[], float]] = [
        partial(
            elapsed_s,
            make_step(
                decoder, filled_cache(decoder, dtype, num_rows, native), num_rows, 1, args.context
            ),
        )
        for dtype in FORMATS.values()
    ]
    with torch.inference_mode():
        turns = np.array([[call() for call in calls] for _ in range(args.turns + 2)][2:])
    medians, ratios = np.median(turns, axis=0), np.median(turns[:, :1] / turns, axis=0)
    spread = np.subtract(*np.percentile(turns[:, :1] / turns, (75, 25), axis=0))
    return {
        name: {"ms": median * 1e3, "bfloat16_by_it": ratio, "quartiles_apart": apart}
        for name, median, ratio, apart in zip(FORMATS, medians, ratios, spread, strict=True)
    }


def tokens_per_gib(decoder: Decoder) -> dict[str, int]:
    """The tokens in a GiB, by format."""
    layouts = {name: decoder.config.kv_layout(PAGE_SIZE, each) for name, each in FORMATS.items()}
    return {name: 2**30 // layout.page_bytes * PAGE_SIZE for name, layout in layouts.items()}


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--isa", choices=supported_levels(), default=supported_levels()[0])
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--context", type=int, default=LONGEST, help=f"at most {LONGEST}")
    parser.add_argument("--turns", type=int, default=30, help="of decode steps; 0: none")
    parser.add_argument(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const="process_time",
        default="perf_counter",
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of perplexity; 0: none")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        native = NativeKernels.open("native", Path(scratch, "kernels"), args.isa)
        assert native is not None
        folder = Path(scratch, "model")
        folder.mkdir()
        convert_gguf(args.model, folder, SilentProgress())
        decoder = load(folder, "bfloat16", torch.bfloat16, native)
        text = read_text(folder, args.tokens)
        figures = {"isa": args.isa, "tokens_per_gib": tokens_per_gib(decoder)}
        if args.turns:
            steps = {rows: time_steps(decoder, rows, native, args) for rows in args.rows}
            figures["steps"] = steps
        if args.tokens:
            figures["closeness"] = compare(decoder, text, native)
    print(json.dumps(figures, indent=1))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
