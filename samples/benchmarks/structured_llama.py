"""Answers of llama.cpp, timed on request: a child process of structured.py.

Needs only llama-cpp-python. Reads lines "KIND TOKENS" and answers each with the tokens
per second after the first and the seconds until it, of an answer that is free or by the schema.

    python structured_llama.py MODEL.gguf THREADS SCHEMA
"""

from __future__ import annotations

import sys
import time
from itertools import islice

import llama_cpp  # type: ignore[import-not-found]

PROMPT = "<|im_start|>user\nTell me story number 0.<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    """Answer until the input ends."""
    path, num_threads, schema = sys.argv[1:]
    threads = {"n_threads": int(num_threads), "n_threads_batch": int(num_threads)}
    model = llama_cpp.Llama(path, n_ctx=1024, verbose=False, **threads)
    grammar = llama_cpp.LlamaGrammar.from_json_schema(schema, verbose=False)
    prompt = model.tokenize(PROMPT.encode(), add_bos=False, special=True)
    for line in sys.stdin:
        kind, num_tokens = line.split()
        started_s = time.perf_counter()
        generated = model.generate(prompt, temp=1.0, grammar=None if kind == "free" else grammar)
        moments_s = [time.perf_counter() for _ in islice(generated, int(num_tokens))]
        rate = (len(moments_s) - 1) / (moments_s[-1] - moments_s[0])
        print(rate, moments_s[0] - started_s, flush=True)


if __name__ == "__main__":
    main()
