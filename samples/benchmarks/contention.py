"""Chat on two cores with other busy processes: how much of its fair share it gets.

    pip install -e '.[bench]' 'transformers[serving]'
    python samples/benchmarks/contention.py --output docs/benchmarks

Starts `triptych serve` and `transformers serve` with default options on the first two cores, then
`--busy` busy-looping processes. One chat at a time streams from one server after
the other. Writes contention.md; its text below the second heading is kept.

Another OpenAI-compatible server replaces transformers with `--command`, in which {port} and {model}
are filled in, or with `--url`, if it is already running. Run it on the same two cores, and from the
same terminal, since Linux may divide a processor among sessions first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chat_cpu import free_port, server, wait_until_ready

from triptych.core.bundle.resolve import resolve_all
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import RichProgress
from triptych.modalities.llm.api.bench.report import machine

NUM_CORES = 2
QUESTION = "Count from one to two hundred, in words."
OURS = "triptych serve --device cpu --port {port}"
THEIRS = "transformers serve {model} --device cpu --dtype bfloat16 --port {port}"
MIN_TOKENS, MAX_TOKENS = 8, 400
PAGE = """\
# Chat on a busy machine

- **Measured**: tokens per second of one streamed chat while other processes keep the cores busy
- **Against**: {label}, on the same weights; the servers took turns
- **Model and machine**: SmolLM2-135M-Instruct in bfloat16 on two cores ({cpu})
- **Repeat**:

```sh
{command}
```

Medians of {repeats} answers, minimum and maximum in brackets. With n busy processes, the fair share
of two threads on two cores is 2 / (2 + n) of their throughput on the idle machine; "kept" is how
much of that share was achieved.

{table}
"""


@dataclass(slots=True)
class Server:
    """A measured server, and its tokens per second by the number of busy processes."""

    label: str
    url: str
    model: str
    rates: dict[int, list[float]] = field(default_factory=dict)

    def stream(self, num_tokens: int) -> float:
        """Tokens per second of one answer, from its first token to its last."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            times_s = [time.perf_counter() for line in response if _content(line)]
        if len(times_s) < 2:
            raise SystemExit(f"{self.label} streamed no answer.")
        return (len(times_s) - 1) / (times_s[-1] - times_s[0])

    def measure(self, num_busy: int, seconds: float) -> None:
        """Add an answer of about `seconds`, at the rate of the last."""
        known = self.rates.setdefault(num_busy, [])
        rate = known[-1] if known else self.stream(MIN_TOKENS)
        num_tokens = min(max(int(rate * seconds), MIN_TOKENS), MAX_TOKENS)
        known.append(self.stream(num_tokens))

    def cell(self, num_busy: int) -> str:
        """Median, spread, and the share of the fair share."""
        rates = self.rates[num_busy]
        median = statistics.median(rates)
        share = median / statistics.median(self.rates[0])
        kept = share / (NUM_CORES / (NUM_CORES + num_busy))
        return f"{median:.3g} ({min(rates):.3g}-{max(rates):.3g}) | **{kept:.0%}**"


def _content(line: bytes) -> str:
    """The text of one event of the stream."""
    data = line.removeprefix(b"data: ").strip()
    if not data.startswith(b"{"):
        return ""
    choices = json.loads(data).get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run this many busy-looping processes until the block ends."""
    command = (sys.executable, "-c", "while True: pass")
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[list[Server]]:
    """Our server and the other, ready."""
    (model,) = resolve_all(ModelOptions(), RichProgress())
    folder, names = shlex.quote(model.folder), {"ours": model.name, "theirs": model.folder}
    with contextlib.ExitStack() as stack:
        found = []
        for label, command, path in (
            ("ours", OURS, "readyz"),
            ("theirs", args.command, "health"),
        ):
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            if label == "theirs" and args.url:
                url = args.url
            else:
                line = command.format(port=port, model=folder)
                stack.enter_context(server(line, args.output / f"contention_{label}.log"))
                wait_until_ready(f"{url}/{path}")
            found.append(Server(label, url, names[label]))
        yield found


def table(found: list[Server], busy: list[int], label: str) -> str:
    """A Markdown table."""
    lines = [
        f"| busy processes | fair share | Triptych, tokens/s | kept | {label}, tokens/s | kept |",
        "|---|---|---|---|---|---|",
    ]
    for num_busy in busy:
        cells = " | ".join(each.cell(num_busy) for each in found)
        lines.append(f"| {num_busy} | {NUM_CORES / (NUM_CORES + num_busy):.0%} | {cells} |")
    return "\n".join(lines)


def write(page: Path, **parts: Any) -> None:
    """Write the page, keeping the text below its second heading."""
    kept = page.read_text().partition("\n## ") if page.exists() else ("", "", "")
    page.write_text(PAGE.format(**parts) + kept[1] + kept[2])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one answer")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--label", default="transformers serve", help="of the other server")
    parser.add_argument("--command", default=THEIRS)
    parser.add_argument("--url", help="of the other server, if it is already running")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    busy = sorted({0, *args.busy})
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    with servers(args) as found:
        for num_busy in busy:
            with busy_processes(num_busy):
                for each in found * args.repeats:
                    each.measure(num_busy, args.seconds)
                    print(num_busy, each.label, f"{each.rates[num_busy][-1]:.3g}", flush=True)
    text = table(found, busy, args.label)
    print(text)
    command = shlex.join(("python", *sys.argv))
    write(
        args.output / "contention.md",
        cpu=machine()["cpu"],
        repeats=args.repeats,
        label=args.label,
        command=command,
        table=text,
    )


if __name__ == "__main__":
    main()
