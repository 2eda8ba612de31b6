"""The cost of the router: seconds and bytes of a request, by the number of replicas.

    python samples/benchmarks/router.py

Every prompt is new to the router beyond its first 512 tokens, which 50 applications share: its
record of each prompt is then at its largest.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from dataclasses import dataclass

from pages import markdown_table

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.router.report import LoadReport
from triptych.core.router.request import RoutedRequest
from triptych.core.router.router import ReplicaRouter

MODEL = "chat"
NUM_APPLICATIONS = 50
SHARED_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Costs of one request: microseconds of its keys and of the router, stored bytes."""

    keys_us: float
    route_us: float
    p99_us: float
    kept_bytes: float


def request(number: int, num_tokens: int) -> TokenRequest:
    """A prompt of an application's words and of new ones."""
    first = number % NUM_APPLICATIONS * 10_000
    own = 10_000_000 + number * 50_000
    ids = (*range(first, first + SHARED_TOKENS), *range(own, own + num_tokens - SHARED_TOKENS))
    return TokenRequest(prompt_ids=ids)


def router_of(num_replicas: int) -> ReplicaRouter:
    """A router with a report of every replica."""
    router = ReplicaRouter(seed=0)
    names = [f"replica-{number}" for number in range(num_replicas)]
    router.update(names)
    load = random.Random(0)
    for name in names:
        report = LoadReport(
            backlog_s=load.random(),
            job_s={MODEL: 0.1},
            token_s={MODEL: 1e-4},
            cache_tokens=500_000,
            ready=(MODEL,),
        )
        router.report(name, report)
    return router


def measure(num_replicas: int, num_tokens: int, num_requests: int) -> Cost:
    """Route `num_requests` requests, of which 8 a replica are always in flight."""
    router = router_of(num_replicas)
    asked = [request(number, num_tokens) for number in range(num_requests)]
    keys_s, route_s = [], []
    window = 8 * num_replicas
    for number, each in enumerate(asked):
        begun_s = time.perf_counter()
        routed = RoutedRequest.of(MODEL, each)
        keyed_s = time.perf_counter()
        choice = router.choose(routed)
        assert choice is not None
        router.begin(str(number), choice, routed)
        router.end(str(number - window))
        keys_s.append(keyed_s - begun_s)
        route_s.append(time.perf_counter() - keyed_s)
    ranked = sorted(route_s)
    return Cost(
        keys_us=1e6 * statistics.median(keys_s),
        route_us=1e6 * statistics.median(route_s),
        p99_us=1e6 * ranked[int(0.99 * len(ranked))],
        kept_bytes=kept_bytes(num_replicas, num_tokens, num_requests),
    )


def kept_bytes(num_replicas: int, num_tokens: int, num_requests: int) -> float:
    """Growth of the router in bytes for each request, while all of them are in flight."""
    router = router_of(num_replicas)
    asked = [RoutedRequest.of(MODEL, request(n, num_tokens)) for n in range(num_requests)]
    names = [str(number) for number in range(num_requests)]
    tracemalloc.start()
    for name, routed in zip(names, asked, strict=True):
        choice = router.choose(routed)
        assert choice is not None
        router.begin(name, choice, routed)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return num_bytes / num_requests


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 10, 100, 1000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--requests", type=int, default=3000)
    args = parser.parse_args()
    rows = []
    for num_replicas in args.replicas:
        for num_tokens in args.tokens:
            cost = measure(num_replicas, num_tokens, args.requests)
            figures = (cost.keys_us, cost.route_us, cost.p99_us, cost.kept_bytes)
            rows.append([str(num_replicas), str(num_tokens), *(f"{each:.1f}" for each in figures)])
    titles = ["replicas", "tokens", "keys, us", "router, us", "its p99, us", "kept, bytes"]
    print(markdown_table(titles, rows))


if __name__ == "__main__":
    main()
