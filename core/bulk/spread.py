"""The answers to a bulk run's rows, computed by the engines of a Ray cluster.

Owns the form in which rows, results and work reach the cluster's processes: rows and results as
bytes, the pipeline class and the function as names to import. Results are yielded with their row's
key, in order of arrival. Ray Data assigns blocks of rows to actors, each with its own pipeline, and
reassigns a block if an actor is lost. Knows no input or output file, and no modality.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import pyarrow
import ray
import ray.data
from ray.data import ActorPoolStrategy

from triptych.core.bulk.cluster import engine_config, engine_resources, has_gpus, join
from triptych.core.bulk.rows import BulkRow, Record, RowResult
from triptych.core.bulk.work import AnswerRows, Cluster, RowWork
from triptych.core.errors import EngineDown
from triptych.core.options.config import Config
from triptych.core.process.lazy import load
from triptych.core.process.typed import decode_json, decode_msgpack
from triptych.core.weights.progress import SilentProgress

_NUM_BLOCKS_AT_ONCE = 2  # per engine: the next block starts while the last rows of one finish
_COLUMN = "item"


class _KeyedResult(msgspec.Struct, frozen=True):
    key: str
    result: RowResult


class RowWorker:
    """A pipeline in an actor of Ray Data."""

    def __init__(self, pipeline: str, answer: str, options: bytes, config: bytes) -> None:
        self._answer: AnswerRows = load(answer)
        self._options: Record = decode_json(options, dict)
        settings = decode_json(config, Config)
        self._pipeline = load(pipeline).from_config(settings, SilentProgress())

    def __call__(self, block: Any) -> Any:
        """The results of a block of rows, as a table like the input."""
        rows = [json.loads(each) for each in block[_COLUMN].to_pylist()]
        results = self._answer(self._pipeline, [asked for _, asked in rows], self._options)
        keyed = (_KeyedResult(key, each) for (key, _), each in zip(rows, results, strict=True))
        return _table([msgspec.msgpack.encode(each) for each in keyed])


def spread(
    rows: Sequence[BulkRow], work: RowWork, cluster: Cluster
) -> Generator[tuple[str, RowResult], None, None]:
    """The results of rows by key, in order of arrival.

    Raises `SetupError` if there is no cluster, `EngineDown` if no engine is available.
    """
    join(cluster.address, cluster.config.server)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        for block in _dataset(rows, work, cluster).iter_batches(
            batch_size=None, batch_format="pyarrow"
        ):
            for each in block[_COLUMN].to_pylist():
                found = decode_msgpack(each, _KeyedResult)
                yield found.key, found.result
    except ray.exceptions.RayError as error:
        raise EngineDown(f"An engine on the cluster ended: {_cause(error)}") from error
    finally:
        ray.shutdown()


def _dataset(rows: Sequence[BulkRow], work: RowWork, cluster: Cluster) -> Any:
    config = engine_config(cluster.config, cluster.most)
    items = [json.dumps([row.key, row.asked]).encode() for row in rows]
    size = work.num_at_once
    blocks = [_table(items[at : at + size]) for at in range(0, len(items), size)]
    encode = msgspec.json.encode
    return ray.data.from_arrow(blocks).map_batches(
        RowWorker,
        batch_size=None,
        batch_format="pyarrow",
        fn_constructor_args=(work.pipeline, work.answer, encode(work.options), encode(config)),
        compute=ActorPoolStrategy(
            min_size=cluster.least,
            max_size=cluster.most,
            max_concurrent_calls_per_actor=_NUM_BLOCKS_AT_ONCE,
            enable_true_multi_threading=True,
        ),
        **engine_resources(config.device, has_gpus=has_gpus()),
    )


def _table(items: Sequence[bytes]) -> Any:
    return pyarrow.table({_COLUMN: pyarrow.array(items, pyarrow.large_binary())})


def _cause(error: BaseException) -> str:
    """The last line of Ray's message, which is that of the original error."""
    return str(error).strip().splitlines()[-1][:300]
