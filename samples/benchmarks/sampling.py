"""The cost of sampling tokens on a CPU: our kernel compared with torch's operations.

    python samples/benchmarks/sampling.py
    python samples/benchmarks/sampling.py --vocabulary 151936 --rows 1 32 --threads 1

Both sample from the same logits with the same random numbers, turn by turn, in one process. Medians
of processor time, which other work on the machine changes little, and of wall time. The logits are
random, a hundredth of them raised, so that a few tokens have most of the mass, as in a model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import torch

from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.sampling.sampler import Sampler

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0),
    "grammar": SamplingParams(temperature=1.0),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9),
    "top_k, top_p": SamplingParams(temperature=0.7, top_k=40, top_p=0.95),
    "repetition": SamplingParams(temperature=0.7, repetition_penalty=1.1),
}


def sampler_of(
    params: SamplingParams, logits: torch.Tensor, native: NativeKernels | None
) -> Sampler:
    """A sampler whose slots all sample by `params`."""
    num_rows, vocab_size = logits.shape
    cpu = torch.device("cpu")
    sampler = Sampler(vocab_size=vocab_size, max_batch_size=num_rows, device=cpu, native=native)
    for slot in range(num_rows):
        row = TokenRow(
            job_id="",
            slot=slot,
            start=0,
            num_tokens=0,
            sampling=params,
            history_ids=tuple(range(64)),
            num_prompt_tokens=64,
        )
        sampler.bind(row)
    return sampler


def sample(
    sampler: Sampler, logits: torch.Tensor, position: int, mask: bytes
) -> tuple[float, float]:
    """Milliseconds of one step: of the processors, and by the clock."""
    num_rows = len(logits)
    masks = [mask] * num_rows if mask else ()
    used_s, begun_s = time.process_time(), time.perf_counter()
    sampler.sample(logits, range(num_rows), [position] * num_rows, masks).to_results()
    return 1e3 * (time.process_time() - used_s), 1e3 * (time.perf_counter() - begun_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        native = NativeKernels.open("native", Path(folder))
    print("rows sampling         torch ms (wall)      kernel ms (wall)   of it")
    for num_rows in args.rows:
        logits = torch.randn(num_rows, args.vocabulary, generator=generator) * 2.5
        logits += 6.0 * (torch.rand(logits.shape, generator=generator) < 0.01)
        for name, params in KINDS.items():
            mask = b"\xfe\xff\xff\x7f" * -(-args.vocabulary // 32) if name == "grammar" else b""
            samplers = [sampler_of(params, logits, kernels) for kernels in (None, native)]
            turns = [
                [sample(sampler, logits, 64 + turn, mask) for sampler in samplers]
                for turn in range(args.turns)
            ]
            (theirs, theirs_wall), (ours, ours_wall) = (
                [statistics.median(turn[which][part] for turn in turns) for part in (0, 1)]
                for which in (0, 1)
            )
            print(
                f"{num_rows:4} {name:14} {theirs:9.2f} ({theirs_wall:7.2f})"
                f"   {ours:9.2f} ({ours_wall:7.2f})   {ours / theirs:5.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
