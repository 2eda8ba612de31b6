"""First speech requests, all at once, in fresh API processes: how many processes crash.

    python samples/benchmarks/first_requests.py --runs 200
    python samples/benchmarks/first_requests.py --runs 60 --unguarded

Each run is a fresh interpreter with the API process's objects for the embedded voice, in which four
threads normalize and plan a text at once, as for the first four speech requests. `--unguarded`
removes the locks of lazy initialization, to show that the test detects crashes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from collections import Counter

NUM_THREADS = 4
CHILD = "--child"
UNGUARDED = "--unguarded"


def child(*, is_guarded: bool) -> None:
    """The first requests of one API process."""
    if not is_guarded:
        unguard()
    from triptych.core.options.table import resolve_keywords
    from triptych.core.weights.progress import SilentProgress
    from triptych.modalities.registry import resolve_models
    from triptych.modalities.tts.api.frontend import open_front_end
    from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer

    resolved = resolve_keywords({"model": ("triptych-voice",)})
    (model,) = resolve_models(resolved, SilentProgress())
    front = open_front_end(model)
    start = threading.Barrier(NUM_THREADS)
    num_planned = Counter[int]()

    def speak(number: int) -> None:
        start.wait()
        spoken = Normalizer(NormalizeOptions())(f"Request {number}: it costs $12.50 at 7:45.")
        planned = front.plan(spoken, voice=front.default_voice, instructions="")
        num_planned[number] = sum(1 for _ in planned)

    threads = [threading.Thread(target=speak, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(0 if len(num_planned) == NUM_THREADS and all(num_planned.values()) else 1)


def unguard() -> None:
    """Remove the locks of lazy initialization."""
    from functools import cache

    from triptych.core.process import once, typed

    once.once = cache  # type: ignore[assignment, misc]
    typed._learn = lambda kind: None


def main() -> int:
    """Count the crashed processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument(UNGUARDED, action="store_true")
    parser.add_argument(CHILD, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(is_guarded=not args.unguarded)
    argv = [sys.executable, __file__, CHILD, *([UNGUARDED] if args.unguarded else [])]
    codes = Counter(subprocess.run(argv, check=False).returncode for _ in range(args.runs))
    num_dead = args.runs - codes[0]
    print(f"{args.runs} processes, {num_dead} died; exit codes {dict(codes)}")
    return 1 if num_dead else 0


if __name__ == "__main__":
    sys.exit(main())
