"""The cost of a step as the work grows: rows, context, and jobs that wait.

Two parts. A model of SmolLM2-135M's shape with random weights decodes 1 to 64 rows, and contexts of
128 to 8192 tokens. The scheduler, without threads and without a model, proposes, books and commits
steps while up to 10,000 jobs wait: half of them have a client of their own. The least of each
turn's steps counts for the scheduler, the median of turns for the model.

    python samples/benchmarks/growth.py --json growth.json --plot growth.png
    python samples/benchmarks/growth.py --parts scheduler --against growth.json --plot growth.png

`--against` draws the figures of another run as the lines before the change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import torch
from native_step import CPU, PAGE_SIZE, SHAPE, make_decoder, make_step, pages_of_row, take_turns

from triptych.core.engine_api.job import Job
from triptych.core.engine_api.plan import StepResult, TokenPlan
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions
from triptych.core.process.threads import num_usable_cores
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache
from triptych.schedulers.tokens.scheduler import TokenScheduler

Curve = dict[int, float]
"""Milliseconds of a step by the size of the work."""
PAGES = 64  # of a row
ROWS, CONTEXTS, QUEUES = (1, 2, 4, 8, 16, 32, 64), (128, 512, 2048, 8192), (0, 1, 100, 1000, 10_000)


def model_curves(num_turns: int, native: NativeKernels) -> dict[str, Curve]:
    """Milliseconds of a model's step by rows, over 512 tokens, and by the context of one row."""
    decoder = make_decoder(torch.bfloat16, native)

    def curve(sizes: Mapping[int, tuple[int, int]]) -> Curve:
        calls: list[Callable[[], object]] = []
        for num_rows, context in sizes.values():
            num_pages = num_rows * pages_of_row(context)
            kv = KvCache(SHAPE.kv_layout(PAGE_SIZE, torch.bfloat16), num_pages, CPU, native)
            for pages in kv.tensors:
                pages.normal_()
            calls.append(make_step(decoder, kv, num_rows, 1, context))
        with torch.inference_mode():
            seconds = take_turns(calls, num_turns)
        medians = [statistics.median(each) for each in seconds.T.tolist()]
        return {size: 1e3 * found for size, found in zip(sizes, medians, strict=True)}

    return {
        "model by rows": curve({num: (num, 512) for num in ROWS}),
        "model by context": curve({context: (1, context) for context in CONTEXTS}),
    }


def request_of(number: int, num_tokens: int) -> TokenRequest:
    """A prompt that shares no page with another."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    return TokenRequest(prompt_ids=(number,) * 64, sampling=sampling)


def scheduler_step_s(num_rows: int, num_waiting: int, num_steps: int) -> float:
    """The least time to propose, book and commit a decode step of `num_rows`."""
    options = ScheduleOptions(
        max_batch_size=num_rows, max_batch_input_tokens=8192, max_queue_size=num_waiting + 1
    )
    scheduler = TokenScheduler(
        model="tiny",
        pool=PagePool(num_pages=PAGES * num_rows, page_size=PAGE_SIZE),
        options=options,
        max_length=PAGES * PAGE_SIZE,
        namespace=b"tiny",
    )
    for number in range(num_rows + num_waiting):
        client = "" if number % 2 else f"client-{number}"
        request = request_of(number, num_steps + 16 * num_rows)
        scheduler.submit(
            Job(job_id=f"job-{number:08d}", model="tiny", request=request, client=client)
        )
    return min(decode_steps_s(scheduler, num_rows, num_steps))


def decode_steps_s(scheduler: TokenScheduler, num_rows: int, num_steps: int) -> list[float]:
    """The processor's seconds of decode steps, once all rows answer."""
    found: list[float] = []
    step_id, now_s = 0, 0.0
    while len(found) < num_steps:
        started_s = time.thread_time()
        proposal = scheduler.propose(now_s)
        assert proposal is not None
        plan = scheduler.book(proposal, step_id, now_s)
        assert isinstance(plan, TokenPlan)
        spent_s = time.thread_time() - started_s
        rows = [TokenDelta(token_ids=(7,)) if row.is_sampled else TokenDelta() for row in plan.rows]
        result = StepResult(rows=rows, elapsed_s=0.01, ended_s=now_s + 0.01)
        started_s = time.thread_time()
        scheduler.commit(plan, result, now_s + 0.01)
        spent_s += time.thread_time() - started_s
        if len(plan.rows) == num_rows and all(row.num_tokens == 1 for row in plan.rows):
            found.append(spent_s)
        step_id, now_s = step_id + 1, now_s + 0.01
    return found


def scheduler_curves(num_steps: int) -> dict[str, Curve]:
    """Milliseconds of the scheduler by rows, and by waiting jobs with 16 rows."""
    return {
        "scheduler by rows": {num: 1e3 * scheduler_step_s(num, 0, num_steps) for num in ROWS},
        "scheduler by queue": {num: 1e3 * scheduler_step_s(16, num, num_steps) for num in QUEUES},
    }


def print_curves(curves: Mapping[str, Curve]) -> None:
    """Print a line for each curve."""
    for name, curve in curves.items():
        print(f"{name}: {', '.join(f'{size}: {ms:.3f} ms' for size, ms in curve.items())}")
    rows, by_rows = curves.get("model by rows"), curves.get("scheduler by rows")
    if rows and by_rows:
        shares = ", ".join(f"{num}: {by_rows[num] / rows[num]:.1%}" for num in ROWS)
        print(f"scheduler, share of the model's step by rows: {shares}")


def plot(curves: Mapping[str, Curve], before: Mapping[str, Curve], path: Path) -> None:
    """Draw the curves, those of `before` dashed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(3.4 * len(curves), 3.2))
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        for style, label, drawn in (("--", "before", before.get(name)), ("-", "now", curve)):
            if drawn:
                axis.plot([max(size, 0.5) for size in drawn], drawn.values(), style, label=label)
        axis.set(title=name, xscale="log", yscale="log", ylabel="ms per step")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def read_curves(path: Path | None) -> dict[str, Curve]:
    """The figures of another run."""
    if path is None:
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: {int(size): ms for size, ms in curve.items()} for name, curve in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=("model", "scheduler"))
    parser.add_argument("--turns", type=int, default=20, help="of the model")
    parser.add_argument("--steps", type=int, default=200, help="of the scheduler")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--against", type=Path, help="figures of a run before the change")
    parser.add_argument("--plot", type=Path, help="a picture; needs matplotlib")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    parts, curves = options.parts or ("model", "scheduler"), dict[str, Curve]()
    if "model" in parts:
        with tempfile.TemporaryDirectory() as folder:
            native = NativeKernels.open("native", Path(folder))
            assert native is not None
            curves |= model_curves(options.turns, native)
    if "scheduler" in parts:
        curves |= scheduler_curves(options.steps)
    print_curves(curves)
    if options.json:
        options.json.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(curves, read_curves(options.against), options.plot)


if __name__ == "__main__":
    main()
