"""Answers of llama.cpp with and without its prompt look-up: a child process of speculation.py.

Needs only llama-cpp-python. Reads lines of JSON, each a prompt's ids, the most tokens of its
answer, its temperature, and whether tokens are drafted. Answers each with the seconds from the
first token to the last, and the number of these tokens.

    python llama_lookup.py MODEL.gguf THREADS CLOCK

CLOCK is a function of the module `time`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from llama_cpp import Llama  # type: ignore[import-not-found]
from llama_cpp.llama_speculative import (  # type: ignore[import-not-found]
    LlamaPromptLookupDecoding,
)

NUM_DRAFTS = 2
"""What llama-cpp-python's documentation advises on a CPU."""


def answer(
    model: Any, ids: list[int], max_tokens: int, temperature: float, clock: Callable[[], float]
) -> tuple[float, int]:
    """Generate, and time what comes after the first token."""
    tokens = model.generate(ids, temp=temperature)
    next(tokens)
    num_tokens, started = 0, clock()
    for token in tokens:
        if token == model.token_eos() or num_tokens == max_tokens - 1:
            break
        num_tokens += 1
    return clock() - started, max(1, num_tokens)


def main() -> None:
    """Answer until the input ends."""
    path, num_threads, clock = sys.argv[1:]
    shared: dict[str, Any] = {
        "model_path": path,
        "n_ctx": 2048,
        "n_threads": int(num_threads),
        "n_threads_batch": int(num_threads),
        "verbose": False,
    }
    plain = Llama(**shared)
    drafting = Llama(
        **shared,
        logits_all=True,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=NUM_DRAFTS),
    )
    print("ready", flush=True)
    for line in sys.stdin:
        ids, max_tokens, temperature, drafts = json.loads(line)
        model = drafting if drafts else plain
        found = answer(model, ids, max_tokens, temperature, getattr(time, clock))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
