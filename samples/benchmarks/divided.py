"""A model divided over ranks beside the same model whole: tokens, log-probabilities, pace.

    python samples/benchmarks/divided.py --tensor-parallel-size 2 --dtype float32

Asks both the same questions, greedily, one at a time and all at once. Prints how many answers are
equal token for token, the largest difference of a token's log-probability among those, and tokens
per second. In float32 all answers are equal, and the exit code is 1 if one is not; in bfloat16 a
whole model on a CPU rounds less often than a divided one, and near ties may fall otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from triptych import ChatPipeline

PROMPTS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Explain gravity to a child.",
    "What does HTTP stand for?",
    "Write a Python function that adds two numbers.",
    "Is a tomato a fruit?",
)


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one model: tokens, their log-probabilities, and tokens per second."""

    texts: list[list[str]]
    logprobs: list[list[float]]
    pace: float


def run(num_ranks: int, num_tokens: int, dtype: str) -> Run:
    """Ask a model of so many ranks."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": num_tokens, "top_logprobs": 0}
    with ChatPipeline.from_pretrained(tensor_parallel_size=num_ranks, dtype=dtype) as chat:
        chat(PROMPTS[0], **options)
        begun_s = time.perf_counter()
        answers = [chat(prompt, **options) for prompt in PROMPTS] + chat(list(PROMPTS), **options)
        took_s = time.perf_counter() - begun_s
    entries = [answer.samples[0].logprobs for answer in answers]
    return Run(
        texts=[[str(entry.token_id) for entry in each] for each in entries],
        logprobs=[[entry.logprob for entry in each] for each in entries],
        pace=sum(map(len, entries)) / took_s,
    )


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--num-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    whole = run(1, given.num_tokens, given.dtype)
    divided = run(given.tensor_parallel_size, given.num_tokens, given.dtype)
    pairs = list(zip(whole.texts, divided.texts, strict=True))
    equal = [index for index, (ours, theirs) in enumerate(pairs) if ours == theirs]
    differences = [
        abs(ours - theirs)
        for index in equal
        for ours, theirs in zip(whole.logprobs[index], divided.logprobs[index], strict=True)
    ]
    print(f"equal answers: {len(equal)} of {len(pairs)}")
    print(f"largest difference of a log-probability: {max(differences, default=0):.2g}")
    print(f"tokens/s: {whole.pace:.0f} whole, {divided.pace:.0f} divided")
    sys.exit(given.dtype == "float32" and len(equal) < len(pairs))


if __name__ == "__main__":
    main()
