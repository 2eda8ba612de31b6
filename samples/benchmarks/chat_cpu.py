"""Chat on the CPU: Triptych against `transformers serve`, on the same weights, taking turns.

    pip install -e '.[bench]' 'transformers[serving]'
    python samples/benchmarks/chat_cpu.py --output docs/benchmarks

Starts both servers and measures each workload with `triptych bench`, which prints medians, spread
and ratios, and writes JSON and a plot of each into the output folder. Close everything else: both
servers and the load generator share the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from triptych.core.bundle.resolve import resolve_all
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import RichProgress

WORKLOADS = {
    "one_stream": "--concurrency 1 --num-requests 4 --prompt-tokens 512 --output-tokens 128",
    "eight_streams": "--concurrency 8 --num-requests 16 --prompt-tokens 256 --output-tokens 64",
    "many_streams": "--concurrency 32 --num-requests 32 --prompt-tokens 256 --output-tokens 64",
    "shared_prefix": "--concurrency 16 --num-requests 16 --prompt-tokens 1534"
    " --shared-prefix-tokens 1500 --output-tokens 32",
}
# transformers serve has no ignore_eos; it takes a whole generation config, as text.
IGNORE_EOS = {"generation_config": json.dumps({"eos_token_id": -1})}


@contextlib.contextmanager
def server(
    command: str, log: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in its own process group until the block ends.

    A program without a folder is taken from this Python environment.
    """
    program, *arguments = shlex.split(command)
    if "/" not in program:
        program = str(Path(sys.executable).with_name(program))
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [program, *arguments],
            stdout=sink,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(
    url: str, *, timeout_s: float = 300.0, process: subprocess.Popen[bytes] | None = None
) -> None:
    """Return when `url` answers 200. SystemExit after a timeout, or if `process` has ended."""
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        if process is not None and process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode}; see its log.")
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"{url} did not answer within {timeout_s:.0f} s; see the server's log.")


def main() -> int:
    """Start both, measure each workload; 1 if one of them had errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"))
    parser.add_argument("--repeats", default="5")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    (model,) = resolve_all(ModelOptions(), RichProgress())
    ours, theirs = free_port(), free_port()
    shared = f"--device cpu --dtype {args.dtype}"
    folder = shlex.quote(model.folder)
    paged = "--continuous-batching --cb-max-memory-percent 0.2"  # both must fit into memory
    serve_ours = f"triptych serve {shared} --port {ours} --kv-cache-memory-mb 2048"
    serve_theirs = f"transformers serve {folder} {shared} --port {theirs} {paged}"
    with (
        server(serve_ours, args.output / "ours.log"),
        server(serve_theirs, args.output / "theirs.log"),
    ):
        wait_until_ready(f"http://127.0.0.1:{ours}/readyz")
        wait_until_ready(f"http://127.0.0.1:{theirs}/health")
        command = [
            *(sys.executable, "-m", "triptych", "bench", "--repeats", args.repeats),
            *("--url", f"http://127.0.0.1:{ours}", "--label", "triptych", "--model", model.name),
            *("--url", f"http://127.0.0.1:{theirs}", "--label", "transformers"),
            *("--model", model.folder, "--extra-body", "{}"),
            *("--extra-body", json.dumps(IGNORE_EOS)),
        ]
        codes = [bench(command, name, args.output) for name in args.workload or tuple(WORKLOADS)]
    return max(codes)


def bench(command: Sequence[str], name: str, folder: Path) -> int:
    """Run one workload and return the exit code of `triptych bench`."""
    print(f"\n{name}: {WORKLOADS[name]}", flush=True)
    files = ("--output", folder / f"{name}.json", "--plot", folder / f"{name}.png")
    done = subprocess.run([*command, *WORKLOADS[name].split(), *map(str, files)], check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
