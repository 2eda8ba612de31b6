"""`EngineClient` in front of several replicas: whoever submits a job need not know which runs it.

Owns the jobs: each goes to a replica, and once more to another if that one is lost before it has
sent anything; one that has begun ends with `EngineDown`. Owns the joint state, too. Which replica
gets a job, and how bytes travel, is behind `Replicas`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import Context
from typing import Any, Protocol

import msgspec

from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.step_feed import StepFeed, StepSink
from triptych.core.engine_api.streams import JobStream, StreamTable
from triptych.core.errors import (
    Draining,
    EngineDown,
    PayloadTooLarge,
    RequestTimeout,
    TriptychError,
)
from triptych.core.process.logs import fields
from triptych.core.router.beats import ReplicaBeat, joint_status
from triptych.core.router.request import RoutedRequest
from triptych.core.transport.messages import MAX_MESSAGE_BYTES, MessageCodec

MAX_TRIES = 4
"""Replicas that a job which has not begun is sent to, one after the other."""
MAX_EXPLAINED = 1024
"""Jobs, the latest ones, of which it is known where they went and why."""
BEAT_S = 1.0
_GIVEN_UP_S = 10.0  # a beat this old is no news of its replica any more
_UNBEGUN = frozenset({EngineDown.code, Draining.code})
_log = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """The replica that had a job is not there any more."""


class Replicas(Protocol):
    """The way to the replicas."""

    def run(
        self, routed: RoutedRequest, message: bytes, *, is_watching: bool
    ) -> AsyncGenerator[bytes, None]:
        """Send a `Job` to the replica chosen for it; each `Output` that comes back.

        While somebody `is_watching`, its steps are recorded from the first one on. Raises
        `ReplicaLost` where the replica goes. Closing it cancels the job.
        """

    async def beats(self, *, is_watching: bool) -> Sequence[bytes]:
        """A `ReplicaBeat` of each replica. Raises `TimeoutError` where one does not answer."""

    async def load(self, model: str) -> None:
        """Have every replica load a model; raises what loading raised."""

    async def close(self) -> None:
        """Let go of the replicas; they stay."""


class ReplicatedClient:
    """`EngineClient` over replicas. Made, used and closed on one asyncio loop."""

    def __init__(self, replicas: Replicas, codec: MessageCodec, *, stream_timeout_s: float) -> None:
        self._replicas = replicas
        self._codec = codec
        self._streams = StreamTable(
            on_cancel=self._cancel, on_pause=self._set_paused, stream_timeout_s=stream_timeout_s
        )
        self._feed = StepFeed(lambda is_on: None)
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._routed: dict[str, RoutedRequest] = {}
        self._beats: dict[str, tuple[float, ReplicaBeat]] = {}
        self._num_lost = 0
        self._decode_beat = msgspec.msgpack.Decoder(ReplicaBeat).decode
        self._polling = asyncio.create_task(self._poll())

    def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> JobStream:
        """Run one job (`EngineClient.submit`)."""
        stream = self._streams.open(job_id)
        job = Job(job_id=job_id, model=model, request=request, limit_s=deadline_s, client=client)
        routed = RoutedRequest.of(model, request)._replace(choices=[])
        self._routed[job_id] = routed
        if len(self._routed) > MAX_EXPLAINED:
            del self._routed[next(iter(self._routed))]
        self._gates[job_id] = asyncio.Event()
        self._gates[job_id].set()
        # A context of its own: Ray Serve would take all that is sent in a request's for one call.
        task = self._jobs[job_id] = asyncio.create_task(self._run(job, routed), context=Context())
        task.add_done_callback(lambda _: self._forget(job_id))
        return stream

    def status(self) -> EngineStatus:
        """All replicas as one engine."""
        oldest_s = time.monotonic() - _GIVEN_UP_S
        beats = [beat for at_s, beat in self._beats.values() if at_s > oldest_s]
        return joint_status(beats, self._num_lost)

    async def load(self, model: str) -> None:
        """Load `model` on every replica (`EngineClient.load`)."""
        await self._replicas.load(model)

    def explain(self, call_id: str) -> Mapping[str, RoutedRequest]:
        """Where the jobs of a call went and why, by their ids; of one long ago there is nothing."""
        return {
            job_id: routed
            for job_id, routed in self._routed.items()
            if job_id.partition(".")[0] == call_id
        }

    def watch(self, sink: StepSink) -> Callable[[], None]:
        """Have every report of steps given to `sink`, a beat late (`EngineClient.watch`)."""
        return self._feed.add(sink)

    async def close(self) -> None:
        """End every stream; the replicas stay."""
        tasks = [self._polling, *self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._streams.fail_all(Draining("The server is shutting down."))
        await self._replicas.close()

    # -- jobs ----------------------------------------------------------------------------------

    async def _run(self, job: Job, routed: RoutedRequest) -> None:
        """Follow a job on one replica, or on another if that one is lost before it begins."""
        begun_s, job_id = time.monotonic(), job.job_id
        try:
            for _ in range(MAX_TRIES):
                if await self._try(job_id, routed, self._message(job, since_s=begun_s)):
                    return
                tried = tuple(choice.replica for choice in routed.choices or ())
                routed = routed._replace(avoided=tried)
                _log.info("sent again", extra=fields(job_id=job_id, avoided=tried))
            self._streams.fail(job_id, _lost("Its replicas were lost before it began"))
        except TriptychError as error:
            self._streams.fail(job_id, error)
        except Exception:  # the boundary of a job: its reader must not wait for ever
            _log.exception("a job could not be followed")
            self._streams.fail(job_id, _lost("The way to its replica failed"))

    def _message(self, job: Job, *, since_s: float) -> bytes:
        """A job with what is left of its time. Raises `RequestTimeout`, `PayloadTooLarge`."""
        if job.limit_s is not None:
            left_s = job.limit_s - (time.monotonic() - since_s)
            if left_s <= 0:
                raise RequestTimeout("No replica could begin the request in time.")
            job = msgspec.structs.replace(job, limit_s=left_s)
        message = self._codec.encode(job)
        if len(message) > MAX_MESSAGE_BYTES:
            mib, most = len(message) / 2**20, MAX_MESSAGE_BYTES >> 20
            raise PayloadTooLarge(
                f"What the model is to read takes {mib:.0f} MiB; at most {most} go to an engine at"
                " once. Send less, or in smaller pieces."
            )
        return message

    def _forget(self, job_id: str) -> None:
        """A job's task is over; one that was cancelled at once has not even begun."""
        self._jobs.pop(job_id, None)
        self._gates.pop(job_id, None)

    async def _try(self, job_id: str, routed: RoutedRequest, message: bytes) -> bool:
        """Follow a job on one replica; false if that was lost, and no output of it has come."""
        has_begun = False
        with suppress(ReplicaLost):
            way = self._replicas.run(routed, message, is_watching=len(self._feed) > 0)
            async with aclosing(way) as packets:
                async for packet in packets:
                    output = self._codec.from_engine(packet)
                    assert isinstance(output, Output), "a replica sends outputs"
                    if not has_begun and _is_refusal(output):
                        return False
                    has_begun = True
                    self._streams.deliver(output)
                    await self._gates[job_id].wait()
            if job_id not in self._streams:
                return True
        if has_begun:
            self._streams.fail(job_id, _lost("The replica that worked on this was lost"))
        return has_begun

    def _cancel(self, job_ids: tuple[str, ...]) -> None:
        for job_id in job_ids:
            if job_id in self._jobs:
                self._jobs[job_id].cancel()

    def _set_paused(self, job_ids: tuple[str, ...], is_paused: bool) -> None:
        """Leave outputs where they are while a reader is slow."""
        for job_id in job_ids:
            if gate := self._gates.get(job_id):
                gate.clear() if is_paused else gate.set()

    # -- the state of all ----------------------------------------------------------------------

    async def _poll(self) -> None:
        """Ask the replicas how they are, again and again."""
        while True:
            try:
                packed = await self._replicas.beats(is_watching=len(self._feed) > 0)
                self._take([self._decode_beat(each) for each in packed])
            except TimeoutError:
                self._keep()
            except (msgspec.MsgspecError, ReplicaLost) as error:
                _log.warning("no news of the replicas: %s", error)
            except Exception:  # asking must go on, whatever came back
                _log.exception("the replicas could not be asked")
            await asyncio.sleep(BEAT_S)

    def _keep(self) -> None:
        """A replica that does not answer is replaced in time: until then the others are well."""
        now_s = time.monotonic()
        self._beats = {name: (now_s, beat) for name, (_, beat) in self._beats.items()}
        _log.warning("a replica does not answer")

    def _take(self, beats: Sequence[ReplicaBeat]) -> None:
        now_s = time.monotonic()
        for beat in beats:
            self._beats[beat.replica] = now_s, beat
            for report in beat.steps:
                self._feed.deliver(report)
        gone = [name for name, (at_s, _) in self._beats.items() if at_s < now_s - _GIVEN_UP_S]
        for name in gone:
            was_draining = self._beats.pop(name)[1].is_draining
            self._num_lost += not was_draining


def _is_refusal(output: Output) -> bool:
    """Whether a replica says that it cannot begin a job, as one that drains does."""
    return output.error is not None and output.error.code in _UNBEGUN


def _lost(what: str) -> EngineDown:
    return EngineDown(f"{what}; try again shortly.", retry_after_s=5.0)
