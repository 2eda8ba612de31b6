"""Chat with audio in one request, beside chat first and speech after.

    python samples/benchmarks/chat_audio.py --output docs/benchmarks

Starts `triptych serve` with the embedded models. In turns, each question is asked

- in one request, whose answer is streamed as text and sound;
- in two, as clients do without it: the whole answer, then its speech, streamed.

Prints the time to the first sound, the silence in the playback of each answer, and the word error
rate of the spoken answers, transcribed back by the served recognizer.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import re
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import openai
from chat_cpu import free_port, server, wait_until_ready
from rich.console import Console
from rich.table import Table
from speech_streams import Heard

from triptych.core.media.audio.containers import encode_clip

CHAT, VOICE, EARS = "smollm2-135m-instruct", "triptych-voice", "whisper-tiny.en"
RATE = 24_000
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do bees make honey?",
    "What should I see in Rome?",
    "Explain in a few sentences how a sailing boat moves.",
    "Who wrote Hamlet, and what is it about?",
    "What is the difference between weather and climate?",
    "Tell me about the moon.",
    "Why do leaves change their colour in autumn?",
    "What makes bread rise?",
)


@dataclass(slots=True)
class Answer:
    """One spoken answer, in seconds since its question."""

    text: str = ""
    pcm: bytes = b""
    times_s: list[float] = field(default_factory=list)
    sound_s: list[float] = field(default_factory=list)
    error_rate: float = 0.0
    _asked_s: float = field(default_factory=time.monotonic)

    def take(self, data: bytes) -> None:
        """Record the next samples."""
        if data:
            self.pcm += data
            self.times_s.append(time.monotonic() - self._asked_s)
            self.sound_s.append(len(data) / 2 / RATE)

    @property
    def heard(self) -> Heard:
        """What a listener has of it."""
        return Heard(times_s=tuple(self.times_s), sound_s=tuple(self.sound_s))

    def row(self) -> dict[str, float | str]:
        """Its figures."""
        return {
            "text": self.text,
            "first_s": self.heard.first_s,
            "silent_s": self.heard.underrun_s,
            "sound_s": sum(self.sound_s),
            "word_error_rate": self.error_rate,
        }


async def at_once(client: openai.AsyncOpenAI, question: str, most: int) -> Answer:
    """Text and sound of one request."""
    answer = Answer()
    stream = await client.chat.completions.create(
        model=CHAT,
        messages=[{"role": "user", "content": question}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        max_tokens=most,
        temperature=0,
        stream=True,
    )
    async for chunk in stream:
        audio = chunk.choices[0].delta.audio
        answer.text += (audio and audio.transcript) or ""
        answer.take(base64.b64decode((audio and audio.data) or ""))
    return answer


async def one_after_the_other(client: openai.AsyncOpenAI, question: str, most: int) -> Answer:
    """The whole text, then its speech."""
    answer = Answer()
    reply = await client.chat.completions.create(
        model=CHAT,
        messages=[{"role": "user", "content": question}],
        max_tokens=most,
        temperature=0,
    )
    answer.text = reply.choices[0].message.content or ""
    speech = client.audio.speech.with_streaming_response.create(
        model=VOICE, voice="alloy", input=answer.text, response_format="pcm"
    )
    async with speech as response:
        async for data in response.iter_bytes():
            answer.take(data)
    return answer


async def transcribed_back(client: openai.AsyncOpenAI, answer: Answer) -> float:
    """The word error rate of what the recognizer hears."""
    pcm_S = np.frombuffer(answer.pcm, "<i2").astype(np.float32) / 32767
    heard = await client.audio.transcriptions.create(
        model=EARS, file=("answer.wav", encode_clip("wav", RATE, pcm_S)), temperature=0
    )
    said = _words(answer.text)
    return _distance(said, _words(heard.text)) / max(1, len(said))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower().replace(",", ""))


def _distance(some: list[str], others: list[str]) -> int:
    """The least number of words to change, add or drop (Levenshtein)."""
    last = list(range(len(others) + 1))
    for row, word in enumerate(some, start=1):
        costs = [row]
        for at, other in enumerate(others):
            costs.append(min(last[at] + (word != other), last[at + 1] + 1, costs[at] + 1))
        last = costs
    return last[-1]


async def measure(url: str, most: int) -> dict[str, list[Answer]]:
    """Ask every question in both ways, in turns."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    for ask in (at_once, one_after_the_other):  # not counted: the first calls warm up
        await ask(client, "Say hello.", 16)
    found: dict[str, list[Answer]] = {"one request": [], "chat, then speech": []}
    for number, question in enumerate(QUESTIONS):
        ways = [("one request", at_once), ("chat, then speech", one_after_the_other)]
        for name, ask in ways if number % 2 else reversed(ways):
            answer = await ask(client, question, most)
            answer.error_rate = await transcribed_back(client, answer)
            found[name].append(answer)
    return found


def summary(answers: list[Answer]) -> dict[str, float]:
    """The figures of one way."""
    firsts_s = sorted(answer.heard.first_s for answer in answers)
    num_words = [len(_words(answer.text)) for answer in answers]
    wrong = sum(a.error_rate * num for a, num in zip(answers, num_words, strict=True))
    return {
        "first_s": statistics.median(firsts_s),
        "most_first_s": firsts_s[-1],
        "silent_s": max(answer.heard.underrun_s for answer in answers),
        "sound_s": statistics.mean(sum(answer.sound_s) for answer in answers),
        "word_error_rate": wrong / sum(num_words),
    }


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for chat_audio.json")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = f"triptych serve embedded {EARS} {VOICE} --port {port}"
        with server(command, Path(folder) / "log") as process:
            wait_until_ready(f"http://127.0.0.1:{port}/readyz", process=process)
            found = asyncio.run(measure(f"http://127.0.0.1:{port}", args.max_tokens))
    table = Table("", "first sound, median s", "most s", "most silence s", "sound s", "WER")
    figures = {name: summary(answers) for name, answers in found.items()}
    for name, own in figures.items():
        table.add_row(name, *(f"{value:.3f}" for value in own.values()))
    Console().print(table)
    sooner = [
        after.heard.first_s / one.heard.first_s for one, after in zip(*found.values(), strict=True)
    ]
    print(
        f"sooner by {min(sooner):.1f} to {max(sooner):.1f}, median {statistics.median(sooner):.1f}"
    )
    if args.output is not None:
        each = {name: [own.row() for own in answers] for name, answers in found.items()}
        content = json.dumps({"sooner": sooner, **figures, "answers": each}, indent=1)
        (args.output / "chat_audio.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
