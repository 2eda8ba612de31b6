"""One API key with many requests, and another with few, on one server.

    triptych serve --api-key one --api-key two
    python samples/benchmarks/fairness.py --keys one two

The second key streams an answer several times, first alone, then while the first key has three
requests of 64 samples and a hundred background responses in flight. Prints the seconds to its
first token, the gaps between its tokens, and the first key's tokens a second when alone,
to compare two versions of the server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx

PROMPT = "Write a long story about a lighthouse keeper and the sea."


@dataclass(frozen=True)
class Heard:
    """One stream, as its client saw it: seconds."""

    first_s: float
    gaps_s: tuple[float, ...]


class Client:
    """One key's connection to the server."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self.model = model
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=600,
            limits=httpx.Limits(max_connections=300),
        )

    def chat(self, max_tokens: int, **more: object) -> dict[str, object]:
        """The body of a chat that runs to its last token."""
        messages = [{"role": "user", "content": PROMPT}]
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **more,
        }

    def listen(self, max_tokens: int) -> Heard:
        """Stream one answer."""
        started_s = time.perf_counter()
        times_s: list[float] = []
        body = self.chat(max_tokens, stream=True)
        with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    if choice["delta"].get("content"):
                        times_s.append(time.perf_counter())
        gaps_s = (after - before for before, after in pairwise(times_s))
        return Heard(times_s[0] - started_s, tuple(gaps_s))

    def many(self, num_samples: int, max_tokens: int) -> int:
        """One request of many samples; returns the number of received tokens."""
        body = self.chat(max_tokens, n=num_samples)
        reply = self._http.post("/v1/chat/completions", json=body)
        return int(reply.json()["usage"]["completion_tokens"]) if reply.is_success else 0

    def background(self, max_tokens: int) -> str:
        """Start a background response; returns its id."""
        body = {
            "model": self.model,
            "input": PROMPT,
            "max_output_tokens": max_tokens,
            "background": True,
        }
        return str(self._http.post("/v1/responses", json=body).raise_for_status().json()["id"])

    def cancel(self, response_id: str) -> None:
        """End a background response."""
        self._http.post(f"/v1/responses/{response_id}/cancel")


def main() -> None:
    """Measure, and print two tables."""
    args = _arguments()
    loud, light = (Client(args.url, key, args.model) for key in args.keys)
    light.listen(8)
    throughput = [_throughput(loud) for _ in range(args.repeats)]
    quiet = [light.listen(args.tokens) for _ in range(args.repeats)]
    requests = [threading.Thread(target=loud.many, args=(64, 1000), daemon=True) for _ in range(3)]
    ids = [loud.background(1000) for _ in range(100)]
    for request in requests:
        request.start()
    time.sleep(args.settle_s)
    crowded = [light.listen(args.tokens) for _ in range(args.repeats)]
    for response_id in ids:
        loud.cancel(response_id)
    print("| the other key | first token, s: median, most | gap, ms: median, mean, p99 |")
    print("|---|---|---|")
    for name, heard in (("is quiet", quiet), ("asks for much", crowded)):
        print(f"| {name} | {_firsts(heard)} | {_gaps(heard)} |")
    print(f"\none key alone: {statistics.median(throughput):.1f} tokens/s", end="")
    print(f" ({min(throughput):.1f} to {max(throughput):.1f})")


def _throughput(client: Client) -> float:
    started_s = time.perf_counter()
    return client.many(16, 64) / (time.perf_counter() - started_s)


def _firsts(heard: Sequence[Heard]) -> str:
    firsts_s = [each.first_s for each in heard]
    return f"{statistics.median(firsts_s):.2f}, {max(firsts_s):.2f}"


def _gaps(heard: Sequence[Heard]) -> str:
    gaps_ms = sorted(1e3 * gap for each in heard for gap in each.gaps_s)
    most_ms = gaps_ms[int(0.99 * (len(gaps_ms) - 1))]
    return f"{statistics.median(gaps_ms):.1f}, {statistics.fmean(gaps_ms):.1f}, {most_ms:.0f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--keys", nargs=2, required=True, metavar=("LOUD", "LIGHT"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--settle-s", type=float, default=5.0, help="before the second table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
