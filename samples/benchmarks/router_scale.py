"""Up to a thousand replicas in virtual time: the real router, cost models and page pools.

    python samples/benchmarks/router_scale.py --json docs/benchmarks/router_scale.json \
        --plot docs/benchmarks/router_scale.png

A replica is a device that does one job's work after the other: the tokens of its prompt that its
page pool does not hold, and its share of decoding. Applications have their own system prompts,
used by Zipf's law; most requests are turns of conversations, which grow. A replica reports once a
second, as late as in a cluster.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pages import markdown_table

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.pages import PagePool
from triptych.core.router.report import LoadReport
from triptych.core.router.request import RoutedRequest
from triptych.core.router.router import ReplicaRouter, RoutingPolicy
from triptych.schedulers.cost import CostModel, JobSeconds

MODEL = "chat"
PAGE_SIZE = 64
NUM_PAGES = 1024
TOKEN_S = 1e-4  # a device that reads 10,000 tokens a second
ANSWER_TOKEN_S = 5e-4  # and writes 2,000, for all rows together
REPORT_S = 1.0
PAUSE_S = 5.0  # of a user between turns
POLICIES: tuple[RoutingPolicy, ...] = ("predicted", "round-robin")


@dataclass(slots=True)
class Conversation:
    """The history of a conversation, and the number of turns to come."""

    tokens: tuple[int, ...]
    num_left: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run."""

    policy: str
    num_replicas: int
    num_requests: int
    hit_rate: float
    wait_p50_s: float
    wait_p99_s: float
    utilization: float
    router_us: float
    keys_us: float


@dataclass(slots=True)
class Device:
    """A replica: its pages, its learned costs, and the end of its work."""

    pool: PagePool = field(
        default_factory=lambda: PagePool(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    )
    costs: CostModel = field(default_factory=CostModel)
    jobs: JobSeconds = field(default_factory=JobSeconds)
    free_s: float = 0.0
    busy_s: float = 0.0
    num_waiting: int = 0

    def run(self, tokens: tuple[int, ...], answer_tokens: int, now_s: float) -> tuple[float, int]:
        """Do a job's work after the queued work: its start, and the number of cached tokens."""
        keys = page_keys(tokens)
        lease = self.pool.acquire(keys)
        num_held = len(lease) * PAGE_SIZE
        self.pool.extend(lease, len(keys) - len(lease))
        self.pool.publish(lease, keys[lease.num_published :])
        self.pool.release(lease)
        num_new = len(tokens) - num_held
        self.costs.observe("chunk", {"tokens": num_new}, num_new * TOKEN_S)
        work_s = num_new * TOKEN_S + answer_tokens * ANSWER_TOKEN_S
        begins_s = max(now_s, self.free_s)
        self.free_s = begins_s + work_s
        self.busy_s += work_s
        self.num_waiting += 1
        self.jobs.spend(work_s)
        return begins_s, num_held

    def report(self) -> LoadReport:
        """The current report of the replica."""
        token_s = {}
        if self.costs.is_timed("chunk", {"tokens": 0}):
            token_s[MODEL] = self.costs.trend("chunk", {"tokens": 256}) / 256
        return LoadReport(
            backlog_s=self.jobs.left_s(num_waiting=self.num_waiting, num_running=0),
            job_s={MODEL: self.jobs.mean_s},
            token_s=token_s,
            cache_tokens=NUM_PAGES * PAGE_SIZE,
            ready=(MODEL,),
        )


def page_keys(tokens: tuple[int, ...]) -> list[bytes]:
    """Names of the full pages of a prompt, each following from those before it."""
    keys, key = [], 0
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        key = hash((key, tokens[start : start + PAGE_SIZE]))
        keys.append(key.to_bytes(8, "little", signed=True))
    return keys


class Traffic:
    """Turns of conversations in the order of arrival."""

    def __init__(self, num_replicas: int, seed: int) -> None:
        self._random = random.Random(seed)
        num_apps = 20 * num_replicas
        self._apps = range(num_apps)
        self._weights = list(itertools.accumulate(1 / (rank + 1) for rank in self._apps))
        self._next_token = 10_000_000

    def begin(self) -> Conversation:
        """A conversation with one of the applications: their prompts are short and long."""
        app = self._random.choices(self._apps, cum_weights=self._weights)[0]
        length = int(min(8000, random.Random(app).lognormvariate(6.2, 0.9)))
        first = app * 10_000
        turns = 1 if self._random.random() < 0.3 else 1 + int(self._random.expovariate(1 / 4))
        return Conversation(tuple(range(first, first + length)), turns)

    def say(self, conversation: Conversation) -> int:
        """Add the user's text and the coming answer; returns the length of the answer."""
        said = int(self._random.lognormvariate(4.0, 0.8)) + 1
        conversation.tokens += tuple(range(self._next_token, self._next_token + said))
        self._next_token += 20_000
        conversation.num_left -= 1
        return min(1000, int(self._random.lognormvariate(4.8, 0.6)) + 1)

    def pause_s(self, rate: float) -> float:
        """Seconds until the next event at `rate` events a second."""
        return self._random.expovariate(rate)


def simulate(
    policy: RoutingPolicy, num_replicas: int, num_requests: int, rate: float, seed: int = 0
) -> Outcome:
    """Serve `num_requests` at `rate` a second and replica."""
    world = World(policy, num_replicas, rate, seed)
    return world.run(num_requests)


class World:
    """Conversations, a router and its replicas, as a queue of events."""

    def __init__(self, policy: RoutingPolicy, num_replicas: int, rate: float, seed: int) -> None:
        self.policy = policy
        self.traffic = Traffic(num_replicas, seed)
        self.router = ReplicaRouter(policy, seed=seed)
        self.devices = {f"r{number}": Device() for number in range(num_replicas)}
        self.router.update(self.devices)
        self.rate = rate * num_replicas
        self.order = itertools.count()
        self.events: list[tuple[float, int, str, object]] = []
        self.waits_s: list[float] = []
        self.num_held = self.num_asked = 0
        self.router_s: list[float] = []
        self.keys_s: list[float] = []

    def run(self, num_requests: int) -> Outcome:
        """Run until all requests are sent; the first fifth warms up the caches."""
        self._at(0.0, "report", None)
        self._at(0.0, "arrival", None)
        now_s = 0.0
        num_warm = num_requests // 5
        while len(self.waits_s) < num_requests:
            now_s, _, kind, what = heapq.heappop(self.events)
            getattr(self, f"_{kind}")(now_s, what)
            if len(self.waits_s) == num_warm:
                self.num_held = self.num_asked = 0
        waits = sorted(self.waits_s[num_warm:])
        return Outcome(
            policy=self.policy,
            num_replicas=len(self.devices),
            num_requests=num_requests,
            hit_rate=self.num_held / self.num_asked,
            wait_p50_s=waits[len(waits) // 2],
            wait_p99_s=waits[int(0.99 * len(waits))],
            utilization=sum(each.busy_s for each in self.devices.values())
            / (now_s * len(self.devices)),
            router_us=1e6 * statistics.median(self.router_s),
            keys_us=1e6 * statistics.median(self.keys_s),
        )

    def _at(self, at_s: float, kind: str, what: object) -> None:
        heapq.heappush(self.events, (at_s, next(self.order), kind, what))

    def _arrival(self, now_s: float, _: object) -> None:
        """A new conversation; with its turns there are as many requests as `rate` says."""
        self._turn(now_s, self.traffic.begin())
        self._at(now_s + self.traffic.pause_s(self.rate / 3.5), "arrival", None)

    def _turn(self, now_s: float, conversation: Conversation) -> None:
        answer_tokens = self.traffic.say(conversation)
        request_id = str(next(self.order))
        name = self._route(request_id, TokenRequest(prompt_ids=conversation.tokens))
        device = self.devices[name]
        begins_s, num_held = device.run(conversation.tokens, answer_tokens, now_s)
        self.waits_s.append(begins_s - now_s)
        self.num_held += num_held
        self.num_asked += len(conversation.tokens)
        self._at(device.free_s, "end", (request_id, name))
        if conversation.num_left:
            self._at(device.free_s + self.traffic.pause_s(1 / PAUSE_S), "turn", conversation)

    def _route(self, request_id: str, request: TokenRequest) -> str:
        begun_s = time.perf_counter()
        routed = RoutedRequest.of(MODEL, request)
        keyed_s = time.perf_counter()
        choice = self.router.choose(routed)
        assert choice is not None
        self.router.begin(request_id, choice, routed)
        self.router_s.append(time.perf_counter() - keyed_s)
        self.keys_s.append(keyed_s - begun_s)
        return choice.replica

    def _end(self, now_s: float, what: object) -> None:
        request_id, name = what  # type: ignore[misc]
        self.router.end(request_id)
        device = self.devices[name]
        device.num_waiting -= 1
        device.jobs.end()

    def _report(self, now_s: float, _: object) -> None:
        for name, device in self.devices.items():
            self.router.report(name, device.report())
        self._at(now_s + REPORT_S, "report", None)


def outcomes(args: argparse.Namespace) -> Iterator[Outcome]:
    """Every policy with every number of replicas."""
    for num_replicas in args.replicas:
        for policy in POLICIES:
            yield simulate(policy, num_replicas, args.requests * num_replicas, args.rate)


def plot(found: list[Outcome], path: Path) -> None:
    """Hit rate, waits and the router's cost, by the number of replicas."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("hit_rate", "prompt tokens found cached"),
        ("wait_p99_s", "p99 wait for a device, s"),
        ("router_us", "router, microseconds a request"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.4), layout="constrained")
    for axis, (name, title) in zip(axes, panels, strict=True):
        for policy in POLICIES:
            points = [each for each in found if each.policy == policy]
            axis.plot(
                [each.num_replicas for each in points],
                [getattr(each, name) for each in points],
                marker="o",
                label=policy,
            )
        axis.set(xscale="log", xlabel="replicas", title=title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def table(found: list[Outcome]) -> str:
    """The figures, a line for each run."""
    titles = ["replicas", "routing", "hit rate", "p50 wait", "p99 wait", "device use", "router"]
    rows = [
        [
            str(each.num_replicas),
            each.policy,
            f"{each.hit_rate:.1%}",
            f"{each.wait_p50_s:.3f} s",
            f"{each.wait_p99_s:.2f} s",
            f"{each.utilization:.0%}",
            f"{each.router_us:.1f} us",
        ]
        for each in found
    ]
    return markdown_table(titles, rows)


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 10, 30, 100, 300, 1000])
    parser.add_argument("--requests", type=int, default=150, help="of each replica")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second and replica")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found = list(outcomes(args))
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
