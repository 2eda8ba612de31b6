"""The life of token jobs: chunks, answers, endings."""

from fakes_tokens import World, token_request


def test_a_prompt_is_answered() -> None:
    world = World()
    world.submit("a", token_request((1, 2, 3, 4, 5), max_tokens=6))
    world.finish_all()
    assert len(world.output_ids("a")) == 6


def test_many_overlap() -> None:
    world = World(depth=2, num_pages=14, max_batch_size=6, max_batch_input_tokens=12)
    for index in range(40):
        prompt = tuple((index // 4 + i) % 20 for i in range(1 + index % 19))
        world.submit(f"{index}", token_request(prompt, max_tokens=1 + index % 23))
    world.finish_all()
    assert world.scheduler.stats().counters["preemptions_total"] > 0
