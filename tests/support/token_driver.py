"""A seeded driver that does to a token scheduler whatever an engine and its callers may do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.token_world import StoryDrafts, World, token_request
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import InternalError, OutOfMemory

Check = Callable[[World], None]


def random_request(rng: random.Random) -> TokenRequest:
    """Prompts from few families, so that many begin alike; answers short and long."""
    family = rng.randrange(3)
    length = rng.choice((1, 3, 4, 5, 8, 9, 9, 12, 16, 17, 24, 31))
    branch = rng.randrange(length + 1) if rng.random() < 0.3 else length
    prompt = tuple(family if i < branch else 30 + rng.randrange(3) for i in range(length))
    return token_request(
        prompt,
        priority=rng.randrange(3),
        tenant=rng.choice(("", "", "x")) + rng.choice(("", "", "", "y")),
        max_tokens=rng.choice((1, 2, 5, 9, 20, 30)),
        min_tokens=rng.choice((0, 0, 3)),
        stop_token_ids=rng.choice(((), (), (), (7,), tuple(range(0, 50, 6)))),
        prompt_logprobs=rng.random() < 0.05,
    )


def random_world(rng: random.Random, **given: Any) -> World:
    """A small server: every option at more than one value, pools that are often too small."""
    page_size = rng.choice((2, 4, 4, 8))
    return World(
        num_pages=rng.choice((6, 10, 14, 20, 40)),
        page_size=given.pop("page_size", page_size),
        max_length=rng.choice((24, 40)),
        depth=rng.choice((1, 2, 2, 3)),
        max_batch_size=rng.choice((1, 3, 6)),
        max_batch_input_tokens=rng.choice((3, 7, 11, 16, 64)),
        max_batch_total_tokens=rng.choice((0, 0, 48)),
        enable_chunked_prefill=rng.random() < 0.8,
        enable_in_flight_batching=rng.random() < 0.8,
        kvcache_ce_watermark=rng.choice((0.5, 0.95, 0.95, 1.0)),
        max_preemptions=rng.choice((0, 1, 3)),
        max_queue_size=8,
        schedule_policy=rng.choice(("fcfs", "lpm", "priority")),
        **given,
    )


def random_stateful_world(rng: random.Random) -> World:
    """A small server for a model with recurrent layers, with drafts or without."""
    error = rng.choice((0.0, 0.2, 0.9))
    drafts: Any = rng.choice((None, lambda request: StoryDrafts(request, rng, error)))
    return random_world(rng, num_snapshots=rng.choice((0, 1, 3, 8, 20)), drafts=drafts)


def random_windowed_world(rng: random.Random) -> World:
    """A small server whose window layers have pages of their own, with states or drafts."""
    kind = rng.choice(("plain", "plain", "states", "drafts", "model"))
    error = rng.choice((0.0, 0.2, 0.9))
    return random_world(
        rng,
        window=rng.choice((1, 2, 5, 8, 9, 16)),
        num_window_rows=rng.choice((1, 2, 6)),
        num_spare_windows=rng.choice((0, 0, 3, 30)),
        num_snapshots=rng.choice((1, 3, 20)) if kind == "states" else None,
        draft_pages=rng.choice((4, 12, 40)) if kind == "model" else 0,
        draft_error=error,
        drafts=(lambda request: StoryDrafts(request, rng, error)) if kind == "drafts" else None,
    )


def random_drafting_world(rng: random.Random) -> World:
    """A small server whose answers are drafted, well or badly."""
    error = rng.choice((0.0, 0.2, 0.9))
    return random_world(rng, drafts=lambda request: StoryDrafts(request, rng, error))


def random_model_drafting_world(rng: random.Random) -> World:
    """A small server whose answers a smaller model or a head drafts, often with too few pages."""
    pages, reads = rng.choice((4, 12, 40)), rng.random() < 0.5
    error = rng.choice((0.0, 0.2, 0.9))
    return random_world(rng, draft_pages=pages, draft_error=error, draft_reads=reads)


@dataclass
class Driver:
    """Acts on a world at random. `check` runs after every action."""

    world: World
    rng: random.Random
    clients: tuple[str, ...] = ("",)
    num_jobs: int = 0

    def act(self) -> None:
        """Do one thing."""
        draw = self.rng.random()
        world = self.world
        if draw < 0.42:
            world.book()
        elif draw < 0.80:
            world.commit()
        elif draw < 0.91:
            self.submit()
        elif draw < 0.94:
            self._on_some_job(world.scheduler.cancel)
        elif draw < 0.985:
            is_paused = self.rng.random() < 0.4
            self._on_some_job(lambda job_id: world.scheduler.set_paused(job_id, is_paused))
        elif draw < 0.995:
            world.fail(OutOfMemory("full"))
        elif draw < 0.9975:
            world.fail(InternalError("broken"))
        else:
            self._on_some_job(world.runner.bad_jobs.add)
        world.check()

    def submit(self) -> None:
        """One more job."""
        client = self.rng.choice(self.clients)
        self.world.submit(f"job-{self.num_jobs}", random_request(self.rng), client=client)
        self.num_jobs += 1

    def finish(self) -> None:
        """Let all jobs end; nothing may be lost."""
        self.world.finish_all()

    def _on_some_job(self, do: Callable[[str], None]) -> None:
        live = [job_id for job_id, job in self.world.jobs.items() if not job.state.is_final]
        if live:
            do(self.rng.choice(live))


def drive(
    seed: int,
    num_actions: int,
    make: Callable[[random.Random], World],
    clients: tuple[str, ...] = ("",),
) -> World:
    """A world's whole life; returns it for its counts."""
    rng = random.Random(seed)
    driver = Driver(make(rng), rng, clients)
    for _ in range(num_actions):
        driver.act()
    driver.finish()
    return driver.world
