"""Rows with grammars in shared steps: right whatever happens, and nobody else's burden."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jsonschema
import pytest

from support.guided import EOS, VOCABULARY, GuidedWorld, guided_request, ids_of
from support.virtual_engine import Chat, World, ask
from triptych.core.engine_api.plan import TokenPlan
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import EngineDown, OutOfMemory, WeightsError
from triptych.core.grammar.vocabulary import GrammarVocabulary
from triptych.schedulers.tokens.grammar_worker import COOL_DOWN_S, NUM_FAST, GrammarWorker

PATTERN = r"(0|[1-9][0-9]{0,2})(, und so weiter)*"
SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_it": {"type": "string", "maxLength": 4},
        "kind_of_it": {"enum": ["a rather long kind", "another", "a third one"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name_of_it", "kind_of_it", "tags"],
    "additionalProperties": False,
}


def check(text: str, reason: str | None, request: TokenRequest) -> None:
    """A finished answer follows its grammar."""
    if reason == "stop" and "whitespace_pattern" in request.grammar:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif reason == "stop":
        assert re.fullmatch(PATTERN, text)


@pytest.mark.parametrize("options", [{}, {"top_logprobs": 0}, {"repetition_penalty": 1.2}])
def test_answers_follow_the_grammar(options: dict[str, object]) -> None:
    for n in range(8):
        request = guided_request(f"p{n}", json.dumps(SCHEMA), "json_schema", **options)
        text, reason = GuidedWorld().answer(request)
        assert reason in ("stop", "length")
        check(text, reason, request)


def test_forced_tokens_are_computed_together() -> None:
    world = GuidedWorld()
    text, reason = world.answer(guided_request("p", "[a-c], that is to say[.!]"))
    assert (text[1:-1], reason) == (", that is to say", "stop")
    assert [plan.kind for plan in world.runner.plans] == ["prefill", "prefill"]
    (row,) = world.runner.plans[1].rows
    assert row.num_tokens == len(text) - 1
    assert len(row.token_ids) == row.num_tokens
    assert len(world.deltas_of("alone")) == 4  # a letter, what is forced, the last, the end


def test_where_samples_are_reported_no_token_is_skipped() -> None:
    world = GuidedWorld()
    request = guided_request("p", "[a-c], that is to say[.!]", top_logprobs=0)
    text, _ = world.answer(request)
    assert sum(plan.num_tokens for plan in world.runner.plans[1:]) == len(text) - 1
    assert all(len(plan.rows) == plan.num_tokens for plan in world.runner.plans[1:])


def test_an_answer_may_end_with_its_last_token() -> None:
    assert GuidedWorld().answer(guided_request("p", "[a-c]{4}", max_tokens=4))[1] == "stop"
    assert GuidedWorld().answer(guided_request("p", "[a-c]{5}", max_tokens=4))[1] == "length"
    text, reason = GuidedWorld().answer(guided_request("p", "[a-c] is forced", max_tokens=4))
    assert (text[1:], reason) == (" is", "length")


def test_a_sampled_stop_token_ends_an_answer_that_might_go_on() -> None:
    reasons = set()
    for n in range(12):
        world = GuidedWorld()
        world.answer(guided_request(f"{n}", "(ab|cd)*", max_tokens=12))
        final = world.outputs.final("alone")
        assert final is not None
        reasons.add((final.payload.finish_reason, final.payload.stop_token_id))
    assert ("stop", EOS) in reasons


def test_rows_with_grammars_share_steps_and_others_go_on_between() -> None:
    world = GuidedWorld(max_batch_size=8)
    for n in range(4):
        world.submit(f"guided-{n}", guided_request(f"g{n}", "[a-e]{40}", max_tokens=30))
    for n in range(2):
        world.submit(f"free-{n}", guided_request(f"f{n}", max_tokens=30))
    world.run()
    decodes = [plan for plan in world.runner.plans if plan.kind == "decode"]
    names = [frozenset(row.job_id for row in plan.rows) for plan in decodes]
    guided = {f"guided-{n}" for n in range(4)}
    assert all(guided <= step or not guided & step for step in names)
    num_guided = sum(bool(guided & step) for step in names)
    assert num_guided == 29
    # A free row takes part in every step until it is done, as it would alone.
    assert all("free-0" in step for step in names[:29])


def test_who_has_no_mask_waits_and_nobody_with_it() -> None:
    world = GuidedWorld()
    world.submit("guided", guided_request("p", PATTERN))
    world.submit("free", guided_request("q", max_tokens=6))
    while super(GuidedWorld, world).step():  # the threads find nothing
        pass
    assert world.reason("free") == "length"
    assert not world.deltas_of("guided")
    world.run()
    assert re.match(PATTERN, world.text("guided"))


def test_the_first_mask_of_a_grammar_is_kept_for_the_next_row() -> None:
    world = GuidedWorld()
    texts = [world.answer(guided_request("p", "(ab|cd)*", min_tokens=2))[0]]
    world.submit("next", guided_request("p", "(ab|cd)*", min_tokens=2))
    world.submit("other", guided_request("q", "(ab|cd)*"))  # it may end at once
    while super(GuidedWorld, world).step():  # the threads find nothing
        pass
    assert len(world.deltas_of("next")) == 1
    assert not world.deltas_of("other")
    world.run()
    assert world.text("next") == texts[0]


def test_masks_that_were_quick_so_far_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one is slow after all: then all masks come from threads again, for a while."""
    world = GuidedWorld()
    grammar_worker = world.scheduler.grammar_worker  # type: ignore[attr-defined]
    now_s = 1000.0
    monkeypatch.setattr(grammar_worker, "_clock", lambda: now_s)
    put: list[int] = []
    monkeypatch.setattr(
        grammar_worker, "_report", lambda rows: put.append(len(rows)) or report(rows)
    )
    report = partial(GrammarWorker._report, grammar_worker)
    for name in ("first", "second"):
        world.submit(name, guided_request(name, "[a-z]{60}", max_tokens=60))
    while len(world.ids("second")) < NUM_FAST + 8:
        world.step()
    assert len(put) == NUM_FAST - 1, "those of both together, after their first"
    monkeypatch.setattr("triptych.schedulers.tokens.grammar_worker.SLOW_S", -1.0)
    world.step()
    monkeypatch.undo()
    num_put = len(put)
    monkeypatch.setattr(
        grammar_worker, "_report", lambda rows: put.append(len(rows)) or report(rows)
    )
    monkeypatch.setattr(grammar_worker, "_clock", lambda: now_s)
    world.submit("third", guided_request("third", "[a-z]{30}", max_tokens=30))
    world.run()
    assert len(put) > num_put + 30, "also of a row that has always been quick"
    now_s += COOL_DOWN_S
    world.submit("fourth", guided_request("fourth", "[a-z]{30}", max_tokens=30))
    num_put = len(put)
    world.run()
    assert len(put) == num_put + NUM_FAST - 1
    assert all(re.fullmatch("[a-z]+", world.text(n)) for n in ("first", "second", "third"))
    world.scheduler.check()


def test_a_slow_grammar_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.schedulers.tokens.grammar_worker.SLOW_S", -1.0)
    world = GuidedWorld(depth=1)
    for n in range(2):
        world.submit(f"{n}", guided_request(f"p{n}", "[a-e]{20}", max_tokens=12))
    while world.find():
        pass
    while not (world.deltas_of("0") and world.deltas_of("1")):
        world.turn()
        world.find()
    before = len(world.ids("1"))
    calls = list(world.calls)
    assert len(calls) >= 1
    world.calls.clear()
    world.calls.append(calls[-1])
    world.find()
    assert super(GuidedWorld, world).step()  # the one goes on without the other
    world.calls.extend(calls[:-1])
    world.run()
    assert len(world.ids("0")) == len(world.ids("1")) == 12 > before


def test_what_the_first_grammar_needs_is_made_ahead() -> None:
    """On the thread that compiles, once the engine says so: the first grammar waits no more."""
    world = GuidedWorld()
    opened: list[GrammarVocabulary] = []
    grammar_worker = world.scheduler.grammar_worker  # type: ignore[attr-defined]
    grammar_worker._open_vocabulary = lambda: opened.append(VOCABULARY) or VOCABULARY
    assert not world.calls, "nothing is made before"
    grammar_worker.warm()
    assert (len(world.calls), opened) == (1, [])
    assert world.find()
    assert opened == [VOCABULARY]
    world.answer(guided_request("p", PATTERN))
    assert opened == [VOCABULARY]


def test_a_failure_of_work_ahead_is_reported_to_its_user() -> None:
    world = GuidedWorld()
    grammar_worker = world.scheduler.grammar_worker  # type: ignore[attr-defined]

    def damaged() -> GrammarVocabulary:
        raise WeightsError("The tokenizer is damaged.")

    grammar_worker._open_vocabulary = damaged
    grammar_worker.warm()
    assert world.find()
    world.submit("job", guided_request("p", PATTERN))
    world.run()
    final = world.outputs.final("job")
    assert final is not None
    assert final.error is not None
    assert final.error.code == "weights_error"


def test_a_model_without_grammars_refuses_by_name() -> None:
    world = World([(chat := Chat()).loader])
    world.submit("job", "chat", guided_request("p", PATTERN))
    world.finish("job")
    assert world.outputs.error_code("job") == "unsupported_option"
    assert chat.scheduler.grammar_worker is None


def test_an_engine_in_virtual_time_follows_grammars() -> None:
    chat = Chat()
    chat.scheduler.grammar_worker = GrammarWorker(lambda: VOCABULARY, start=lambda name: _InPlace())
    world = World([chat.loader])
    connected = []
    load = chat.loader.load

    def with_way(report: object) -> object:
        loaded = load(report)  # type: ignore[arg-type]
        connected.append(loaded)
        return replace(loaded, connect=chat.scheduler.connect)

    chat.loader.load = with_way  # type: ignore[method-assign, assignment]
    request = guided_request("p", "(a|b)", max_tokens=3)
    world.submit("job", "chat", request)
    world.submit("other", "chat", ask([5, 6, 7], 4))
    world.finish("job", "other")
    assert connected
    assert len(world.tokens("other")) == 4


class _InPlace:
    def put(self, call: object) -> None:
        call()  # type: ignore[operator]

    def close(self, timeout_s: float | None = None) -> None: ...


@pytest.mark.parametrize(
    ("grammar", "code"),
    [('{"grammars": [{"lark_grammar": "start: a"}]}', "invalid_request")],
)
def test_a_grammar_that_the_engine_cannot_take_ends_its_job_alone(grammar: str, code: str) -> None:
    world = GuidedWorld()
    bad = TokenRequest(prompt_ids=(5, 6), grammar=grammar)
    world.submit("bad", bad)
    world.submit("good", guided_request("p", PATTERN))
    world.run()
    assert world.reason("bad") == code
    assert re.match(PATTERN, world.text("good"))


def test_a_fault_of_ours_ends_the_job_and_not_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> GrammarVocabulary:
        raise RuntimeError("broken")

    world = GuidedWorld()
    world.scheduler.grammar_worker = GrammarWorker(broken, start=lambda name: _InPlace())
    world.scheduler.connect(world.posted.append)
    world.submit("job", guided_request("p", PATTERN))
    world.posted.popleft()()
    assert world.reason("job") == "internal_error"
    assert "broken" in caplog.text


def test_threads_find_masks_and_end() -> None:
    world = GuidedWorld()
    grammar_worker = world.scheduler.grammar_worker = GrammarWorker(lambda: VOCABULARY)
    world.scheduler.connect(world.posted.append)
    world.submit("job", guided_request("p", PATTERN, max_tokens=8))
    while world.outputs.final("job") is None:
        while world.posted:
            world.posted.popleft()()
        world.turn()
    check(world.text("job"), world.reason("job"), guided_request("p", PATTERN))
    grammar_worker.close()


def _requests(rng: random.Random) -> list[TokenRequest]:
    def one(n: int) -> TokenRequest:
        prompt = rng.choice(("p", "a longer prompt", "a longer prompt, too")) + str(n % 5)
        make = rng.choice(
            (
                partial(guided_request, prompt, PATTERN),
                partial(guided_request, prompt, json.dumps(SCHEMA), "json_schema"),
                partial(guided_request, prompt),
            )
        )
        return make(
            max_tokens=rng.choice((1, 5, 20, 60)),
            top_logprobs=rng.choice((None, None, 0)),
            min_tokens=rng.choice((0, 0, 4)),
            stop_token_ids=rng.choice(((EOS,), (), (EOS, *ids_of(",")))),
        )

    return [one(n) for n in range(20)]


def _act(
    world: GuidedWorld,
    rng: random.Random,
    coming: list[tuple[str, TokenRequest]],
    cancelled: set[str],
) -> None:
    """Do one thing that an engine, its threads or its callers may do."""
    names = [name for name in world.jobs if world.outputs.final(name) is None] or ["none"]
    name = rng.choice(names)
    acts: list[tuple[int, Callable[[], object]]] = [
        (120, world.book),
        (100, world.commit),
        (120, world.find),
        (14, lambda: coming and world.submit(*coming.pop())),
        (4, lambda: world.scheduler.set_paused(name, rng.random() < 0.5)),
        (1, lambda: cancelled.add(name) or world.scheduler.cancel(name)),
        (1, lambda: world.fail(OutOfMemory("full"))),
    ]
    weights, calls = zip(*acts, strict=True)
    rng.choices(calls, weights)[0]()


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_each_alone_whatever_happens(seed: int) -> None:
    """Preemption, pauses, cancelled jobs, want of memory, chunks and late masks."""
    rng = random.Random(seed)
    world = GuidedWorld(
        num_pages=rng.choice((41, 44, 120)),
        depth=rng.choice((1, 2, 3)),
        max_batch_size=rng.choice((2, 6)),
        max_batch_input_tokens=rng.choice((5, 16, 64)),
        enable_chunked_prefill=seed % 4 != 0,
        enable_in_flight_batching=seed % 5 != 0,
        max_preemptions=rng.choice((0, 2)),
        max_queue_size=32,
    )
    requests = {f"{n}": request for n, request in enumerate(_requests(rng))}
    coming = list(requests.items())
    cancelled: set[str] = set()
    for _ in range(1200):
        _act(world, rng, coming, cancelled)
        world.scheduler.check()
    for name, request in coming:
        world.submit(name, request)
    world.let_all_go_on()
    assert world.pool.num_leased == 0
    for name, request in requests.items():
        alone = GuidedWorld()
        text, reason = alone.answer(request)
        if name in cancelled or world.reason(name) == "out_of_memory":
            assert alone.ids("alone")[: len(world.ids(name))] == world.ids(name)
        else:
            assert (world.ids(name), world.reason(name)) == (alone.ids("alone"), reason)
            check(text, reason, request)


def test_a_failed_step_ends_its_rows_and_masks_that_come_later_are_dropped() -> None:
    world = GuidedWorld()
    world.submit("job", guided_request("p", PATTERN))
    world.find()
    world.book()
    world.fail(EngineDown("gone"))
    assert world.reason("job") == "engine_down"
    world.submit("late", guided_request("p", PATTERN))
    world.scheduler.cancel("late")
    world.run()
    assert world.reason("late") == "cancelled"
    assert not any(isinstance(plan, TokenPlan) and not plan.rows for plan in world.runner.plans)
