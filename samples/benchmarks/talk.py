"""Spoken questions: from the end of the user's speech to the first sound of the answer.

    apt-get install flite
    python samples/benchmarks/talk_questions.py /tmp/questions
    python samples/benchmarks/talk.py /tmp/questions --gguf smollm2.gguf --peers ~/peers/bin/python

Ours is one server with the embedded models, over `/v1/realtime`. The peer is a pipeline of servers:
Whisper (transformers serve, the same weights), chat (llama-cpp-python's server, the same GGUF file)
and speech (`triptych serve triptych-voice`), called one after another: the recording once the turn
has ended, the chat streamed up to its first sentence, then that sentence as streamed speech. Both
hear the same sound at the pace of a microphone, end turns with the same detector at the same
setting, and take turns question by question; the side that is not asked is idle. Every second
answer of ours is interrupted.

`--peers` is a Python with transformers[serving] and llama-cpp-python[server]; without it only ours
is measured. Prints medians and 95th percentiles of the parts, and writes all times as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from chat_cpu import free_port, server, wait_until_ready
from openai import AsyncOpenAI
from talk_questions import SAMPLE_RATE, Question

from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import resolve
from triptych.modalities.asr.source import WHISPER_TINY
from triptych.modalities.talk.hearing.sound_input import SoundInput
from triptych.modalities.talk.hearing.source import open_network
from triptych.modalities.talk.hearing.turns import VoiceTurnDetector
from triptych.modalities.talk.hearing.voice_activity import VoiceNetwork
from triptych.modalities.talk.ports import (
    HEARING_RATE,
    SpeechStarted,
    SpeechStopped,
    TurnOptions,
)

MODELS = ("embedded", "whisper-tiny.en", "triptych-voice")
CHAT_NAME = "smollm2-135m-instruct"
PROMPT = "You answer spoken questions, in one or two short sentences."
MAX_TOKENS = 64
SESSION: Any = {
    "type": "realtime",
    "instructions": PROMPT,
    "max_output_tokens": MAX_TOKENS,
    "audio": {
        "input": {
            "transcription": {"model": "whisper-tiny.en"},
            "turn_detection": {"type": "server_vad"},
        }
    },
}
SERVE = "triptych serve --log-level warning"
PIECE_S = 0.02
_WAV_HEADER = 44
_SENTENCE = re.compile(r"[.!?](?=\s|$)")


@dataclass(slots=True)
class Times:
    """One question: seconds from the end of its speech, and what was understood and answered."""

    turn: float = 0.0  # the turn has ended
    text: float = 0.0  # its text is known
    sound: float = 0.0  # the first sound is there
    onset: float = 0.0  # from the beginning of the speech to its detection
    gap: float = 0.0  # the longest silence inside the answer
    cut: float = 0.0  # from an interruption until nothing more comes
    heard: str = ""
    answer: str = ""

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the time to the first sound."""
        return {
            "end of the turn": self.turn,
            "recognition": self.text - self.turn,
            "first words and their sound": self.sound - self.text,
            "in all": self.sound,
        }


@dataclass(slots=True)
class Turn:
    """A question as it is spoken: the clock starts when its speech ends."""

    question: Question
    folder: Path
    times: Times = field(default_factory=Times)
    end_s: float = 0.0

    def now(self) -> float:
        """Seconds since the end of the speech."""
        return time.monotonic() - self.end_s

    async def pieces(self, *, from_s: float = 0.0) -> AsyncGenerator[bytes, None]:
        """The recording at the pace of a microphone, 16 bits at 24 kHz."""
        data = (self.folder / self.question.file).read_bytes()[_WAV_HEADER:]
        data = data[round(from_s * SAMPLE_RATE) * 2 :]
        begin_s = time.monotonic()
        if not from_s:
            self.end_s = begin_s + self.question.end_s
        num_bytes = round(PIECE_S * SAMPLE_RATE) * 2
        for number, at in enumerate(range(0, len(data), num_bytes), start=1):
            await asyncio.sleep(max(0.0, begin_s + number * PIECE_S - time.monotonic()))
            yield data[at : at + num_bytes]


@dataclass(slots=True)
class Realtime:
    """One server: hears while it is spoken, speaks while it is written."""

    url: str

    async def answer(self, turn: Turn, *, is_cut: bool) -> Times:
        """Hear and answer a question in a session; if `is_cut`, interrupt the answer."""
        client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none")
        async with client.realtime.connect(model=CHAT_NAME) as talk:
            await talk.session.update(session=SESSION)
            following = _Following(talk, turn, is_cut=is_cut)
            following.say()
            try:
                async for event in talk:
                    if following.take(event):
                        return turn.times
            finally:
                following.hush()
        raise SystemExit(f"{turn.question.file}: the session ended without an answer.")


class _Following:
    """Notes when the events of a session come; interrupts its answer if `is_cut`."""

    def __init__(self, talk: Any, turn: Turn, *, is_cut: bool) -> None:
        self._talk, self._turn, self._is_cut = talk, turn, is_cut
        self._speaking: asyncio.Task[None] | None = None
        self._played_until_s = self._cut_s = 0.0

    def say(self, from_s: float = 0.0) -> None:
        """Begin to speak the question."""
        self.hush()
        self._speaking = asyncio.create_task(_say(self._talk, self._turn, from_s))

    def hush(self) -> None:
        """Stop speaking."""
        if self._speaking is not None:
            self._speaking.cancel()

    def take(self, event: Any) -> bool:
        """Take the next event; returns whether the answer has ended or was cancelled."""
        times, question, now_s = self._turn.times, self._turn.question, self._turn.now()
        match event.type:
            case "error":
                raise SystemExit(f"{question.file}: {event.error.message}")
            case "input_audio_buffer.speech_started" if times.sound:
                self._cut_s = now_s
            case "input_audio_buffer.speech_started":
                times.onset = now_s + question.end_s - question.begin_s
            case "input_audio_buffer.speech_stopped":
                times.turn = now_s
                self.hush()
            case "conversation.item.input_audio_transcription.completed":
                times.text, times.heard = now_s, event.transcript
            case "response.output_audio_transcript.delta":
                times.answer += event.delta
            case "response.output_audio.delta":
                self._hear(now_s, len(event.delta) * 3 / 4 / 2 / SAMPLE_RATE)
            case "response.done":
                times.cut = now_s - self._cut_s if self._cut_s else 0.0
                return True
        return False

    def _hear(self, now_s: float, seconds: float) -> None:
        """Play a piece of the answer; the user interrupts at once."""
        times = self._turn.times
        if not times.sound:
            times.sound = self._played_until_s = now_s
            if self._is_cut:
                self.say(self._turn.question.begin_s - PIECE_S)
        times.gap = max(times.gap, now_s - self._played_until_s)
        self._played_until_s = max(self._played_until_s, now_s) + seconds


async def _say(talk: Any, turn: Turn, from_s: float) -> None:
    async for piece in turn.pieces(from_s=from_s):
        await talk.input_audio_buffer.append(audio=base64.b64encode(piece).decode())


@dataclass(slots=True)
class Pipeline:
    """Three servers, one after another."""

    client: httpx.AsyncClient
    network: VoiceNetwork
    urls: dict[str, str]
    whisper: str

    async def answer(self, turn: Turn, *, is_cut: bool = False) -> Times:
        """Hear a question and answer it up to the first sound."""
        pcm_S = await self._listen(turn)
        times = turn.times
        wav = encode_clip("wav", HEARING_RATE, pcm_S)
        reply = await self.client.post(
            f"{self.urls['hear']}/v1/audio/transcriptions",
            data={"model": self.whisper},
            files={"file": ("turn.wav", wav)},
        )
        times.heard = reply.raise_for_status().json()["text"].strip()
        times.text = turn.now()
        times.answer = await self._first_sentence(times.heard)
        body = {
            "model": "triptych-voice",
            "voice": "alloy",
            "input": times.answer,
            "response_format": "pcm",
        }
        speech = self.client.stream("POST", f"{self.urls['speak']}/v1/audio/speech", json=body)
        async with speech as sound:
            sound.raise_for_status()
            async for _ in sound.aiter_bytes():
                times.sound = times.sound or turn.now()
        return times

    async def _listen(self, turn: Turn) -> Pcm:
        """Record until the turn ends; returns its sound."""
        detector, sound = VoiceTurnDetector(self.network, TurnOptions()), SoundInput("pcm16")
        heard: list[Pcm] = []
        start = 0
        async with aclosing(turn.pieces()) as pieces:
            async for piece in pieces:
                heard.append(sound.push(piece))
                for event in detector.push(heard[-1]):
                    if isinstance(event, SpeechStarted):
                        onset_s = turn.now() + turn.question.end_s - turn.question.begin_s
                        turn.times.onset = onset_s
                        start = event.at_ms * HEARING_RATE // 1000
                    elif isinstance(event, SpeechStopped):
                        turn.times.turn = turn.now()
                        return np.concatenate(heard)[start:]
        raise SystemExit(f"{turn.question.file}: no end of speech was found.")

    async def _first_sentence(self, question: str) -> str:
        body: dict[str, Any] = {
            "messages": [
                {"role": "system", "content": PROMPT},
                {"role": "user", "content": question},
            ],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        text = ""
        url = f"{self.urls['chat']}/v1/chat/completions"
        async with self.client.stream("POST", url, json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line[6:])["choices"]
                text += (choices[0]["delta"].get("content") or "") if choices else ""
                if found := _SENTENCE.search(text[:-1]):
                    return text[: found.end()].strip()
        return text.strip()


def start(stack: ExitStack, command: str, ready: str, log: Path) -> str:
    """Start a server; returns its address once it answers."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    process = stack.enter_context(server(command.format(port=port), log))
    wait_until_ready(url + ready, process=process)
    return url


def start_pipeline(args: argparse.Namespace, stack: ExitStack) -> Pipeline:
    """Start the peers."""
    model = resolve(
        WHISPER_TINY.name,
        name=None,
        options=ModelOptions(),
        progress=SilentProgress(),
        sources=(WHISPER_TINY,),
    )
    commands = {
        "hear": (
            f"{args.peers} -m transformers.cli.transformers serve {model.folder} --device cpu"
            " --dtype float32 --host 127.0.0.1 --port {port}",
            "/health",
        ),
        "chat": (
            f"{args.peers} -m llama_cpp.server --model {args.gguf} --host 127.0.0.1"
            f" --n_threads {os.cpu_count()} --n_ctx 2048 --port {{port}}",
            "/v1/models",
        ),
        "speak": (f"{SERVE} triptych-voice --port {{port}}", "/readyz"),
    }
    urls = {
        name: start(stack, command, ready, args.logs / f"talk_{name}.log")
        for name, (command, ready) in commands.items()
    }
    network = open_network(ModelOptions(), SilentProgress())
    return Pipeline(httpx.AsyncClient(timeout=120), network, urls, model.folder)


def summary(all_times: Sequence[Times]) -> dict[str, list[float]]:
    """Median and 95th percentile of each part, in milliseconds."""
    rows = {name: [each.parts[name] for each in all_times] for name in all_times[0].parts}
    rows |= {
        "detection of the onset": [each.onset for each in all_times],
        "longest silence inside": [each.gap for each in all_times],
        "interruption": [each.cut for each in all_times if each.cut],
    }
    return {
        name: [round(1000 * float(np.quantile(values, q))) for q in (0.5, 0.95)]
        for name, values in rows.items()
        if any(values)
    }


def show(name: str, rows: dict[str, list[float]]) -> None:
    """Print a table."""
    print(f"\n{name:28}{'median':>8}{'p95':>8}   (ms)")
    for part, (median, p95) in rows.items():
        print(f"{part:28}{median:8.0f}{p95:8.0f}")


async def measure(
    sides: dict[str, Realtime | Pipeline], questions: Sequence[Question], args: argparse.Namespace
) -> dict[str, list[Times]]:
    """Ask every question of every side in turns; the first one only warms them up."""
    found: dict[str, list[Times]] = {name: [] for name in sides}
    for number, question in enumerate([questions[0], *questions]):
        for name, side in sides.items():
            turn = Turn(question, args.questions)
            times = await side.answer(turn, is_cut=number % 2 == 1)
            if number:
                found[name].append(times)
                print(f"{name:8} {times.sound:6.2f} s  {times.heard!r} -> {times.answer[:60]!r}")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("questions", type=Path, help="the folder of talk_questions.py")
    parser.add_argument("--peers", help="a Python with the peers' servers")
    parser.add_argument("--gguf", type=Path, help="the embedded model's GGUF file, for the peer")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="folder of servers' logs")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    listed = json.loads((args.questions / "questions.json").read_text(encoding="utf-8"))
    questions = [Question(**each) for each in listed]
    with ExitStack() as stack:
        command = f"{SERVE} {' '.join(MODELS)} --port {{port}}"
        url = start(stack, command, "/readyz", args.logs / "talk.log")
        sides: dict[str, Realtime | Pipeline] = {"triptych": Realtime(url)}
        if args.peers:
            sides["pipeline"] = start_pipeline(args, stack)
        found = asyncio.run(measure(sides, questions, args))
    for name, all_times in found.items():
        show(name, summary(all_times))
    if "pipeline" in found:
        pairs = zip(found["triptych"], found["pipeline"], strict=True)
        ratios = [peer.sound / own.sound for own, peer in pairs]
        print(f"\nthe pipeline takes {np.median(ratios):.2f} times as long (median of pairs)")
    if args.output:
        figures = {name: [asdict(each) for each in times] for name, times in found.items()}
        args.output.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
