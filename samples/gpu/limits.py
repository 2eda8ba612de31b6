"""The device and its limits: what every other figure is a share of."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any

import torch
from place import Place, Record, attempt

import triptych

PACKAGES = ("torch", "triton", "transformers", "diffusers", "numpy")
NUM_LAUNCHES = 200
QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,temperature.gpu"


def run(place: Place) -> Iterator[Record]:
    """Versions, then rates of reading, copying, multiplying and launching."""
    yield attempt("versions", partial(versions, place))
    for name, work in (
        ("memory rates", read_rates),
        ("matrix rate, bf16", matrix_rate),
        ("matrix rate, fp8", float8_rate),
        ("launches", launch_gaps),
        ("host", host_rates),
    ):
        yield attempt(name, partial(work, place))


def versions(place: Place) -> dict[str, Any]:
    """The card, its driver and the packages."""
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.processor()}
    found |= {name: _version(name) for name in PACKAGES} | {"triptych": triptych.__version__}
    found["cuda"] = str(torch.version.cuda or torch.version.hip)
    if place.is_gpu:
        card = torch.cuda.get_device_properties(place.device)
        found |= {
            "card": card.name,
            "num_multiprocessors": card.multi_processor_count,
            "memory_gib": card.total_memory / 2**30,
            "l2_mib": card.L2_cache_size / 2**20,
            "cudnn": torch.backends.cudnn.version(),
            QUERY: _card_now(),
        }
    return found


def read_rates(place: Place) -> dict[str, float]:
    """Bytes a second that are read, and that are read and written by a copy."""
    num_values = 2**20 if place.is_tiny else 2**31
    values = torch.ones(num_values, dtype=torch.bfloat16, device=place.device)
    read_s = place.device_s(partial(torch.amax, values), 10)
    half, other = values.chunk(2)
    copy_s = place.device_s(partial(other.copy_, half), 10)
    return {"read_bytes_per_s": values.nbytes / read_s, "copy_bytes_per_s": values.nbytes / copy_s}


def matrix_rate(place: Place) -> dict[str, float]:
    """Operations a second of a large product in bfloat16, on random values."""
    side = 256 if place.is_tiny else 8192
    a, b = (torch.randn(side, side, device=place.device).bfloat16() for _ in range(2))
    return {"flops_per_s": 2 * side**3 / place.device_s(partial(torch.matmul, a, b))}


def float8_rate(place: Place) -> dict[str, float]:
    """Operations a second of `torch._scaled_mm`, with a scale for each tensor and each row."""
    side = 256 if place.is_tiny else 8192
    a, b = (torch.randn(side, side, device=place.device) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=place.device)
    rows = torch.ones(side, 1, device=place.device)
    found = {}
    scales_of = {"tensor": (one, one)}
    if place.is_gpu:  # torch has no other kernels for a CPU
        scales_of["row"] = (rows, rows.t())
    for name, scales in scales_of.items():
        product = partial(
            torch._scaled_mm, a8, b8, *scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        found[f"flops_per_s_{name}"] = 2 * side**3 / place.device_s(product)
    return found


def launch_gaps(place: Place) -> dict[str, float]:
    """Microseconds that one empty kernel takes, launched by torch and replayed in a graph."""
    tiny = torch.zeros(1, device=place.device)
    work = partial(_repeat, partial(tiny.add_, 1))
    found = {"launch_us": 1e6 * place.wall_s(work) / NUM_LAUNCHES}
    if place.is_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        found["replayed_us"] = 1e6 * place.wall_s(graph.replay) / NUM_LAUNCHES
        empty = torch.cuda.CUDAGraph()
        with torch.cuda.graph(empty):
            tiny.add_(1)
        found["replay_call_us"] = 1e6 * place.wall_s(partial(_repeat, empty.replay)) / NUM_LAUNCHES
    return found


def host_rates(place: Place) -> dict[str, float]:
    """The rate of uploads from pinned memory, and the speed of this machine's Python."""
    num_bytes = 2**20 if place.is_tiny else 2**28
    found = {"python_loop_us": 1e6 * place.wall_s(_loop), "num_threads": torch.get_num_threads()}
    if place.is_gpu:
        given = torch.ones(num_bytes, dtype=torch.uint8).pin_memory()
        upload = partial(given.to, place.device, non_blocking=True)
        found["upload_bytes_per_s"] = num_bytes / place.wall_s(upload)
    return found


def _loop() -> int:
    """A loop of 10,000 turns: it compares the host with other machines."""
    return sum(number & 7 for number in range(10_000))


def _repeat(work: Callable[[], object]) -> None:
    for _ in range(NUM_LAUNCHES):
        work()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _card_now() -> str:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return ended.stdout.strip()
