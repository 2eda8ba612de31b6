"""The work of a bulk run, as data: the function for rows, and the cluster that runs it.

Owns these types. Knows neither how rows are read nor where they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.core.bulk.rows import Record, RowResult
from triptych.core.options.config import Config

AnswerRows = Callable[[Any, Sequence[Record], Record], Iterator[RowResult]]
"""Answers the requests of rows, in order, with a pipeline and options common to all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """The function that answers rows, as names that every process can import.

    `pipeline` names a class (`modalities.pipeline.Pipeline`), `answer` an `AnswerRows`; `options`
    is its last argument. On a cluster, `num_at_once` rows are passed to a pipeline together.
    """

    pipeline: str
    answer: str
    options: Record
    num_at_once: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A Ray cluster, and the number of engines to use there."""

    address: str
    least: int
    most: int
    config: Config
