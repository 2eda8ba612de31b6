"""The processes of all ranks except rank 0, which is the engine itself.

Owns their life cycles and the messages sent to them: a configuration, the size of caches, plans. A
rank's process (`triptych.rank_process`) builds its part of one model and runs every plan that rank
0 runs, in the same order; the communication within a step is `core.runtime.devices.rank_group`. A
rank speaks `core.transport.control` with the process that started it, as that process does with its
supervisor: it ends when the connection closes. A rank that ends by itself, or a step that fails on
any rank, ends the engine: ranks that do not run the same steps cannot be resynchronized.
"""

from __future__ import annotations

import logging
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import structs

from triptych.core.engine_api.plan import PendingStep, Plan, RankPlan, Runner
from triptych.core.errors import DeviceError, ErrorInfo, RankLost, from_info
from triptych.core.options.config import Config, ServerOptions
from triptych.core.options.server import without_keys
from triptych.core.process.typed import decode_msgpack
from triptych.core.runtime.devices.device import Device, rank_device
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.engine.rank_sampler import LeadingSampler
from triptych.core.runtime.engine.text_head import TokenSampler
from triptych.core.transport.control import Failed, FromChild, Phase, Ready
from triptych.core.weights.resolve import ResolvedModel

_PROGRAM = "triptych.rank_process"
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)
_decode_note = msgspec.json.Decoder(FromChild).decode
PlanT = TypeVar("PlanT", bound=Plan)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Met(Generic[T]):
    """The result of a meeting."""

    value: T


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a rank's process, sent as JSON. Holds secrets: never on a command line.

    `plans_fd` is an inherited socket.
    """

    config: Config
    model: ResolvedModel
    rank: int
    num_ranks: int
    meeting_file: str
    plans_fd: int = -1

    def join(self, device: Device) -> RankGroup:
        """Meet the other ranks."""
        return RankGroup.join(self.meeting_file, self.rank, self.num_ranks, device.torch)


class RankLoader(Protocol):
    """A model loader that can run as a rank."""

    def follow(self, plans: Plans, group: RankGroup, ready: Callable[[], None]) -> None:
        """Load this rank's part, report it by `ready`, and run plans until there are no more."""


class Plans:
    """A rank's end of the connection that rank 0 sends capacity and plans over."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)

    def capacity(self, kind: type[T]) -> T:
        """The capacity of rank 0, and thus of every rank: of its cache, or pixels in one piece.

        Raises `EOFError` where loading failed there.
        """
        return decode_msgpack(self._connection.recv_bytes(), kind)

    def run(self, launch: Callable[[PlanT], Any], kind: type[PlanT]) -> None:
        """Run plans until rank 0 closes the connection."""
        decode = msgspec.msgpack.Decoder(kind).decode
        with suppress(EOFError):
            while True:
                launch(decode(self._connection.recv_bytes()))


class RankProcess:
    """The process of one rank.

    Its own thread starts it and reads its messages until it ends: a process that asks Linux to end
    with its parent already ends with the thread that started it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._on_end: Callable[[], None] | None = None
        self._has_ended = False
        self._notes: queue.SimpleQueue[FromChild | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        ours, self._theirs = socket.socketpair()
        self._plans = Connection(ours.detach())
        self._thread = threading.Thread(target=self._run, name=f"triptych-rank-{rank}", daemon=True)

    @property
    def plans_fd(self) -> int:
        """The process's end of the plan connection, which it inherits."""
        return self._theirs.fileno()

    def start(self, setup: RankSetup) -> None:
        """Start the process; `expect` reports how it goes."""
        self._setup = msgspec.json.encode(setup)
        self._thread.start()

    def expect(self, kind: type[Phase] | type[Ready], timeout_s: float | None = None) -> None:
        """Wait for such a note. Raises the failure that the process reports, or `DeviceError`."""
        try:
            while not isinstance(note := self._notes.get(timeout=timeout_s), kind):
                if isinstance(note, Failed):
                    message = f"Rank {self.rank}: {note.message}"
                    raise from_info(ErrorInfo(code=note.code, message=message))
                if note is None:
                    raise DeviceError(
                        f"Rank {self.rank} ended while its part was loaded; the log says why."
                    )
        except queue.Empty:
            raise DeviceError(f"Rank {self.rank} did not start within {timeout_s:.0f} s.") from None

    def send(self, message: bytes) -> None:
        """Send the process a message. Raises `OSError` where it has ended."""
        self._plans.send_bytes(message)

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` when the process ends by itself, perhaps more than once."""
        self._on_end = on_end
        if self._has_ended:  # perhaps before this call
            on_end()

    def close(self) -> None:
        """Stop the process and join its thread."""
        self._on_end = None
        self._plans.close()
        if self._thread.ident is None:
            return
        self._thread.join(_END_TIMEOUT_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        try:
            self._follow()
        except (OSError, msgspec.MsgspecError):
            _log.exception("rank %d could not be started or understood", self.rank)
        finally:
            self._notes.put(None)
            self._has_ended = True
            if (on_end := self._on_end) is not None:  # `close` may reset it meanwhile
                on_end()

    def _follow(self) -> None:
        """Start the process, and pass on its messages until it ends."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._theirs:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our module
                    [sys.executable, "-P", "-m", _PROGRAM],
                    stdin=theirs.fileno(),
                    pass_fds=(self.plans_fd,),
                )
            with suppress(OSError), ours.makefile("rb") as reader:
                ours.sendall(self._setup + b"\n")
                for line in reader:
                    self._notes.put(_decode_note(line))
            self._process.wait()


class Ranks:
    """The ranks of one model as rank 0 sees them: `group`, and a process for each other rank."""

    def __init__(
        self, group: RankGroup, processes: Sequence[RankProcess], stack: ExitStack
    ) -> None:
        self.group = group
        self._processes = processes
        self._stack = stack

    @classmethod
    def start(cls, config: Config, model: ResolvedModel, device: Device, num_ranks: int) -> Ranks:
        """Start the processes and meet them. Raises `SetupError`; no process is left then."""
        processes = [RankProcess(rank) for rank in range(1, num_ranks)]
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-"))
            file = f"{folder}/ranks"
            setup = RankSetup(
                config=config, model=model, rank=0, num_ranks=num_ranks, meeting_file=file
            )
            for process in processes:
                stack.callback(process.close)
                process.start(_setup_of(process, setup))
            _expect_open(processes)
            group = _together(partial(setup.join, device), processes)
            return cls(group, processes, stack.pop_all())

    @classmethod
    def unmet(cls, num_ranks: int) -> Ranks:
        """No process is started: rank 0 knows its part, and may ask how large that is."""
        return cls(RankGroup.unmet(num_ranks), (), ExitStack())

    def divide(self, work: Callable[[RankGroup], T]) -> T:
        """Run `work`, in which all ranks meet. Raises `SetupError` where a rank has ended."""
        return _together(partial(work, self.group), self._processes)

    def send_capacity(self, capacity: object) -> None:
        """Make the ranks load their parts, with this capacity; see `Plans.capacity`."""
        for process in self._processes:
            with suppress(OSError):  # the rank has ended; `leading_runner` raises its reason
                process.send(msgspec.msgpack.encode(capacity))

    def send(self, plan: Plan) -> None:
        """Make the ranks run `plan`. Raises `OSError` where one has ended."""
        message = msgspec.msgpack.encode(plan)
        for process in self._processes:
            process.send(message)

    def leading_sampler(self, sampler: TokenSampler) -> LeadingSampler:
        """The sampler of rank 0."""
        return LeadingSampler(sampler, self.group)

    def leading_runner(
        self, runner: Runner, rank_plan: Callable[[Plan], RankPlan] = RankPlan
    ) -> LeadingRunner:
        """The runner of rank 0, once all ranks have loaded. Raises the failure of any of them."""
        for process in self._processes:
            process.expect(Ready)
        return LeadingRunner(runner, self, rank_plan)

    def watch(self, on_lost: Callable[[RankLost], None]) -> None:
        """Call `on_lost`, on another thread, when a rank ends by itself."""
        for process in self._processes:
            process.watch(partial(on_lost, _lost(process.rank)))

    def close(self) -> None:
        """Stop all processes."""
        self._stack.close()


class LeadingRunner:
    """A `Runner` on rank 0: the other ranks also run each plan, as `rank_plan` gives it."""

    def __init__(
        self, runner: Runner, ranks: Ranks, rank_plan: Callable[[Plan], RankPlan] = RankPlan
    ) -> None:
        self._runner, self._ranks, self._rank_plan = runner, ranks, rank_plan

    def launch(self, plan: Plan) -> PendingStep:
        """Send the plan to all ranks and launch it.

        Raises `RankLost` for any failure where ranks meet: they may be out of step then.
        """
        shared, is_sent = self._rank_plan(plan), False
        try:
            self._ranks.send(shared.plan)
            is_sent = True
            return self._runner.launch(plan)
        except Exception as error:
            if is_sent and not shared.is_shared:
                raise
            raise RankLost("A step of a divided model failed; its ranks start again.") from error

    def close(self) -> None:
        """Release rank 0's part."""
        self._runner.close()


def _expect_open(processes: Sequence[RankProcess]) -> None:
    """Wait until all ranks have opened their devices. Raises the first failure, of any rank.

    After a failure, threads still wait for the other ranks, until those are closed.
    """
    pool = ThreadPoolExecutor(len(processes), "triptych-ranks")
    notes = [pool.submit(process.expect, Phase, _START_TIMEOUT_S) for process in processes]
    pool.shutdown(wait=False)
    for note in as_completed(notes):
        note.result()


def _together(work: Callable[[], T], processes: Sequence[RankProcess]) -> T:
    """Run `work`, in which all ranks meet.

    Raises `SetupError` as soon as a rank has ended, which the meeting itself would not notice. The
    thread that waits in the meeting is then abandoned, and the file it waits at is deleted.
    """
    found: queue.SimpleQueue[_Met[T] | RankProcess | Exception] = queue.SimpleQueue()

    def meet() -> None:
        try:
            found.put(_Met(work()))
        except Exception as error:  # raised again below
            found.put(error)

    for process in processes:
        process.watch(partial(found.put, process))
    threading.Thread(target=meet, name="triptych-meeting", daemon=True).start()
    met = found.get()
    if isinstance(met, RankProcess):
        met.expect(Ready)  # an ended rank never sends it: raises the rank's failure
    if isinstance(met, _Met):
        return met.value
    raise DeviceError("The ranks did not meet; the log says why.") from (
        met if isinstance(met, Exception) else None
    )


def _setup_of(process: RankProcess, setup: RankSetup) -> RankSetup:
    """The setup of one process, from that of all.

    A rank has no clients: it needs no keys, and no stream timeout, which in a pipeline is infinite
    and has no form in JSON.
    """
    options, server = setup.config.device, setup.config.server
    device = replace(options, device=rank_device(options, process.rank))
    patience_s = ServerOptions().stream_timeout_s
    return structs.replace(
        setup,
        config=replace(
            setup.config,
            device=device,
            server=replace(without_keys(server), stream_timeout_s=patience_s),
        ),
        rank=process.rank,
        plans_fd=process.plans_fd,
    )


def _lost(rank: int) -> RankLost:
    return RankLost(f"The process of rank {rank} ended; the log says why.")
