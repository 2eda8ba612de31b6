"""An `EngineClient` in front of several replicas.

Owns the jobs: each is sent to a replica, and to another if that replica is lost before its first
output; a job that has begun ends with `EngineDown`. Also owns the joint status. Knows neither the
choice of a replica nor the transport: both are behind `Replicas`.
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
from triptych.core.engine_api.journal import JobJournal, is_of_call
from triptych.core.engine_api.model_changes import LoadModel, ModelChange, UnloadModel
from triptych.core.engine_api.step_feed import StepFeed, StepSink
from triptych.core.engine_api.streams import JobStream, StreamTable
from triptych.core.errors import (
    Draining,
    EngineDown,
    PayloadTooLarge,
    RequestTimeout,
    TriptychError,
    UnsupportedOption,
)
from triptych.core.process.logs import fields
from triptych.core.router.beats import ReplicaBeat, joint_status
from triptych.core.router.request import RoutedRequest
from triptych.core.transport.messages import MAX_MESSAGE_BYTES, MessageCodec, Outputs

MAX_TRIES = 4
"""Number of replicas that a job is sent to, one after the other, until it begins."""
MAX_EXPLAINED = 1024
"""Number of recent jobs whose routing is remembered."""
BEAT_S = 1.0
_GIVEN_UP_S = 10.0  # an older beat says nothing about its replica
_UNBEGUN = frozenset({EngineDown.code, Draining.code})
_log = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """The replica of a job no longer exists."""


class Replicas(Protocol):
    """Transport to the replicas."""

    def run(
        self, routed: RoutedRequest, message: bytes, *, is_watching: bool
    ) -> AsyncGenerator[bytes, None]:
        """Send a `Job` to its chosen replica and yield each `Output`.

        If `is_watching`, its steps are recorded from the first one on. Raises `ReplicaLost` if the
        replica disappears. Closing the generator cancels the job.
        """

    async def beats(self, *, is_watching: bool) -> Sequence[bytes]:
        """Return a `ReplicaBeat` of each replica. Raises `TimeoutError` if one does not answer."""

    async def load(self, model: str) -> None:
        """Load a model on every replica; raises the errors of loading."""

    async def unload(self, model: str) -> None:
        """Unload a model on every replica, once no job there needs it."""

    async def close(self) -> None:
        """Disconnect from the replicas, which keep running."""


class ReplicatedClient:
    """An `EngineClient` over replicas. Create, use and close it on one asyncio loop."""

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

    @property
    def journal(self) -> JobJournal:
        """The recent jobs; see `EngineClient`."""
        return self._streams.journal

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
        stream = self._streams.open(job_id, model)
        job = Job(job_id=job_id, model=model, request=request, limit_s=deadline_s, client=client)
        routed = RoutedRequest.of(model, request)._replace(choices=[])
        self._routed[job_id] = routed
        if len(self._routed) > MAX_EXPLAINED:
            del self._routed[next(iter(self._routed))]
        self._gates[job_id] = asyncio.Event()
        self._gates[job_id].set()
        # A separate context: Ray Serve takes all calls within a request's context for one call.
        task = self._jobs[job_id] = asyncio.create_task(self._run(job, routed), context=Context())
        task.add_done_callback(lambda _: self._forget(job_id))
        return stream

    def status(self) -> EngineStatus:
        """Return the joint status of all replicas."""
        oldest_s = time.monotonic() - _GIVEN_UP_S
        beats = [beat for at_s, beat in self._beats.values() if at_s > oldest_s]
        return joint_status(beats, self._num_lost)

    async def load(self, model: str) -> None:
        """Load `model` on every replica (`EngineClient.load`)."""
        await self._replicas.load(model)

    async def unload(self, model: str) -> None:
        """Unload `model` on every replica (`EngineClient.unload`)."""
        await self._replicas.unload(model)

    async def change(self, change: ModelChange) -> None:
        """Load or unload a model on every replica (`EngineClient.change`)."""
        if isinstance(change, LoadModel):
            await self.load(change.model)
        elif isinstance(change, UnloadModel):
            await self.unload(change.model)
        else:
            raise UnsupportedOption(
                "With --replicas the models are those of the start, and their engines never sleep."
            )

    def explain(self, call_id: str) -> Mapping[str, RoutedRequest]:
        """Return the routing of a recent call's jobs by job id; empty for old calls."""
        return {
            job_id: routed for job_id, routed in self._routed.items() if is_of_call(job_id, call_id)
        }

    def watch(self, sink: StepSink) -> Callable[[], None]:
        """Send every step report to `sink`, one beat late (`EngineClient.watch`)."""
        return self._feed.add(sink)

    async def close(self) -> None:
        """End every stream; the replicas keep running."""
        tasks = [self._polling, *self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._streams.fail_all(Draining("The server is shutting down."))
        await self._replicas.close()

    # -- jobs ----------------------------------------------------------------------------------

    async def _run(self, job: Job, routed: RoutedRequest) -> None:
        """Run a job on one replica, or on others if that one is lost before the job begins."""
        begun_s, job_id = time.monotonic(), job.job_id
        try:
            for _ in range(MAX_TRIES):
                if await self._try(job_id, routed, self._message(job, since_s=begun_s)):
                    return
                tried = tuple(choice.replica for choice in routed.choices or ())
                routed = routed._replace(avoided=tried)
                _log.info("sent again", extra=fields(job_id=job_id, avoided=tried))
            self._streams.fail(job_id, _lost("The replicas of this job were lost before it began"))
        except TriptychError as error:
            self._streams.fail(job_id, error)
        except Exception:  # the boundary of a job: its reader must not wait forever
            _log.exception("a job could not be run on a replica")
            self._streams.fail(job_id, _lost("The connection to the replica failed"))

    def _message(self, job: Job, *, since_s: float) -> bytes:
        """Encode a job with its remaining time. Raises `RequestTimeout`, `PayloadTooLarge`."""
        if job.limit_s is not None:
            left_s = job.limit_s - (time.monotonic() - since_s)
            if left_s <= 0:
                raise RequestTimeout("No replica could begin the request in time.")
            job = msgspec.structs.replace(job, limit_s=left_s)
        message = self._codec.encode(job)
        if len(message) > MAX_MESSAGE_BYTES:
            mib, most = len(message) / 2**20, MAX_MESSAGE_BYTES >> 20
            raise PayloadTooLarge(
                f"The model's input takes {mib:.0f} MiB, and an engine accepts at most {most} MiB."
                " Send less, or split the request."
            )
        return message

    def _forget(self, job_id: str) -> None:
        """Drop a finished job; one that was cancelled at once may not have begun."""
        self._jobs.pop(job_id, None)
        self._gates.pop(job_id, None)

    async def _try(self, job_id: str, routed: RoutedRequest, message: bytes) -> bool:
        """Run a job on one replica; false if the replica was lost before the first output."""
        has_begun = False
        with suppress(ReplicaLost):
            run = self._replicas.run(routed, message, is_watching=len(self._feed) > 0)
            async with aclosing(run) as packets:
                async for packet in packets:
                    sent = self._codec.from_engine(packet)
                    assert isinstance(sent, Outputs), "a replica sends outputs"
                    for output in sent.outputs:
                        if not has_begun and _is_refusal(output):
                            return False
                        has_begun = True
                        self._streams.deliver(output)
                    await self._gates[job_id].wait()
            if job_id not in self._streams:
                return True
        if has_begun:
            self._streams.fail(job_id, _lost("The replica that ran this job was lost"))
        return has_begun

    def _cancel(self, job_ids: tuple[str, ...]) -> None:
        for job_id in job_ids:
            if job_id in self._jobs:
                self._jobs[job_id].cancel()

    def _set_paused(self, job_ids: tuple[str, ...], is_paused: bool) -> None:
        """Stop or resume receiving outputs while a reader is slow."""
        for job_id in job_ids:
            if gate := self._gates.get(job_id):
                gate.clear() if is_paused else gate.set()

    # -- the state of all ----------------------------------------------------------------------

    async def _poll(self) -> None:
        """Request the status of all replicas periodically."""
        while True:
            try:
                packed = await self._replicas.beats(is_watching=len(self._feed) > 0)
                self._take([self._decode_beat(each) for each in packed])
            except TimeoutError:
                self._keep()
            except (msgspec.MsgspecError, ReplicaLost) as error:
                _log.warning("no status of the replicas: %s", error)
            except Exception:  # polling must go on after any error
                _log.exception("polling the replicas failed")
            await asyncio.sleep(BEAT_S)

    def _keep(self) -> None:
        """Keep all beats: a replica that does not answer is replaced soon; the others are fine."""
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
    """Whether a replica refused to begin a job, for example while draining."""
    return output.error is not None and output.error.code in _UNBEGUN


def _lost(what: str) -> EngineDown:
    return EngineDown(f"{what}; try again shortly.", retry_after_s=5.0)
