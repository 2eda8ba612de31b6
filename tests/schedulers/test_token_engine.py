"""The token scheduler under the real engine loop, its threads and its overlap."""

import random
from collections.abc import Callable

from support.token_driver import random_request
from support.token_world import MODEL, ShadowRunner, World, expected_answer
from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.plan import Plan, StepResult, TokenPlan
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ScheduleOptions
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.engine import EngineCore


class Pending:
    """A step that is over as soon as somebody asks."""

    def __init__(self, runner: ShadowRunner, plan: TokenPlan) -> None:
        self._runner = runner
        self._plan = plan
        self._result = runner.run(plan)

    def result(self) -> StepResult:
        self._runner.finish(self._plan)
        return self._result


class Loader:
    """Offers a world's scheduler and runner as a model."""

    name = MODEL

    def __init__(self, world: World) -> None:
        self._world = world

    def launch(self, plan: Plan) -> Pending:
        assert isinstance(plan, TokenPlan)
        return Pending(self._world.runner, plan)

    def close(self) -> None:
        pass

    def check_size(self) -> None:
        pass

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        return LoadedModel(
            name=MODEL, scheduler=self._world.scheduler, runner=self, close=self.close
        )


def test_every_job_gets_its_answer_and_every_page_comes_back() -> None:
    options = {"max_batch_size": 5, "max_batch_input_tokens": 16, "max_queue_size": 200}
    world = World(num_pages=16, **options)
    config = Config(schedule=ScheduleOptions(**options))
    engine = EngineCore([Loader(world)], config=config, ledger=Ledger(0))
    rng = random.Random(5)
    outputs: dict[str, list[Output]] = {}
    for index in range(120):
        job_id = f"{index}"
        world.requests[job_id] = random_request(rng)
        outputs[job_id] = []
        engine.submit(
            Job(
                job_id=job_id,
                model=MODEL,
                request=world.requests[job_id],
                sink=outputs[job_id].append,
                arrival_s=engine.clock(),
            )
        )
        if index % 7 == 3:
            engine.set_paused([job_id], True)
            engine.cancel([f"{index - 1}"])
            engine.set_paused([job_id], False)
    engine.drain()
    engine.run()
    world.check()
    assert world.pool.num_leased == 0
    for job_id, sent in outputs.items():
        assert [output.is_final for output in sent].count(True) == 1
        last = sent[-1]
        if last.payload is not None and last.payload.finish_reason != "cancelled":
            ids = tuple(token for output in sent for token in output.payload.token_ids)
            expected = expected_answer(world.requests[job_id], world.max_length)
            assert (ids, last.payload.finish_reason) == expected
    finished = [sent for sent in outputs.values() if sent[-1].error is None]
    assert len(finished) > 100
