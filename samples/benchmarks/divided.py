"""A model divided over ranks compared with the same model whole: results and speed.

    python samples/benchmarks/divided.py --tensor-parallel-size 2 --dtype float32
    python samples/benchmarks/divided.py --cfg-parallel-size 2
    python samples/benchmarks/divided.py --ulysses-degree 2

Asks both the same questions, greedily, one at a time and all at once. Prints how many answers are
equal token for token, the largest difference of a token's log-probability among those, and tokens
per second. In float32 all answers are equal, and the exit code is 1 if one is not; in bfloat16 a
whole model on a CPU rounds less often than a divided one, and near ties may fall differently.

Images are generated uncached, by the calibrated plan, and by a cache that decides on the way. In
float32 those of divided branches are equal; of those of divided tokens, bytes may differ by one.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from triptych import ChatPipeline, ImagePipeline

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
SUBJECTS = ("a red apple on a blue background", "a penguin next to a house", "a green car")
CACHES = ("off", "planned", "first-block")


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one model: tokens, their log-probabilities, and tokens per second."""

    texts: list[list[str]]
    logprobs: list[list[float]]
    pace: float


def run(num_ranks: int, num_tokens: int, dtype: str) -> Run:
    """Query a model of this many ranks."""
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


@dataclass(frozen=True, slots=True)
class ImageGeneration:
    """The images of one model, and seconds for each."""

    images: list[bytes]
    image_s: float


def generate(num_images: int, dtype: str, **ranks: int) -> ImageGeneration:
    """Generate with a model of this many ranks."""
    with ImagePipeline.from_pretrained(dtype=dtype, **ranks) as images:
        images(SUBJECTS[0], seed=0, cache="off")
        begun_s = time.perf_counter()
        generated = [
            images(SUBJECTS[seed % len(SUBJECTS)], seed=seed, cache=cache)
            for seed in range(num_images)
            for cache in CACHES
        ]
        took_s = time.perf_counter() - begun_s
    return ImageGeneration([each[0].image.tobytes() for each in generated], took_s / len(generated))


def compare_images(given: argparse.Namespace) -> bool:
    """Whether all images of a divided model are close enough to the whole one's."""
    ranks = {
        "cfg_parallel_size": given.cfg_parallel_size,
        "ulysses_degree": given.ulysses_degree,
    }
    whole = generate(given.num_images, given.dtype)
    divided = generate(given.num_images, given.dtype, **ranks)
    pairs = list(zip(whole.images, divided.images, strict=True))
    apart = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairs]
    print(f"equal images: {apart.count(0)} of {len(pairs)}")
    print(f"largest difference of a byte: {max(apart)}")
    print(f"s/image: {whole.image_s:.3f} whole, {divided.image_s:.3f} divided")
    return max(apart) <= (given.ulysses_degree > 1)


def compare_answers(given: argparse.Namespace) -> bool:
    """Whether all answers of a divided model are the whole one's, token for token."""
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
    return len(equal) == len(pairs)


def main() -> None:
    """Compare both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--cfg-parallel-size", type=int, default=1)
    parser.add_argument("--ulysses-degree", type=int, default=1)
    parser.add_argument("--num-tokens", type=int, default=48)
    parser.add_argument("--num-images", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    is_image = given.cfg_parallel_size * given.ulysses_degree > 1
    is_equal = (compare_images if is_image else compare_answers)(given)
    sys.exit(given.dtype == "float32" and not is_equal)


if __name__ == "__main__":
    main()
