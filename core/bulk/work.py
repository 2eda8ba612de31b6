"""The work of a bulk run, as data: what to do with rows, and the cluster that does it.

Owns these types. Knows neither how rows are read nor where they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.core.bulk.rows import Record, RowResult
from triptych.core.options.config import Config

AnswerRows = Callable[[Any, Sequence[Record], Record], Iterator[RowResult]]
"""What a pipeline makes of what rows ask, in their order, with options for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """What is done with rows, by names under which every process finds it.

    `pipeline` is a class (`modalities.pipeline.Pipeline`), `answer` an `AnswerRows`, `options` are
    its last argument. `num_at_once` rows are handed to a pipeline of a cluster together.
    """

    pipeline: str
    answer: str
    options: Record
    num_at_once: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where rows are spread: a Ray cluster, and how many engines of it."""

    address: str
    least: int
    most: int
    config: Config
