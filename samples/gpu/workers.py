"""Cases in several processes at once, each with a time limit.

Owns the processes. A case that crashes its process, or that leaves a GPU unusable to it, ends only
itself: the next one gets a new process.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from model_case import AnyCase, Bench, is_usable
from place import Place, Record, attempt, error_text, record

from triptych.core.process.threads import usable_cores

LIMIT_S = 60.0
"""For one case."""
MAX_PROCESSES = 8
REHEARSED = 5
"""A rehearsal takes every case of this number; without `--tiny` a CPU takes all."""
START_S = 60.0
"""What a process may take to import everything, beyond the limit of its first case."""
SPARE_S = 5.0
"""Before the end of a stage, when what still runs is stopped and noted."""


def num_processes() -> int:
    """As many as have two cores each."""
    return min(MAX_PROCESSES, max(1, usable_cores().count // 2))


def run_cases(place: Place, modules: Sequence[str], limit_s: float = LIMIT_S) -> Iterator[Record]:
    """Yield the record of each case of the modules, in the order in which they end.

    A rehearsal takes some of the cases. A module that cannot be imported has one record of that.
    """
    names: list[str] = []
    found: list[str] = []
    for module in modules:
        try:
            names += [case.name for case in cases_of(module)]
        except Exception as error:  # the cases of the others can run
            yield record(module, error_text(error))
        else:
            found.append(module)
    assert len(set(names)) == len(names), "each case has a name of its own"
    if place.is_tiny:
        names = names[::REHEARSED]
    pool = _Pool(place, tuple(found), deque(names), limit_s)
    try:
        yield from pool.run(min(num_processes(), len(names)))
    finally:
        pool.close()


def cases_of(module: str) -> Sequence[AnyCase]:
    """The cases that a module lists."""
    cases: Sequence[AnyCase] = import_module(module).CASES
    return cases


@dataclass(slots=True)
class _Worker:
    """A process, the case it works at, and when it is stopped."""

    process: BaseProcess
    pipe: Connection
    name: str = ""
    until_s: float = 0.0


@dataclass(slots=True)
class _Pool:
    place: Place
    modules: Sequence[str]
    waiting: deque[str]
    limit_s: float
    workers: list[_Worker] = field(default_factory=list)

    def run(self, num_processes: int) -> Iterator[Record]:
        for _ in range(num_processes):
            self._start()
        while self.workers:
            yield from self._turn()
        for name in self.waiting:
            yield record(name, "not started: the stage had no time left")

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()

    def _start(self) -> None:
        """Start a process with the next case, if there are one and time for it."""
        if not self.waiting or self.place.left_s < SPARE_S:
            return
        context = multiprocessing.get_context("spawn")  # a GPU does not survive a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.place, self.modules))
        process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self.workers.append(worker)
        self._give(worker, START_S)

    def _give(self, worker: _Worker, more_s: float = 0.0) -> None:
        worker.name = self.waiting.popleft()
        now_s = time.monotonic()
        end_s = now_s + self.place.left_s - SPARE_S / 2
        worker.until_s = min(now_s + self.limit_s + more_s, end_s)
        worker.pipe.send(worker.name)

    def _turn(self) -> Iterator[Record]:
        """Wait for any case to end, or to be over its time."""
        left_s = min(worker.until_s for worker in self.workers) - time.monotonic()
        ready = wait([worker.pipe for worker in self.workers], max(left_s, 0.0))
        for worker in list(self.workers):
            if worker.pipe in ready:
                yield self._take(worker)
            elif worker.until_s <= time.monotonic():
                yield self._end(worker, "stopped at its time limit")

    def _take(self, worker: _Worker) -> Record:
        """A record from a process, which gets the next case; or a word on how it died."""
        try:
            found: Record
            found, can_go_on = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            return self._end(worker, f"its process died with code {worker.process.exitcode}")
        if not can_go_on:
            self._end(worker, "")
        elif self.waiting and self.place.left_s > SPARE_S:
            self._give(worker)
        else:
            self._remove(worker)
        return found

    def _end(self, worker: _Worker, error: str) -> Record:
        """Stop a process and start another one in its place."""
        self._remove(worker)
        self._start()
        return record(worker.name, error)

    def _remove(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self.workers.remove(worker)


def _serve(pipe: Connection, place: Place, modules: Sequence[str]) -> None:
    """Run cases as they are given, until the process is stopped."""
    torch.set_num_threads(2)
    cases = {case.name: case for module in modules for case in cases_of(module)}
    while True:
        name = pipe.recv()
        scratch = place.scratch / f"{len(list(place.scratch.iterdir()))}-{time.monotonic_ns()}"
        scratch.mkdir()
        bench = Bench(place.device, scratch, place.scratch / "cache")
        started_s = time.monotonic()
        found = attempt(name, partial(cases[name].figures, bench))
        found["figures"]["seconds"] = time.monotonic() - started_s
        pipe.send((found, is_usable(found)))
