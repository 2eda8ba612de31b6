"""Decode steps of llama.cpp, timed on request: a child process of quantized.py.

Needs only llama-cpp-python. Reads lines "ROWS STEPS" and answers each with the mean seconds
of a step of ROWS rows, a token each, over CONTEXT tokens of context: the mean of STEPS steps.

    python llama_steps.py MODEL.gguf THREADS CONTEXT MAX_ROWS CLOCK

CLOCK is a function of the module `time`.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp  # type: ignore[import-not-found]

SPARE = 512
"""Tokens behind the context: steps of a model with recurrent states."""


class Model:
    """A model and a context for some rows."""

    def __init__(self, path: str, num_threads: int, length: int, num_rows: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = length * num_rows
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = num_rows
        params.n_threads = params.n_threads_batch = num_threads
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def run(self, tokens: list[tuple[int, int, int]], *, all_logits: bool = False) -> None:
        """Decode (token, position, row) each; the logits of the last or of all."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, row) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = all_logits or index == len(tokens) - 1
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")


def fill(model: Model, context: int, num_rows: int) -> None:
    """Fill a context for every row, computed once and copied."""
    memory = llama_cpp.llama_get_memory(model.context)
    for first in range(0, context, 512):
        end = min(first + 512, context)
        model.run([(7 + 11 * at % 4096, at, 0) for at in range(first, end)])
    for row in range(1, num_rows):
        llama_cpp.llama_memory_seq_cp(memory, 0, row, -1, -1)


def steps_s(
    model: Model, context: int, num_rows: int, num_steps: int, clock: Callable[[], float]
) -> float:
    """Seconds of a step. The cache is rewound before each, so that all are equal.

    Recurrent states cannot be: they go on, a token each.
    """
    memory = llama_cpp.llama_get_memory(model.context)
    total = 0.0
    for step in range(num_steps):
        for row in range(num_rows):
            llama_cpp.llama_memory_seq_rm(memory, row, context, -1)
        places = [llama_cpp.llama_memory_seq_pos_max(memory, row) + 1 for row in range(num_rows)]
        tokens = [(100 + 13 * row + step, place, row) for row, place in enumerate(places)]
        started = clock()
        model.run(tokens, all_logits=True)
        total += clock() - started
    return total / num_steps


def main() -> None:
    """Answer until the input ends."""
    path, *numbers, clock = sys.argv[1:]
    num_threads, context, max_rows = map(int, numbers)
    silent: Any = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    model = Model(path, num_threads, context + SPARE, max_rows)
    fill(model, context, max_rows)
    print("ready", flush=True)
    for line in sys.stdin:
        num_rows, num_steps = map(int, line.split())
        print(steps_s(model, context, num_rows, num_steps, getattr(time, clock)), flush=True)


if __name__ == "__main__":
    main()
