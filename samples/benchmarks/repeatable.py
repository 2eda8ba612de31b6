"""Repeatability: whether answers are bit for bit the same, alone and in a batch.

    triptych serve                                   # in another terminal, default settings
    python samples/benchmarks/repeatable.py

Sends the README's question and 24 others to any OpenAI-compatible server, greedily and with a seed,
five times each alone and five times together with at least 47 others. Counts distinct texts and
distinct log-probabilities per prompt. The exit code is 1 if a prompt had two.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

README = "What is the capital of France?"
PROMPTS = (
    README,
    "What is 9+1?",
    "Name three colours.",
    "Who wrote Hamlet?",
    "Write a haiku about the sea.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "List the planets of the solar system.",
    "What is the boiling point of water?",
    "Give me a recipe for pancakes.",
    "Explain gravity to a child.",
    "What does HTTP stand for?",
    "Tell me a joke.",
    "How many legs does a spider have?",
    "Write a short poem about autumn.",
    "What is photosynthesis?",
    "Who painted the Mona Lisa?",
    "Suggest a name for a cat.",
    "What is the largest ocean?",
    "How do I boil an egg?",
    "Describe a sunset in one sentence.",
    "What is the opposite of hot?",
    "Write a Python function that adds two numbers.",
    "When did the Second World War end?",
    "Is a tomato a fruit?",
)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.7, "seed": 5},
}
NUM_BATCHED = 48


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its sampling parameters."""

    mode: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The invariant parts of a reply: the text, and every log-probability as sent."""

    text: str
    logprobs: tuple[float, ...]


Replies = dict[Question, list[Reply]]


class Repeater:
    """Requests to one model of one server."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, max_tokens: int) -> None:
        self._client = client
        self._options: dict[str, Any] = {"model": model, "max_tokens": max_tokens}

    async def ask(self, question: Question) -> Reply:
        """Ask for one answer."""
        answer = await self._client.chat.completions.create(
            messages=[{"role": "user", "content": question.prompt}],
            logprobs=True,
            top_logprobs=2,
            **self._options,
            **MODES[question.mode],
        )
        choice = answer.choices[0]
        entries = (choice.logprobs and choice.logprobs.content) or []
        scores = [(entry, *entry.top_logprobs) for entry in entries]
        logprobs = tuple(scored.logprob for position in scores for scored in position)
        return Reply(choice.message.content or "", logprobs)

    async def alone(self, questions: Sequence[Question], repeats: int) -> Replies:
        """One request at a time; a prompt is repeated after all others."""
        replies: Replies = {question: [] for question in questions}
        for _ in range(repeats):
            for question in questions:
                replies[question].append(await self.ask(question))
        return replies

    async def batched(self, questions: Sequence[Question], repeats: int) -> Replies:
        """All at once, at least `NUM_BATCHED` of them, in a different order each time."""
        replies: Replies = {question: [] for question in questions}
        for index in range(repeats):
            crowd = [*questions] * -(-NUM_BATCHED // len(questions))
            random.Random(index).shuffle(crowd)
            answers = await asyncio.gather(*(self.ask(question) for question in crowd))
            for question, reply in zip(crowd, answers, strict=True):
                replies[question].append(reply)
        return replies


def questions_of(prompts: Sequence[str]) -> list[Question]:
    """Every prompt in every mode."""
    return [Question(mode, prompt) for mode in MODES for prompt in prompts]


def report(runs: dict[str, Replies]) -> bool:
    """Print how many prompts had one answer; True if all had."""
    print(f"{'':8}{'':12}{'one text':>12}{'one set of log-probabilities':>32}")
    together = {"both": _merged(*runs.values())}
    is_repeatable = True
    for mode in MODES:
        for name, replies in (runs | together).items():
            asked = [found for question, found in replies.items() if question.mode == mode]
            num_texts = sum(len({reply.text for reply in found}) == 1 for found in asked)
            num_same = sum(len(set(found)) == 1 for found in asked)
            counts = f"{num_texts} of {len(asked)}", f"{num_same} of {len(asked)}"
            print(f"{mode:8}{name:12}{counts[0]:>12}{counts[1]:>32}")
            is_repeatable &= num_same == len(asked)
    for question, found in together["both"].items():
        texts = {reply.text for reply in found}
        if len(texts) > 1:
            print(f"\n{question.mode}: {question.prompt}", *map(repr, sorted(texts)), sep="\n  ")
    return is_repeatable


def _merged(*runs: Replies) -> Replies:
    return {question: [reply for run in runs for reply in run[question]] for question in runs[0]}


async def measure(args: argparse.Namespace) -> dict[str, Replies]:
    """Send everything, alone first."""
    questions = questions_of(PROMPTS)
    async with openai.AsyncOpenAI(
        base_url=args.url, api_key=args.api_key, timeout=600, max_retries=0
    ) as client:
        repeater = Repeater(client, args.model, args.max_tokens)
        alone = await repeater.alone(questions, args.repeats)
        return {"alone": alone, "batched": await repeater.batched(questions, args.repeats)}


def main() -> None:
    """Send, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    sys.exit(not report(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
