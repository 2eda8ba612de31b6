"""One decoder step on the CPU kernels, against the limits of this machine.

Times SmolLM2-135M's shape with random weights: decode steps of 1, 8 and 32 rows over 512 tokens of
context, and a prefill of 512. A decode step of one row must read every weight once, so it is
compared with the time to read that many bytes. A prefill is bound by matrix products, so its rate
is compared with torch's on large matrices (of float32 where the processor has no products of
bfloat16). Reading and a product run just before each step, and the median of many such turns
counts: on a shared machine both change from one second to the next.

    python samples/benchmarks/native_step.py
    python samples/benchmarks/native_step.py --isa avx2 --dtype float32 --threads 1
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import numpy as np
import numpy.typing as npt
import torch

from triptych.core.process.threads import num_usable_cores
from triptych.core.runtime.devices.device import has_fast_cpu_bfloat16
from triptych.core.runtime.kernels.native.build import supported_levels
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.layers.attention import AttentionConfig, KvCache, PagedStep
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.rotary import RopeConfig
from triptych.core.runtime.layers.states import StateBatch

Float64s = npt.NDArray[np.float64]

CPU = torch.device("cpu")
CONTEXT, PAGE_SIZE, MAX_ROWS, MATRIX = 512, 32, 32, 2048
PAGES_PER_ROW = 2 * CONTEXT // PAGE_SIZE
ATTENTION = AttentionConfig(hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64)
SHAPE = DecoderConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    norm_eps=1e-5,
    attention=(ATTENTION,) * 30,
    rope=RopeConfig(num_rotated_dims=64, max_length=2048, trained_length=2048),
    has_tied_embeddings=True,
)
LAYER_WEIGHTS = 30 * (576 * (960 + 576) + 3 * 576 * 1536)
HEAD_WEIGHTS = 576 * 49_152
STEPS = {
    "decode, 1 row": (1, 1),
    "decode, 8 rows": (8, 1),
    "decode, 32 rows": (32, 1),
    "prompt of 512": (1, 512),
}


def make_decoder(dtype: torch.dtype, native: NativeKernels) -> Decoder:
    """A decoder with random weights, ready to run."""
    decoder = Decoder(SHAPE, dtype=dtype, device=CPU)
    decoder.head.weight_OI.normal_(std=0.02)
    decoder.norm.weight_C.fill_(1)
    for layer in decoder.layers:
        for norm in (layer.input_norm, layer.mlp_norm):
            norm.weight_C.fill_(1)
        for linear in (
            layer.attention.qkv,
            layer.attention.out,
            layer.mlp.gate_up,
            layer.mlp.down,
        ):
            linear.weight_OI.normal_(std=0.02)
    decoder.prepare(native)
    return decoder


def pages_of_row(context: int) -> int:
    """The pages that a row has in `make_step`."""
    return max(PAGES_PER_ROW, -(-context // PAGE_SIZE))


def make_step(
    decoder: Decoder, kv: KvCache, num_rows: int, num_tokens: int, context: int = CONTEXT
) -> Callable[[], torch.Tensor]:
    """A call that runs the `num_tokens` of each row that end at `context`, and scores the last."""
    lengths, contexts = np.full(num_rows, num_tokens), np.full(num_rows, context)
    table_BM = torch.arange(num_rows * pages_of_row(context)).view(num_rows, -1)
    positions_T = torch.arange(context - num_tokens, context).repeat(num_rows)
    row_T = torch.arange(num_rows).repeat_interleave(num_tokens)
    pages_T = table_BM[row_T, positions_T // PAGE_SIZE]
    starts = torch.arange(num_rows) * num_tokens
    batch = AttentionBatch(
        page_table_BM=table_BM,
        context_lengths_B=torch.from_numpy(contexts),
        query_starts_B=starts,
        write_slots_T=pages_T * PAGE_SIZE + positions_T % PAGE_SIZE,
        num_decode_rows=num_rows if num_tokens == 1 else 0,
        host_query_lengths_B=lengths,
        host_context_lengths_B=contexts,
        native=kv.native,
    )
    ids_T = torch.randint(0, decoder.vocab_size, positions_T.shape)
    states = StateBatch(torch.arange(num_rows), range(num_rows)) if kv.states else None

    def step() -> torch.Tensor:
        hidden_TC = decoder.forward(ids_T, positions_T, PagedStep(kv, batch, states))
        return decoder.logits(hidden_TC[starts + num_tokens - 1])

    return step


def elapsed_s(call: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def take_turns(calls: Sequence[Callable[[], object]], num_turns: int) -> Float64s:
    """Seconds of each call in each turn, `[turns, calls]`; a first turn warms up."""
    return np.array([[elapsed_s(call) for call in calls] for _ in range(num_turns + 1)][1:])


def measure(isa: str, dtype: torch.dtype, folder: Path, num_turns: int) -> None:
    """Print the table of one level."""
    native = NativeKernels.open("native", folder, isa)
    assert native is not None
    decoder = make_decoder(dtype, native)
    kv = KvCache(SHAPE.kv_layout(PAGE_SIZE, dtype), MAX_ROWS * PAGES_PER_ROW, CPU, native)
    for pages in kv.tensors:
        pages.normal_()
    num_bytes = (LAYER_WEIGHTS + HEAD_WEIGHTS) * dtype.itemsize
    read = torch.ones(num_bytes // 4)
    multiplied = dtype if has_fast_cpu_bfloat16() else torch.float32  # torch converts each value
    a, b = (torch.randn(MATRIX, MATRIX).to(multiplied) for _ in range(2))
    print(f"\n{isa}, {dtype}, {torch.get_num_threads()} threads; torch multiplies {multiplied}")
    for name, (num_rows, num_tokens) in STEPS.items():
        step = make_step(decoder, kv, num_rows, num_tokens)
        with torch.inference_mode():
            seconds = take_turns((lambda: a @ b, read.sum, step), num_turns)
        product_s, read_s, step_s = np.median(seconds, axis=0)
        reads = np.median(seconds[:, 2] / seconds[:, 1])
        work = 2 * num_rows * (num_tokens * LAYER_WEIGHTS + HEAD_WEIGHTS)
        share = work / (2 * MATRIX**3) * np.median(seconds[:, 0] / seconds[:, 2])
        print(
            f"  {name:<16} {step_s * 1e3:8.2f} ms  {reads:6.2f} x reading ({read_s * 1e3:.2f} ms)"
            f"  {share:4.0%} of torch's {2 * MATRIX**3 / product_s / 1e9:.0f} GFLOP/s"
        )


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", choices=supported_levels(), action="append")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        for isa in options.isa or supported_levels():
            measure(isa, getattr(torch, options.dtype), Path(folder), options.turns)


if __name__ == "__main__":
    main()
