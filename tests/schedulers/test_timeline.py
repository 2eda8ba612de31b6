"""Who goes next: shares, deadlines and the starvation bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.schedulers.base import Proposal
from triptych.schedulers.cost import UNKNOWN_COST_S, CostModel, RecentSteps
from triptych.schedulers.timeline import (
    FAIR_FLOOR,
    GAP_SHARE,
    MAX_WAIT_S,
    NUM_NARROW,
    WIDE_S,
    Timeline,
)


def proposal(model: str, due_s: float, cost_s: float, *, is_known: bool = True) -> Proposal:
    return Proposal(model=model, due_s=due_s, cost_s=cost_s, is_known=is_known)


costs = st.floats(0.02, 0.3)
quick = settings(max_examples=40, deadline=None)


@dataclass
class Periodic:
    """Speech-like work: one step of `cost_s` released every `period_s`, due a period later."""

    period_s: float
    cost_s: float
    num_done: int = 0

    def release_s(self) -> float:
        return self.num_done * self.period_s

    def due_s(self) -> float:
        return (self.num_done + 1) * self.period_s


class Simulation:
    """One device, endless steps beside periodic ones, in exact time."""

    def __init__(
        self, timeline: Timeline, endless: Mapping[str, float], periodic: Mapping[str, Periodic]
    ) -> None:
        self.timeline = timeline
        self.endless = endless
        self.periodic = periodic
        self.now_s = 0.0
        self.served_s: Counter[str] = Counter()
        self.last_served_s = dict.fromkeys(endless, 0.0)
        self.longest_wait_s = 0.0
        self.lateness_s = dict.fromkeys(periodic, -math.inf)

    def run(self, end_s: float) -> None:
        while self.now_s < end_s:
            candidates = [proposal(name, math.inf, cost) for name, cost in self.endless.items()]
            candidates += [
                proposal(name, work.due_s(), work.cost_s)
                for name, work in self.periodic.items()
                if work.release_s() <= self.now_s
            ]
            if not candidates:
                self.now_s = min(work.release_s() for work in self.periodic.values())
                continue
            self._serve(self.timeline.pick(candidates, self.now_s))

    def _serve(self, chosen: Proposal) -> None:
        self.timeline.charge(chosen.model, chosen.cost_s)
        self.served_s[chosen.model] += chosen.cost_s
        if chosen.model in self.endless:
            waited_s = self.now_s - self.last_served_s[chosen.model]
            self.longest_wait_s = max(self.longest_wait_s, waited_s)
        self.now_s += chosen.cost_s
        if chosen.model in self.endless:
            self.last_served_s[chosen.model] = self.now_s
        else:
            work = self.periodic[chosen.model]
            late_s = self.now_s - work.due_s()
            self.lateness_s[chosen.model] = max(self.lateness_s[chosen.model], late_s)
            work.num_done += 1


@given(st.lists(st.tuples(costs, st.floats(0.5, 3.0)), min_size=2, max_size=5))
@quick
def test_service_is_shared_by_weight(models: list[tuple[float, float]]) -> None:
    endless = {f"m{n}": cost for n, (cost, _) in enumerate(models)}
    weights = {f"m{n}": weight for n, (_, weight) in enumerate(models)}
    simulation = Simulation(Timeline(weights=weights), endless, {})
    simulation.run(20.0)
    received = {name: simulation.served_s[name] / weights[name] for name in endless}
    # Start-time fair queueing: no two differ by more than one step of each.
    steps = [endless[name] / weights[name] for name in endless]
    assert max(received.values()) - min(received.values()) <= 2 * max(steps) + 1e-9


def test_a_model_that_idled_brings_no_credit() -> None:
    timeline = Timeline()
    Simulation(timeline, {"old": 0.1}, {}).run(50.0)
    late = Simulation(timeline, {"old": 0.1, "new": 0.1}, {})
    late.run(2.0)
    assert abs(late.served_s["old"] - late.served_s["new"]) <= 0.2 + 1e-9


@given(
    periods=st.lists(st.floats(0.04, 0.5), min_size=1, max_size=3),
    load=st.floats(0.05, 0.5),
    foreign=st.lists(costs, min_size=1, max_size=3),
)
@quick
def test_a_feasible_deadline_is_late_by_one_foreign_step_at_most(
    periods: list[float], load: float, foreign: list[float]
) -> None:
    periodic = {
        f"voice{n}": Periodic(period, period * load / len(periods))
        for n, period in enumerate(periods)
    }
    endless = {f"prefill{n}": cost for n, cost in enumerate(foreign)}
    simulation = Simulation(Timeline(), endless, periodic)
    simulation.run(15.0)
    # The one step that was running, and a turn of each other voice that is late as well.
    others_s = sum(sorted(work.cost_s for work in periodic.values())[1:])
    assert max(simulation.lateness_s.values()) <= max(foreign) + others_s + 1e-9


@given(period=st.floats(0.04, 0.5), load=st.floats(0.05, 0.4), prompt=st.floats(0.02, 0.3))
@quick
def test_a_model_that_is_always_late_does_not_make_others_late(
    period: float, load: float, prompt: float
) -> None:
    periodic = {"voice": Periodic(period, period * load), "chat": Periodic(0.02, prompt)}
    simulation = Simulation(Timeline(), {}, periodic)
    simulation.run(15.0)
    assert simulation.lateness_s["voice"] <= 2 * prompt + 1e-9


@given(periods=st.lists(st.floats(0.5, 1.0), min_size=1, max_size=3), step=st.floats(0.01, 0.1))
@quick
def test_deadlines_with_room_are_all_met(periods: list[float], step: float) -> None:
    periodic = {f"voice{n}": Periodic(period, 0.02) for n, period in enumerate(periods)}
    simulation = Simulation(Timeline(), {"prefill": step}, periodic)
    simulation.run(15.0)
    assert max(simulation.lateness_s.values()) <= 0.0
    assert simulation.served_s["prefill"] > 10.0


@given(
    overload=st.floats(1.0, 5.0),
    foreign=st.lists(costs, min_size=1, max_size=4),
    num_voices=st.integers(1, 3),
)
@quick
def test_missed_deadlines_starve_no_model(
    overload: float, foreign: list[float], num_voices: int
) -> None:
    periodic = {
        f"voice{n}": Periodic(0.08, 0.08 * overload / num_voices) for n in range(num_voices)
    }
    endless = {f"prefill{n}": cost for n, cost in enumerate(foreign)}
    simulation = Simulation(Timeline(), endless, periodic)
    simulation.run(60.0)
    steps = [*foreign, *(work.cost_s for work in periodic.values())]
    patience_s = max(MAX_WAIT_S, 3 * sum(steps))
    assert simulation.longest_wait_s <= patience_s + 2 * len(steps) * max(steps) / FAIR_FLOOR
    spared_s = sum(simulation.served_s[name] for name in endless)
    assert spared_s >= FAIR_FLOOR * (60.0 - patience_s) - max(steps)


def picks(timeline: Timeline, steps: Mapping[str, float], num_picks: int) -> list[str]:
    """Who is picked: `chat` always has a token due in a while, the others have no listener."""
    order: list[str] = []
    now_s = 0.0
    for _ in range(num_picks):
        candidates = [
            proposal(name, now_s + 0.5 if name == "chat" else math.inf, cost_s)
            for name, cost_s in steps.items()
        ]
        chosen = timeline.pick(candidates, now_s)
        timeline.charge(chosen.model, chosen.cost_s)
        now_s += chosen.cost_s
        order.append(chosen.model)
    return order


@given(
    token_s=st.floats(0.005, 0.05), others=st.lists(st.floats(0.001, 0.2), min_size=1, max_size=3)
)
@quick
def test_between_two_tokens_the_others_get_less_than_a_token_but_seldom(
    token_s: float, others: list[float]
) -> None:
    steps = {"chat": token_s} | {f"images{index}": cost for index, cost in enumerate(others)}
    order = picks(Timeline(), steps, 400)
    between = "".join("|" if name == "chat" else name[-1] for name in order).split("|")
    gaps = [[others[int(index)] for index in gap] for gap in between[1:-1]]
    wide = [at for at, gap in enumerate(gaps) if sum(gap) > GAP_SHARE * token_s + 1e-9]
    longest_s = max(WIDE_S, GAP_SHARE * token_s + max(others))
    assert all(sum(gaps[at]) <= longest_s + 1e-9 for at in wide)
    assert all(later - earlier > NUM_NARROW for earlier, later in pairwise(wide))
    used = [at for at, gap in enumerate(gaps) if gap]
    patience = NUM_NARROW + 1 + longest_s / token_s
    assert all(later - earlier <= patience for earlier, later in pairwise(used))
    assert set(order) == set(steps), "no model is passed over for ever"


def test_gaps_are_filled_where_they_are() -> None:
    order = picks(Timeline(), {"chat": 0.016, "images": 0.01}, 40)
    assert order[3:] == ["chat", "images"] * 18 + ["chat"]
    order = picks(Timeline(), {"chat": 0.016, "images": 0.005}, 40)
    assert order[5:] == ["chat", "images", "images"] * 11 + ["chat", "images"]


def test_what_fits_no_gap_is_gathered_in_wide_ones() -> None:
    """Steps of 20 ms beside tokens of 10: five at once, then none for a while."""
    order = "".join(name[0] for name in picks(Timeline(), {"chat": 0.01, "images": 0.02}, 200))
    bursts = [run for run in order.strip("c").split("c") if run]
    assert {len(burst) for burst in bursts[1:-1]} == {5}
    assert all(len(run) == NUM_NARROW + 1 for run in order.strip("ci").split("i") if run)


def test_what_fits_narrow_gaps_does_not_wait_behind_what_does_not() -> None:
    order = picks(Timeline(), {"chat": 0.01, "images": 0.02, "texts": 0.002}, 400)
    assert order.count("texts") > 0.6 * order.count("chat")
    assert order.count("images") >= 5 * (order.count("chat") // (NUM_NARROW + 12))
    gaps = "".join(name[0] for name in order).split("c")
    assert max(gap.count("t") for gap in gaps[2:]) <= 0.1 / 0.002


def test_a_model_that_rests_makes_no_step_short() -> None:
    timeline = Timeline()
    picks(timeline, {"chat": 0.016}, 3)
    assert timeline.step_budget_s("images", {"chat"}) == WIDE_S
    for _ in range(20):
        timeline.pick([proposal("images", math.inf, 0.06)], 0.0)
    assert timeline.step_budget_s("images", {"chat"}) == math.inf


def test_what_is_not_known_is_let_in() -> None:
    timeline = Timeline()
    picks(timeline, {"chat": 0.016, "images": 0.1}, 10)
    for is_known in (True, False):
        pair = [
            proposal("chat", 9.0, 0.016),
            proposal("images", math.inf, 0.02, is_known=is_known),
        ]
        assert (timeline.pick(pair, 0.0).model == "chat") == is_known


def test_a_model_without_gaps_saves_no_credit() -> None:
    timeline = Timeline()
    picks(timeline, {"chat": 0.016, "images": 0.01}, 2000)
    order = picks(timeline, {"chat": 0.016, "images": 0.01, "files": 0.01}, 60)
    assert order.count("chat") >= 25
    assert abs(order.count("images") - order.count("files")) <= 2 + WIDE_S / 0.01


def test_how_long_a_step_may_be_with_others_is_known_from_theirs() -> None:
    timeline = Timeline()
    assert timeline.step_budget_s("images", {"chat"}) == math.inf
    assert picks(timeline, {"chat": 0.016, "images": 0.01}, 6)[-2:] == ["images", "chat"]
    assert math.isclose(timeline.step_budget_s("images", {"chat", "files"}), GAP_SHARE * 0.016)
    assert picks(timeline, {"chat": 0.016, "images": 0.01}, 1) == ["images"]
    assert math.isclose(timeline.step_budget_s("images", {"chat"}), GAP_SHARE * 0.016 - 0.01)
    picks(timeline, {"chat": 0.016}, NUM_NARROW)
    assert timeline.step_budget_s("images", {"chat", "files"}) == WIDE_S
    assert timeline.step_budget_s("files", {"images"}) == math.inf


def test_a_step_with_a_deadline_is_bound_by_no_gap() -> None:
    timeline = Timeline()
    pair = [proposal("chat", 9.0, 0.016), proposal("voice", 9.0, 0.01)]
    for _ in range(4):
        timeline.charge(timeline.pick(pair, 0.0).model, 0.01)
    assert timeline.step_budget_s("voice", {"chat"}) == math.inf
    timeline.pick([pair[0], proposal("voice", math.inf, 0.01)], 0.0)
    assert timeline.step_budget_s("voice", {"chat"}) < math.inf


def test_what_just_such_a_step_took_is_known() -> None:
    model = CostModel()
    for rows, seconds in ((1, 0.01), (8, 0.5), (2, 0.012), (8, 0.5), (1, 0.01)):
        model.observe("denoise", {"rows": rows}, seconds)
    assert model.predict("denoise", {"rows": 8}) == 0.5, "whatever a line through all would say"
    assert model.predict("denoise", {"rows": 1}) == 0.01
    assert model.measured_s("denoise", {"rows": 2}) is None, "once is not enough"


def test_kinds_that_are_alike_are_one_quantity() -> None:
    model = CostModel(same_kinds=frozenset(("decode", "prefill")))
    model.observe("decode", {"rows": 4}, 0.04)
    assert math.isclose(model.predict("prefill", {"rows": 8}), 0.08, rel_tol=0.01)
    assert not model.is_known("prefill")


def test_cost_is_learned_per_kind_and_work() -> None:
    model = CostModel()
    assert model.predict("prefill", {"tokens": 100}) == UNKNOWN_COST_S
    assert not model.is_known("prefill")
    for tokens in (512, 64, 1024, 1, 300, 777, 12, 900):
        model.observe("prefill", {"tokens": tokens}, 0.002 + 0.0001 * tokens)
    assert math.isclose(model.predict("prefill", {"tokens": 500}), 0.052, rel_tol=0.02)
    assert model.predict("decode", {"rows": 1}) == UNKNOWN_COST_S


def test_a_slow_first_step_is_forgotten_and_one_outlier_moves_little() -> None:
    model = CostModel()
    model.observe("decode", {"rows": 8}, 60.0)
    for _ in range(50):
        model.observe("decode", {"rows": 8}, 0.01)
    assert math.isclose(model.predict("decode", {"rows": 8}), 0.01, rel_tol=0.01)
    model.observe("decode", {"rows": 8}, 5.0)
    assert model.predict("decode", {"rows": 8}) < 0.013


def test_cost_follows_a_drift() -> None:
    model = CostModel()
    for _ in range(100):
        model.observe("decode", {"rows": 8}, 0.01)
    for _ in range(100):
        model.observe("decode", {"rows": 8}, 0.03)
    assert math.isclose(model.predict("decode", {"rows": 8}), 0.03, rel_tol=0.1)


@quick
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9), st.floats(1e-6, 1e3)), max_size=60))
def test_predictions_stay_finite_and_positive(steps: list[tuple[float, float, float]]) -> None:
    model = CostModel()
    for tokens, context, seconds in steps:
        work = {"tokens": tokens, "context": context}
        model.observe("mixed", work, seconds)
        assert 0 < model.predict("mixed", work) < math.inf


def test_p99_is_of_recent_steps() -> None:
    recent = RecentSteps()
    assert recent.p99_s == 0.0
    for n in range(1000):
        recent.observe(1.0 if n % 50 == 0 else 0.01)
    assert recent.p99_s == 1.0
