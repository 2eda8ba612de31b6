"""The client of several replicas, in front of engines that make tokens up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import pytest

from support.http import ANSWER, READY, FakeEngine
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.reports import StepReport
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import Draining, EngineDown, InvalidRequest, RequestTimeout
from triptych.core.router import client as module
from triptych.core.router.client import MAX_TRIES, ReplicaLost, ReplicatedClient
from triptych.core.router.replica import Replica
from triptych.core.router.request import RouteChoice, RoutedRequest
from triptych.core.router.router import ReplicaRouter
from triptych.core.transport.messages import MessageCodec

CODEC = MessageCodec(request=TokenRequest, payload=TokenDelta)
REQUEST = TokenRequest(prompt_ids=tuple(range(100)), sampling=SamplingParams(max_tokens=99))


@dataclass
class LocalReplicas:
    """Replicas in this process, chosen by the real router. `lost` ones end what they run."""

    engines: dict[str, FakeEngine]
    lost: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    is_stuck: bool = False
    refusing_s: float = 0.0

    def __post_init__(self) -> None:
        self.router = ReplicaRouter(seed=0)
        self.router.update(self.engines)
        self.replicas = {
            name: Replica(
                name,
                engine,  # type: ignore[arg-type]
                CODEC,
                page_size=16,
                end_process=partial(self.lost.add, name),
            )
            for name, engine in self.engines.items()
        }

    async def run(
        self, routed: RoutedRequest, message: bytes, *, is_watching: bool
    ) -> AsyncGenerator[bytes, None]:
        choice = self.router.choose(routed)
        if choice is None:
            raise ReplicaLost
        if routed.choices is not None:
            routed.choices.append(choice)
        name = choice.replica
        self.sent.append(name)
        await asyncio.sleep(self.refusing_s)
        async for packet in self.replicas[name].run(message, is_watching=is_watching):
            if name in self.lost:
                self.router.remove(name)
                raise ReplicaLost
            yield packet

    async def beats(self, *, is_watching: bool) -> Sequence[bytes]:
        if self.is_stuck:
            raise TimeoutError
        alive = [each for name, each in self.replicas.items() if name not in self.lost]
        return [each.beat(is_watching=is_watching) for each in alive]

    async def load(self, model: str) -> None:
        self.loaded.append(model)

    async def close(self) -> None: ...


@asynccontextmanager
async def serving(replicas: LocalReplicas) -> AsyncIterator[ReplicatedClient]:
    client = ReplicatedClient(replicas, CODEC, stream_timeout_s=0.2)
    try:
        yield client
    finally:
        await client.close()


async def outputs(client: ReplicatedClient, job_id: str = "job") -> list[Output]:
    return [output async for output in client.submit("m", REQUEST, job_id=job_id)]


async def test_a_job_is_answered_by_one_replica() -> None:
    replicas = LocalReplicas({"a": FakeEngine(), "b": FakeEngine()})
    async with serving(replicas) as client:
        found = await outputs(client)
        assert sum(len(each.payload.token_ids) for each in found if each.payload) == len(ANSWER)
        assert found[-1].is_final
        assert len(replicas.sent) == 1


async def test_jobs_of_a_request_are_sent_apart_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    request_id: ContextVar[str] = ContextVar("request_id", default="")
    replicas, seen = LocalReplicas({"a": FakeEngine()}), []
    choose = replicas.router.choose

    def note(routed: RoutedRequest) -> RouteChoice | None:
        seen.append(request_id.get())
        return choose(routed)

    monkeypatch.setattr(replicas.router, "choose", note)
    request_id.set("one call of Ray Serve")
    async with serving(replicas) as client:
        await asyncio.gather(*(outputs(client, str(n)) for n in range(3)))
    assert seen == [""] * 3


async def test_a_job_that_has_not_begun_goes_to_another_replica() -> None:
    replicas = LocalReplicas({"a": FakeEngine(), "b": FakeEngine()})
    choice = replicas.router.choose(RoutedRequest("m"))
    assert choice is not None
    first = choice.replica
    replicas.lost.add(first)
    async with serving(replicas) as client:
        assert (await outputs(client))[-1].is_final
    assert len(set(replicas.sent)) == 2


async def test_a_replica_that_drains_has_not_begun() -> None:
    engines = {"a": FakeEngine(error=Draining("bye")), "b": FakeEngine()}
    replicas = LocalReplicas(engines)
    async with serving(replicas) as client:
        for number in range(6):
            assert (await outputs(client, str(number)))[-1].is_final, "it meets no refusal twice"
        explained = {n: client.explain(str(n))[str(n)] for n in range(6)}
    assert "b" in replicas.sent
    ways = [[choice.replica for choice in each.choices or ()] for each in explained.values()]
    assert all(way in (["b"], ["a", "b"]) for way in ways)
    assert list(chain(*ways)) == replicas.sent


async def test_another_replica_gets_what_is_left_of_the_time() -> None:
    engines = {name: FakeEngine(error=Draining("bye")) for name in "ab"}
    replicas = LocalReplicas(engines, refusing_s=0.05)
    async with serving(replicas) as client:
        with pytest.raises(EngineDown, match="before it began"):
            [output async for output in client.submit("m", REQUEST, job_id="job", deadline_s=9.0)]
        given = [limit_s for name in "ab" for limit_s in engines[name].deadlines_s]
        assert len(given) == MAX_TRIES
        assert sorted(given, reverse=True)[-1] <= 9.0 - 0.05 * (MAX_TRIES - 1)
        with pytest.raises(RequestTimeout):
            [output async for output in client.submit("m", REQUEST, job_id="late", deadline_s=0.01)]
    assert len(replicas.sent) == MAX_TRIES + 1, "it was not sent again"


async def test_what_was_long_ago_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EXPLAINED", 2)
    async with serving(LocalReplicas({"a": FakeEngine()})) as client:
        for job_id in ("call.0", "call.1", "other.0"):
            await outputs(client, job_id)
        assert list(client.explain("call")) == ["call.1"]
        assert client.explain("cal") == {}


async def test_a_job_that_has_begun_ends_with_a_typed_error() -> None:
    replicas = LocalReplicas({"a": FakeEngine(step_s=0.01, is_endless=True)})
    async with serving(replicas) as client:
        stream = client.submit("m", REQUEST, job_id="job")
        assert not (await anext(stream)).is_final
        replicas.lost.add("a")
        with pytest.raises(EngineDown, match="replica that ran this job was lost"):
            [output async for output in stream]


async def test_without_replicas_jobs_end_after_some_tries() -> None:
    replicas = LocalReplicas({"a": FakeEngine()})
    replicas.lost.add("a")
    async with serving(replicas) as client:
        with pytest.raises(EngineDown, match="before it began"):
            await outputs(client)
    assert len(replicas.sent) < MAX_TRIES


async def test_errors_of_the_engine_arrive_as_they_are() -> None:
    replicas = LocalReplicas({"a": FakeEngine(error=InvalidRequest("no", param="x"))})
    async with serving(replicas) as client:
        with pytest.raises(InvalidRequest, match="no"):
            await outputs(client)


async def test_a_reader_that_leaves_cancels_the_job() -> None:
    engine = FakeEngine(step_s=0.005, is_endless=True)
    async with serving(LocalReplicas({"a": engine})) as client:
        stream = client.submit("m", REQUEST, job_id="job")
        await anext(stream)
        await stream.aclose()
        await until(lambda: not engine.running)
    assert engine.cancelled == ["job"]


async def test_a_reader_that_leaves_at_once_leaves_nothing_behind() -> None:
    replicas = LocalReplicas({"a": FakeEngine()})
    async with serving(replicas) as client:
        await client.submit("m", REQUEST, job_id="job").aclose()
        await asyncio.sleep(0.01)
        assert not client._jobs
        assert not client._gates
    assert not replicas.sent


async def test_a_replica_whose_engine_is_gone_ends_and_takes_no_more_jobs() -> None:
    replicas = LocalReplicas({"a": FakeEngine(), "b": FakeEngine()})
    choice = replicas.router.choose(RoutedRequest("m"))
    assert choice is not None
    first = choice.replica
    replicas.engines[first].state = replace(READY, is_alive=False)
    replicas.engines[first].error = EngineDown("crashed")
    async with serving(replicas) as client:
        for number in range(8):
            assert (await outputs(client, str(number)))[-1].is_final
    assert replicas.sent.count(first) == 1


async def test_one_that_does_not_answer_does_not_make_the_others_unready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    monkeypatch.setattr(module, "_GIVEN_UP_S", 0.2)
    replicas = LocalReplicas({"a": FakeEngine(), "b": FakeEngine()})
    async with serving(replicas) as client:
        await until(lambda: client.status().num_replicas == 2)
        replicas.is_stuck = True
        await asyncio.sleep(0.5)
        assert client.status().num_replicas == 2
        replicas.is_stuck, replicas.lost = False, {"a"}
        await until(lambda: client.status().num_replicas == 1)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_the_state_of_all_and_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    replicas = LocalReplicas({"a": WatchedEngine(), "b": WatchedEngine()})
    async with serving(replicas) as client:
        seen: list[StepReport] = []
        leave = client.watch(seen.append)
        await until(lambda: bool(seen) and client.status().num_replicas == 2)
        leave()
        assert client.status().is_ready
        await client.load("m")
    assert replicas.loaded == ["m"]


async def test_steps_of_a_job_are_recorded_from_its_first_one_on() -> None:
    engine = WatchedEngine()
    async with serving(LocalReplicas({"a": engine})) as client:
        await until(lambda: client.status().num_replicas == 1)  # asked, and not again for a second
        leave = client.watch(lambda report: None)
        await outputs(client)
        assert engine.begun_under_watch == [True]
        leave()


async def test_steps_are_recorded_no_longer_without_watchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    monkeypatch.setattr("triptych.core.router.replica._WATCHED_S", 0.05)
    engine = WatchedEngine()
    async with serving(LocalReplicas({"a": engine})) as client:
        leave = client.watch(lambda report: None)
        await outputs(client, "1")
        await asyncio.sleep(0.1)
        assert engine.is_watched, "each beat says that somebody still does"
        leave()
        await until(lambda: not engine.is_watched)
        await outputs(client, "2")
    assert engine.begun_under_watch == [True, False]


class WatchedEngine(FakeEngine):
    """Reports one step to watchers. Knows of each job whether there was one when it came."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begun_under_watch: list[bool] = []
        self.is_watched = False

    def watch(self, sink):  # type: ignore[no-untyped-def]
        self.is_watched = True
        sink(StepReport())
        return lambda: setattr(self, "is_watched", False)

    def submit(self, model, request, **more):  # type: ignore[no-untyped-def]
        self.begun_under_watch.append(self.is_watched)
        return super().submit(model, request, **more)
