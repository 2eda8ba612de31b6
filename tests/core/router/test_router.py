"""Where requests go: by seconds, by prefix, by what is loaded, and never to the dead."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.core.router.report import LoadReport
from triptych.core.router.request import CUTS, RouteChoice, RoutedRequest, prefix_keys
from triptych.core.router.router import (
    ADAPTER_S,
    OTHERS_WEIGHT,
    UNKNOWN_JOB_S,
    UNKNOWN_TOKEN_S,
    ReplicaRouter,
    RoutingPolicy,
)

MODEL = "chat"
TOKEN_S = 0.001
JOB_S = 0.2
REPORT = LoadReport(
    job_s={MODEL: JOB_S, "image": 5.0},
    token_s={MODEL: TOKEN_S},
    cache_tokens=100_000,
    ready=(MODEL, "image"),
)


def of_three(policy: RoutingPolicy = "predicted") -> ReplicaRouter:
    router = ReplicaRouter(policy, seed=0)
    router.update(["a", "b", "c"])
    for name in "abc":
        router.report(name, REPORT)
    return router


def prompt(head: int, num_tokens: int, model: str = MODEL) -> RoutedRequest:
    """A prompt that shares all of its tokens with others of the same head."""
    keys = prefix_keys(model, tuple(range(head, head + num_tokens)))
    return RoutedRequest(model, keys, num_tokens)


def send(router: ReplicaRouter, request_id: str, request: RoutedRequest) -> str:
    choice = router.choose(request)
    assert choice is not None
    router.begin(request_id, choice, request)
    return choice.replica


def chosen(router: ReplicaRouter, request: RoutedRequest) -> str:
    choice = router.choose(request)
    assert choice is not None
    return choice.replica


def test_requests_without_a_prefix_go_where_there_is_least_to_do() -> None:
    router = of_three()
    image, chat = RoutedRequest("image"), RoutedRequest(MODEL)
    busy = send(router, "image", image)
    assert router.load_s(busy) == 5.0
    sent = [send(router, f"chat{i}", chat) for i in range(4)]
    assert busy not in sent, "an image is as much work as 25 chats"
    assert sorted(map(sent.count, set(sent))) == [2, 2]


def test_a_prefix_is_followed_as_far_as_it_saves_time() -> None:
    router = of_three()
    request = prompt(0, 512)  # saves 0.5 s for itself, and twice a job's 0.2 s for others
    home = send(router, "0", request)
    sent = [send(router, str(i), request) for i in range(1, 5)]
    assert sent == [home] * 4, "until its queue is as long as that"
    assert send(router, "5", request) != home


def test_what_a_short_prefix_saves_counts_thrice() -> None:
    router = of_three()
    request = prompt(0, 128)
    home = send(router, "0", request)
    assert send(router, "1", request) == home, "0.13 s are worth a wait of 0.38 s"
    assert send(router, "2", request) != home


def test_the_longest_prefix_counts() -> None:
    router = of_three()
    first = prompt(0, 64)
    home = send(router, "0", first)
    other = next(name for name in "abc" if name != home)
    router.begin("1", RouteChoice(other), prompt(0, 256))
    router.end("0")
    router.end("1")
    assert chosen(router, prompt(0, 512)) == other
    assert chosen(router, prompt(9999, 512)) in "abc"


def test_what_a_report_says_is_the_load() -> None:
    router = of_three()
    for name, backlog_s in zip("abc", (3.0, 1.0, 2.0), strict=True):
        router.report(name, LoadReport(backlog_s=backlog_s, job_s={MODEL: 1.5}))
    assert send(router, "0", RoutedRequest(MODEL)) == "b"
    assert router.load_s("b") == 2.5
    assert chosen(router, RoutedRequest(MODEL)) == "c"
    router.report("b", LoadReport(backlog_s=0.5))  # which has the request in it
    assert router.load_s("b") == 0.5
    router.end("0")
    assert router.load_s("b") == 0.0, "never less than nothing"


def test_a_model_that_must_be_loaded_is_avoided_while_that_is_quicker() -> None:
    router = of_three()
    for name in "ab":
        router.report(name, LoadReport(ready=("image",)))
    assert send(router, "0", RoutedRequest(MODEL)) == "c"
    router.report("c", LoadReport(ready=(MODEL,), backlog_s=60.0))
    assert chosen(router, RoutedRequest(MODEL)) in ("a", "b")


def test_adapters_are_followed_among_equals() -> None:
    router = of_three()
    request = RoutedRequest("image", adapter=7)
    home = send(router, "0", request)
    router.end("0")
    assert {chosen(router, request) for _ in range(5)} == {home}
    router.report(home, LoadReport(backlog_s=2 * ADAPTER_S))
    assert chosen(router, request) != home


def test_what_was_not_timed_counts_as_something() -> None:
    router = ReplicaRouter(seed=1)
    router.update(["a", "b"])
    first = send(router, "0", RoutedRequest(MODEL))
    assert router.load_s(first) == UNKNOWN_JOB_S
    assert send(router, "1", RoutedRequest(MODEL)) != first


def test_in_turn() -> None:
    router = of_three("round-robin")
    sent = [send(router, str(i), prompt(0, 512)) for i in range(6)]
    assert sorted(sent) == sorted("abc" * 2)
    assert sent[:3] == sent[3:]


def test_what_is_avoided_is_taken_only_where_there_is_no_other() -> None:
    for policy in ("predicted", "round-robin"):
        router = of_three(policy)
        request = prompt(0, 512)
        home = send(router, "0", request)
        for number in range(6):
            assert send(router, f"1{number}", request._replace(avoided=(home,))) != home
        assert chosen(router, request._replace(avoided=("a", "b"))) == "c"
        assert chosen(router, request._replace(avoided=("a", "b", "c"))) in "abc"


def test_a_choice_says_why() -> None:
    router = of_three()
    for name in "abc":
        router.report(name, LoadReport(backlog_s=1.0, token_s={MODEL: 0.01}, cache_tokens=10_000))
    request = prompt(0, 512)
    home = send(router, "0", request)
    router.end("0")
    router.report(home, LoadReport(backlog_s=2.0, token_s={MODEL: 0.01}, cache_tokens=10_000))
    choice = router.choose(request)
    assert choice == RouteChoice(home, 2.0, 1.0, 512, 5.12)
    other = router.choose(prompt(9999, 512))
    assert other is not None
    assert (other.wait_s, other.held_tokens, other.saved_s) == (1.0, 0, 0.0)


def test_without_replicas_there_is_nowhere_to_go() -> None:
    for policy in ("predicted", "round-robin"):
        assert ReplicaRouter(policy).choose(RoutedRequest(MODEL)) is None  # type: ignore[arg-type]


def test_slots_are_reused_after_many_replicas_have_come_and_gone() -> None:
    router = ReplicaRouter(seed=2)
    for generation in range(300):
        names = [f"{generation}-{i}" for i in range(2)]
        router.update(names)
        for name in names:
            router.report(name, REPORT)
        assert send(router, str(generation), prompt(generation % 5, 512)) in names
    assert len(router.names) == 2


@pytest.mark.parametrize("policy", ["predicted", "round-robin"])
def test_a_replica_that_was_removed_comes_back_empty(policy: RoutingPolicy) -> None:
    router = of_three(policy)
    home = send(router, "0", prompt(0, 512))
    router.remove(home)
    router.remove(home)
    router.end("0")
    assert home not in router
    router.update(["a", "b", "c"])
    assert router.load_s(home) == 0.0


class RandomTraffic(RuleBasedStateMachine):
    """Replicas come, go and report while requests begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.router = ReplicaRouter(seed=3)
        self.alive: set[str] = set()
        self.open: list[str] = []
        self.num_sent = 0

    @rule(names=st.sets(st.sampled_from("abcdefgh"), max_size=8))
    def replace(self, names: set[str]) -> None:
        self.alive = names
        self.router.update(names)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), backlog_s=st.floats(0, 20), num=st.sampled_from([0, 4096, 9999]))
    def report(self, data: st.DataObject, backlog_s: float, num: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        report = LoadReport(
            backlog_s=backlog_s, job_s={MODEL: JOB_S}, token_s={MODEL: TOKEN_S}, cache_tokens=num
        )
        self.router.report(name, report)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.remove(name)
        self.router.remove(name)

    @rule(head=st.integers(0, 3), num_tokens=st.sampled_from([10, 64, 300, 2000]))
    def send(self, head: int, num_tokens: int) -> None:
        request = prompt(head, num_tokens)
        choice = self.router.choose(request)
        if not self.alive:
            assert choice is None
            return
        assert choice is not None
        name = choice.replica
        assert name in self.alive, "the dead get nothing"
        least_s = min(map(self.router.load_s, self.alive))
        saved_s = num_tokens * max(TOKEN_S, UNKNOWN_TOKEN_S)
        worth_s = saved_s + OTHERS_WEIGHT * min(saved_s, max(JOB_S, UNKNOWN_JOB_S))
        assert self.router.load_s(name) <= least_s + worth_s + ADAPTER_S, (
            "balance is bounded by what is saved"
        )
        self.num_sent += 1
        self.router.begin(str(self.num_sent), choice, request)
        self.open.append(str(self.num_sent))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.open))
        self.open.remove(request_id)
        self.router.end(request_id)

    @invariant()
    def loads_are_no_debts(self) -> None:
        assert set(self.router.names) == self.alive
        assert all(self.router.load_s(name) >= 0 for name in self.alive)

    @invariant()
    def capacity_is_that_of_all(self) -> None:
        reports = [replica.report for replica in self.router._replicas.values()]
        held = sum(report.cache_tokens for report in reports)
        assert self.router._prefixes.capacity_tokens == held


TestRandomTraffic = RandomTraffic.TestCase
TestRandomTraffic.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@settings(max_examples=30, deadline=None)
@given(jobs=st.lists(st.sampled_from([MODEL, "image"]), min_size=1, max_size=60))
def test_without_prefixes_no_replica_is_ahead_by_more_than_one_job(jobs: list[str]) -> None:
    """The bound of list scheduling: a job goes to the least load, so it ends at most one above."""
    router = of_three()
    for number, model in enumerate(jobs):
        send(router, str(number), RoutedRequest(model))
    loads = [router.load_s(name) for name in "abc"]
    assert max(loads) - min(loads) <= REPORT.job_s["image"] + 1e-9


def test_keys_follow_from_all_before_them() -> None:
    ids = tuple(range(300))
    keys = prefix_keys("m", ids)
    assert len(keys) == sum(cut <= 300 for cut in CUTS) == 3
    assert prefix_keys("m", ids[:64]) == keys[:1]
    changed = (7, *ids[1:])
    assert not set(prefix_keys("m", changed)) & set(keys)
    assert not set(prefix_keys("other", ids)) & set(keys)
