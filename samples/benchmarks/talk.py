"""Spoken questions: from the end of the user's speech to the first sound of the answer.

    apt-get install flite
    python samples/benchmarks/talk_questions.py /tmp/questions
    python samples/benchmarks/talk.py /tmp/questions --gguf smollm2.gguf --peers ~/peers/bin/python

Ours is one engine with the embedded models. The peer is a pipeline of servers: Whisper
(transformers serve, the same weights), chat (llama-cpp-python's server, the same GGUF file) and
speech (`triptych serve triptych-voice`), called one after another: the recording once the turn has
ended, the chat streamed up to its first sentence, then that sentence as streamed speech. Both hear
the same sound at the pace of a microphone, end turns with the same detector at the same setting,
and take turns question by question; whichever is not asked is idle.

`--peers` is a Python with transformers[serving] and llama-cpp-python[server]; without it only ours
is measured. Prints medians and 95th percentiles of the parts, and writes all times as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from chat_cpu import free_port, server, wait_until_ready
from talk_questions import Question

from triptych import Engine
from triptych.core.engine_api.caller import Caller
from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import RichProgress, SilentProgress
from triptych.core.weights.resolve import resolve
from triptych.modalities.asr.api.service import TranscribeCall
from triptych.modalities.asr.source import WHISPER_TINY
from triptych.modalities.talk.hearing.hearing import VoiceHearing
from triptych.modalities.talk.hearing.sound_input import SoundInput
from triptych.modalities.talk.hearing.source import open_network
from triptych.modalities.talk.ports import (
    HEARING_RATE,
    LiveTranscriber,
    SpeechStarted,
    SpeechStopped,
    TurnOptions,
)
from triptych.modalities.talk.speaking.answer import AnswerSpeaker
from triptych.modalities.tts.api.service import SpeechCall

MODELS = ("embedded", "whisper-tiny.en", "triptych-voice")
PROMPT = "You answer spoken questions, in one or two short sentences."
MAX_TOKENS = 64
PIECE_S = 0.02
CUT_AFTER_S = 0.3
"""Seconds of an answer after which the user interrupts it."""
_WAV_HEADER = 44
_SENTENCE = re.compile(r"[.!?](?=\s|$)")


@dataclass(slots=True)
class Times:
    """One question: seconds from the end of its speech, and what was understood and answered."""

    turn: float = 0.0  # the turn has ended
    text: float = 0.0  # its text is known
    sentence: float = 0.0  # the first words to speak are written
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
            "first sentence": self.sentence - self.text,
            "first sound": self.sound - self.sentence,
            "in all": self.sound,
        }


@dataclass(slots=True)
class Turn:
    """A question as it is heard: the clock starts when its speech ends."""

    question: Question
    folder: Path
    hearing: VoiceHearing
    times: Times = field(default_factory=Times)
    end_s: float = 0.0
    transcriber: LiveTranscriber | None = None

    def now(self) -> float:
        """Seconds since the end of the speech."""
        return time.monotonic() - self.end_s

    async def listen(self, open_transcriber: Callable[[], LiveTranscriber] | None) -> Pcm:
        """Play the recording at the pace of a microphone until its turn ends; returns the turn.

        As in a session, a transcriber hears the turn from its padding on.
        """
        data = (self.folder / self.question.file).read_bytes()[_WAV_HEADER:]
        detector, sound = self.hearing.open_detector(TurnOptions()), SoundInput("pcm16")
        begin_s = time.monotonic()
        self.end_s = begin_s + self.question.end_s
        heard: list[Pcm] = []
        start = 0
        num_bytes = round(PIECE_S * 24_000) * 2
        for number, at in enumerate(range(0, len(data), num_bytes), start=1):
            await asyncio.sleep(max(0.0, begin_s + number * PIECE_S - time.monotonic()))
            heard.append(sound.push(data[at : at + num_bytes]))
            if self.transcriber is not None:
                self.transcriber.push(heard[-1])
            for event in detector.push(heard[-1]):
                if isinstance(event, SpeechStarted):
                    self.times.onset = time.monotonic() - begin_s - self.question.begin_s
                    start = event.at_ms * HEARING_RATE // 1000
                    if open_transcriber is not None:
                        self.transcriber = open_transcriber()
                        self.transcriber.push(np.concatenate(heard)[start:])
                elif isinstance(event, SpeechStopped):
                    self.times.turn = self.now()
                    return np.concatenate(heard)[start:]
        raise SystemExit(f"{self.question.file}: no end of speech was found.")


@dataclass(slots=True)
class Ours:
    """One engine: hears while it is spoken, speaks while it is written."""

    engine: Engine
    hearing: VoiceHearing
    speaker: AnswerSpeaker

    async def answer(self, turn: Turn, *, is_cut: bool) -> Times:
        """Hear and answer a question; if `is_cut`, interrupt the answer."""
        call = TranscribeCall(model=self.engine.transcribe._model)
        await turn.listen(lambda: self.hearing.open_transcriber(call))
        times = turn.times
        assert turn.transcriber is not None
        times.heard = await turn.transcriber.finish()
        times.text = turn.now()
        written: list[tuple[float, str]] = []
        speech = SpeechCall(model=self.engine.speak._model, text="", caller=Caller())
        played_until_s = 0.0
        chunks = self.speaker.speak(self._written(times.heard, written, turn), speech)
        async for chunk in chunks:
            now_s = turn.now()
            if not len(chunk.pcm_S):
                continue
            if not times.sound:
                times.sound = played_until_s = now_s
                times.sentence = _written_at(written, len(chunk.text.strip()))
            times.gap = max(times.gap, now_s - played_until_s)
            played_until_s = max(played_until_s, now_s) + len(chunk.pcm_S) / chunk.sample_rate
            if is_cut and now_s - times.sound >= CUT_AFTER_S:
                break
        if is_cut:
            begun_s = time.monotonic()
            await chunks.aclose()
            times.cut = time.monotonic() - begun_s
        times.answer = "".join(text for _, text in written)
        return times

    async def _written(
        self, text: str, written: list[tuple[float, str]], turn: Turn
    ) -> AsyncIterator[str]:
        messages = [
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": text},
        ]
        deltas = self.engine.chat._texts(messages, {"max_tokens": MAX_TOKENS, "temperature": 0})
        async with aclosing(deltas) as stream:
            async for delta in stream:
                written.append((turn.now(), delta))
                yield delta


def _written_at(written: Sequence[tuple[float, str]], num_characters: int) -> float:
    """When so many characters were there."""
    for at_s, text in written:
        num_characters -= len(text)
        if num_characters <= 0:
            return at_s
    return written[-1][0]


@dataclass(slots=True)
class Pipeline:
    """Three servers, one after another."""

    client: httpx.AsyncClient
    hearing: VoiceHearing
    urls: dict[str, str]
    whisper: str

    async def answer(self, turn: Turn, *, is_cut: bool = False) -> Times:
        """Hear a question and answer it up to the first sound."""
        pcm_S = await turn.listen(None)
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
        times.sentence = turn.now()
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


def start_servers(args: argparse.Namespace, stack: ExitStack) -> tuple[dict[str, str], str]:
    """Start the peers; returns their addresses and the name of the Whisper model."""
    model = resolve(
        WHISPER_TINY.name,
        name=None,
        options=ModelOptions(),
        progress=RichProgress(),
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
        "speak": (
            "triptych serve triptych-voice --log-level warning --port {port}",
            "/readyz",
        ),
    }
    urls: dict[str, str] = {}
    for name, (command, ready) in commands.items():
        urls[name] = f"http://127.0.0.1:{(port := free_port())}"
        process = stack.enter_context(
            server(command.format(port=port), args.logs / f"talk_{name}.log")
        )
        wait_until_ready(urls[name] + ready, process=process)
    return urls, model.folder


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
    sides: dict[str, Ours | Pipeline], questions: Sequence[Question], args: argparse.Namespace
) -> dict[str, list[Times]]:
    """Ask every question of every side in turns; the first one only warms them up."""
    found: dict[str, list[Times]] = {name: [] for name in sides}
    for number, question in enumerate([questions[0], *questions]):
        for name, side in sides.items():
            turn = Turn(question, args.questions, side.hearing)
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
        engine = stack.enter_context(Engine(MODELS))
        network = open_network(ModelOptions(), SilentProgress())
        hearing = VoiceHearing(engine.transcribe._service, network)
        ours = Ours(engine, hearing, AnswerSpeaker(engine.speak._service))
        sides: dict[str, Ours | Pipeline] = {"triptych": ours}
        if args.peers:
            urls, whisper = start_servers(args, stack)
            client = httpx.AsyncClient(timeout=120)
            sides["pipeline"] = Pipeline(client, hearing, urls, whisper)
        found = engine._host.loop.run(measure(sides, questions, args))
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
