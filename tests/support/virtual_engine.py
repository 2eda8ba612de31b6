"""An engine in virtual time with a fake chat model, and what that model must say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.engine_seams import FakeLoader, FakeRunner, Recorder, next_token
from support.virtual import VirtualClock, VirtualExecutors
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.model_changes import LoadModel
from triptych.core.engine_api.plan import Plan
from triptych.core.engine_api.reports import Heartbeat
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.kv.pages import PagePool
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ScheduleOptions
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.tokens.scheduler import TokenScheduler

PAGE_SIZE = 4
VOCAB_SIZE = 1000


class Chat:
    """A fake chat model: the real token scheduler and page pool over a hash."""

    def __init__(self, *, num_pages: int = 256, options: ScheduleOptions | None = None) -> None:
        self.pool = PagePool(num_pages=num_pages, page_size=PAGE_SIZE)
        self.scheduler = TokenScheduler(
            model="chat",
            pool=self.pool,
            options=options or ScheduleOptions(max_batch_size=8, max_batch_input_tokens=32),
            max_length=512,
            namespace=b"fake",
        )
        self.runner = FakeRunner(page_size=PAGE_SIZE, vocab_size=VOCAB_SIZE)
        self.loader = FakeLoader("chat", lambda: (self.scheduler, self.runner))


class World:
    """An engine in virtual time, and the sink of all its jobs."""

    def __init__(
        self,
        loaders: Sequence[FakeLoader],
        *,
        config: Config | None = None,
        cost_s: Callable[[Plan], float] = lambda plan: 0.01,
    ) -> None:
        self.clock = VirtualClock()
        self.executors = VirtualExecutors(self.clock, cost_s)
        self.ledger = Ledger(1 << 30)
        self.engine = EngineCore(
            loaders,
            config=config or Config(),
            ledger=self.ledger,
            clock=self.clock,
            executors=self.executors,
        )
        self.beats: list[Heartbeat] = []
        self.engine.on_beat = self.beats.append
        self.outputs = Recorder()
        self.engine.change(LoadModel("chat"))

    def submit(self, job_id: str, model: str, request: object) -> None:
        self.engine.submit(
            Job(
                job_id=job_id,
                model=model,
                request=request,
                sink=self.outputs,
                arrival_s=self.clock(),
            )
        )

    def turn_until(self, condition: Callable[[], object], max_turns: int = 20_000) -> None:
        for _ in range(max_turns):
            if condition():
                return
            self.engine.take_turn()
        raise AssertionError("did not happen in so many turns")

    def finish(self, *job_ids: str) -> None:
        self.turn_until(lambda: all(map(self.outputs.final, job_ids)))

    def tokens(self, job_id: str) -> list[int]:
        deltas = [output.payload for output in self.outputs.outputs[job_id]]
        return [
            token for delta in deltas if isinstance(delta, TokenDelta) for token in delta.token_ids
        ]


def ask(prompt: Sequence[int], max_tokens: int) -> TokenRequest:
    return TokenRequest(
        prompt_ids=tuple(prompt), sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0)
    )


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the fake model says, computed apart from everything under test."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, VOCAB_SIZE))
    return token_ids[len(prompt) :]


def prompt_of(n: int, length: int = 10) -> list[int]:
    return [(7 * n + 13 * i) % VOCAB_SIZE for i in range(length)]
