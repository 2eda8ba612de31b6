"""A case: a small random model, requests, and what must be equal on a GPU and on a CPU.

Owns the comparisons of types. Bounds of float32 are those of other orders of summation. A type with
fewer bits has no bound of its own: a CPU that computes in it is as far from float32 as a GPU may
be, but for half as much again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from agreement import Disagreement, Figures, check
from engines import Answer, Options, Warnings, Waves, answer

FLOAT32_LIMIT = 2e-3
FACTOR, LEAST = 1.5, 2e-3


Measure = Callable[[Sequence[Answer], Sequence[Answer]], float]
"""How far answers are from the reference's, as a share of its spread."""


class Ask(Protocol):
    """Answers the requests of a case on the device, or on the CPU that is its reference."""

    def __call__(
        self,
        *,
        is_reference: bool = False,
        on_wave: Callable[[int], object] = ...,
        **options: Any,
    ) -> list[Answer]:
        """Answer them, with more options (see `engines.answer`)."""
        ...


@dataclass(frozen=True, slots=True)
class Bench:
    """The device of a case, a folder of its own, and a cache for all cases."""

    device: torch.device
    scratch: Path
    cache: Path


class AnyCase(Protocol):
    """Something to try on a device."""

    @property
    def name(self) -> str:
        """The name of its record."""
        ...

    def figures(self, bench: Bench) -> dict[str, Any]:
        """Run it. Raises `Disagreement`, or whatever it meets."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """Requests to the engine, answered on both devices.

    `write` fills the model's folder, from which `requests` may read; `compare` asks as often as it
    has types to compare. `options` are those of the server, and `more` of them name files.
    """

    name: str
    write: Callable[[Path], object]
    requests: Callable[[Path], Waves]
    compare: Callable[[Ask], Figures]
    options: Options = field(default_factory=dict)
    more: Callable[[Path], Options] = lambda folder: {}

    def figures(self, bench: Bench) -> dict[str, Any]:
        """Compare, and add what the engines warned of."""
        folder = bench.scratch / "model"
        folder.mkdir()
        self.write(folder)
        waves = self.requests(folder)
        cpu = torch.device("cpu")

        def ask(
            *,
            is_reference: bool = False,
            on_wave: Callable[[int], object] = lambda number: None,
            **options: Any,
        ) -> list[Answer]:
            given = {**self.options, **self.more(folder), **options}
            if is_reference:  # torch alone, which is the reference of all kernels
                given |= {"cpu_kernels": "torch", "enable_deterministic_inference": False}
            device = cpu if is_reference else bench.device
            return answer(folder, waves, device, bench.cache, given, on_wave)

        with Warnings() as warnings:
            found: dict[str, Any] = dict(self.compare(ask))
        if warnings.texts:
            found["warnings"] = "; ".join(warnings.texts)
        return found

    def under(self, name: str, compare: Callable[[Ask], Figures], **options: Any) -> EngineCase:
        """The same requests under other options."""
        joined = {**self.options, **options}
        return replace(self, name=name, compare=compare, options=joined)


@dataclass(frozen=True, slots=True)
class DirectCase:
    """A function of a part of the product, without an engine."""

    name: str
    run: Callable[[Bench], Mapping[str, Any]]

    def figures(self, bench: Bench) -> dict[str, Any]:
        """Call it."""
        return dict(self.run(bench))


def in_float32(measure: Measure, limit: float = FLOAT32_LIMIT) -> Callable[[Ask], Figures]:
    """Both in float32."""

    def compare(ask: Ask) -> Figures:
        wanted = ask(is_reference=True, dtype="float32")
        return check("float32", measure(ask(dtype="float32"), wanted), limit)

    return compare


def in_type(
    measure: Measure, dtype: str = "bfloat16", least: float = LEAST
) -> Callable[[Ask], Figures]:
    """Both in a type of fewer bits, compared with float32; `least` is allowed in any case."""

    def compare(ask: Ask) -> Figures:
        wanted = ask(is_reference=True, dtype="float32")
        by_cpu = measure(ask(is_reference=True, dtype=dtype), wanted)
        by_gpu = measure(ask(dtype=dtype), wanted)
        return {"cpu": by_cpu} | check("gpu", by_gpu, FACTOR * by_cpu + least)

    return compare


def in_both(measure: Measure, limit: float = FLOAT32_LIMIT) -> Callable[[Ask], Figures]:
    """As `in_float32` and then as `in_type`."""

    def compare(ask: Ask) -> Figures:
        return in_float32(measure, limit)(ask) | in_type(measure)(ask)

    return compare


def must(is_so: bool, what: str) -> None:
    """Raise `Disagreement` unless something is so."""
    if not is_so:
        raise Disagreement(what)


def is_usable(found: Mapping[str, Any]) -> bool:
    """Whether a process can use the GPU after a record.

    It cannot after an error of the device, and should not after a capture that was invalidated,
    which leaves torch's allocator in a state of its own.
    """
    error, warnings = found["error"] or "", found["figures"].get("warnings", "")
    is_sound = "cannot be captured" not in warnings
    return is_sound and not re.search("CUDA error|AcceleratorError", error)
