"""Prompts that share nothing, and steps of a `token_world` by their shape."""

from support.token_world import World
from triptych.core.engine_api.plan import TokenPlan


def shape(plan: TokenPlan | None) -> list[tuple[str, int]]:
    """Job and number of tokens of each row."""
    return [(row.job_id, row.num_tokens) for row in plan.rows] if plan else []


def step(world: World) -> list[tuple[str, int]]:
    """Run one step whole."""
    plan = world.book()
    world.commit()
    world.check()
    return shape(plan)


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    """A prompt that shares nothing with prompts of another `first`."""
    return (first, *range(1, length))
