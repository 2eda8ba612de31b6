"""A bulk run: answers the rows that no earlier run has answered.

Owns the order of a run, its files, progress and summary. Rows are answered by a pipeline in this
process, or by several on a Ray cluster (`core.bulk.spread`), with the same function.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.core.bulk.cluster import import_ray
from triptych.core.bulk.results import ResultSink
from triptych.core.bulk.rows import BulkRow, Record, RowResult
from triptych.core.bulk.work import AnswerRows, Cluster, RowWork
from triptych.core.errors import EngineDown
from triptych.core.process.atomic_files import remove_partial, write_whole
from triptych.core.process.cli_io import count_bar, report_write_errors
from triptych.core.process.lazy import load


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRun:
    """The rows of a run, their work, where it runs, and where results go.

    Output files go to `folder`; `is_whole` checks whether an existing one is complete.
    `open_pipeline` opens the pipeline in this process.
    """

    rows: Sequence[BulkRow]
    work: RowWork
    sink: ResultSink
    open_pipeline: Callable[[], AbstractContextManager[Any]]
    cluster: Cluster | None = None
    folder: Path = Path()
    is_whole: Callable[[Path], bool] = Path.is_file
    describe: Callable[[BulkRow], Record] = lambda row: row.entry
    is_bar_hidden: bool = False

    def run(self, verb: str) -> int:
        """Answer the remaining rows; 1 if any failed. `verb` names the work, as "generated".

        Raises `EngineDown` where the engine ended: what was answered is kept.
        """
        with self.sink.opened():
            return self._run(verb)

    def _run(self, verb: str) -> int:
        started_s = time.monotonic()
        self._remove_partial_files()
        done = {row.key for row in self.rows if self._is_done(row)}
        left = [row for row in self.rows if row.key not in done]
        num_failed = 0
        with count_bar(is_hidden=self.is_bar_hidden) as bar:
            task = bar.add_task("working", total=len(self.rows), completed=len(done))
            for row, result in self._results(left):
                self._take(row, result)
                num_failed += result.error is not None
                bar.advance(task)
        self.sink.keep(row.key for row in self.rows)
        sys.stderr.write(
            f"Rows: {len(self.rows)}, {verb}: {len(left) - num_failed}, there before: {len(done)},"
            f" failed: {num_failed}. It took {time.monotonic() - started_s:.1f} s.\n"
        )
        return 1 if num_failed else 0

    def _remove_partial_files(self) -> None:
        """Remove partial files left by a killed run."""
        for folder in {(self.folder / row.stem).parent for row in self.rows if row.stem}:
            with report_write_errors(folder):
                remove_partial(folder)

    def _is_done(self, row: BulkRow) -> bool:
        record = self.sink.holds(row.key)
        return record is not None and all(
            self.is_whole(self.folder / name) for name in record.get("files", ())
        )

    def _results(self, rows: Sequence[BulkRow]) -> Iterator[tuple[BulkRow, RowResult]]:
        """The result of each row. Loads no model if no row can be answered."""
        for row in rows:
            if row.error is not None:
                yield row, RowResult.failed(row.error)
        asked = [row for row in rows if row.error is None]
        if not asked:
            return
        if self.cluster is None:
            answer: AnswerRows = load(self.work.answer)
            with self.open_pipeline() as pipeline:
                results = answer(pipeline, [row.asked for row in asked], self.work.options)
                yield from zip(asked, results, strict=True)
            return
        import_ray("ray.data")
        from triptych.core.bulk.spread import spread

        by_key = {row.key: row for row in asked}
        with closing(spread(asked, self.work, self.cluster)) as found:
            for key, result in found:
                yield by_key[key], result

    def _take(self, row: BulkRow, result: RowResult) -> None:
        """Store the result of a row: first its files, then the record that names them."""
        if result.error is not None and result.error["code"] == EngineDown.code:
            raise EngineDown(f"{result.error['message']} Run the same command again to resume.")
        names = []
        for end, data in result.files.items():
            path = self.folder / f"{row.stem}{end}"
            with report_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, (data,))
            names.append(f"{row.stem}{end}")
        files = {"files": names} if names else {}
        self.sink.add(row.key, {**self.describe(row), **files, **result.record})
        if result.error is not None:
            sys.stderr.write(f"row {row.number}: {result.error['message']}\n")
