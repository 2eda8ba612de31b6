"""A spoken conversation from Python: sound or text in, words and sound out.

Owns the conversation object: its messages, and the order of hearing, writing and speaking in a
turn. The models are pipelines of one engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from triptych.core.engine_api.caller import Caller
from triptych.core.errors import ConfigError
from triptych.core.media.audio.resampling import Pcm
from triptych.core.process.loop_thread import LoopThread
from triptych.modalities.asr.api.pipeline import TranscriptionPipeline
from triptych.modalities.llm.api.pipeline import ChatPipeline
from triptych.modalities.llm.api.sound import written_and_spoken
from triptych.modalities.talk.speaking.answer import AnswerSpeaker
from triptych.modalities.talk.speaking.events import (
    HeardWords,
    SpokenSound,
    TalkEvent,
    WrittenWords,
)
from triptych.modalities.tts.api.pipeline import Speech
from triptych.modalities.tts.api.results import SpeechUsage
from triptych.modalities.tts.api.service import SpeechCall, SpeechService

Said: TypeAlias = "str | Path | bytes | Pcm | tuple[Pcm, int]"
"""A text; or sound: a file's path or its bytes, samples [S] at 16 kHz, or with their rate in Hz."""


@dataclass(frozen=True, slots=True)
class TalkModels:
    """The models of a conversation, on one engine; without a `recognizer`, turns are texts."""

    loop: LoopThread
    chat: ChatPipeline
    recognizer: TranscriptionPipeline | None
    speech: SpeechService
    voice_model: str


class SpokenConversation:
    """A conversation that is spoken.

        talk = engine.talk(system="Answer in one sentence.")
        for event in talk(Path("question.wav")):
            if isinstance(event, SpokenSound):
                player.write(event.pcm_S)
        talk.answer("And of Italy?").save("italy.wav")

    A turn is a text, or sound: a `Path`, bytes of a file, or samples. One without words has no
    answer. Leaving a turn early ends the chat and the speech at once; the conversation then has the
    part of the answer whose sound was made. Without any, the next turn goes on with the words of
    this one. A turn that fails before its answer is left out. Turns follow each other: one begins
    when the last has ended. Every call has an async twin that may be awaited on any loop.
    """

    def __init__(
        self, models: TalkModels, *, system: str, call: SpeechCall, options: Mapping[str, Any]
    ) -> None:
        self._models = models
        self._speaker = AnswerSpeaker(models.speech)
        self._call = call
        self._options = dict(options)
        self._turns = asyncio.Lock()
        self.messages: list[dict[str, Any]] = []
        """The messages so far, in the form of `ChatPipeline`."""
        if system:
            self.messages.append({"role": "system", "content": system})

    def __call__(self, said: Said) -> Iterator[TalkEvent]:
        """Answer a turn: yield what was heard, then words and sound as they are made.

        Raises errors of `core.errors.RequestError`, as for silence.
        """
        return self._models.loop.iterate(lambda: self._turn(said))

    def astream(self, said: Said) -> AsyncGenerator[TalkEvent, None]:
        """Async twin of calling the conversation."""
        return self._models.loop.iterate_async(lambda: self._turn(said))

    def answer(self, said: Said) -> Speech:
        """Answer a turn and return the whole sound; its words are in `messages`."""
        return self._models.loop.run(self._whole(said))

    async def aanswer(self, said: Said) -> Speech:
        """Async twin of `answer`."""
        return await self._models.loop.run_async(self._whole(said))

    async def _whole(self, said: Said) -> Speech:
        async with aclosing(self._turn(said)) as events:
            sounds = [event async for event in events if isinstance(event, SpokenSound)]
        empty: Pcm = np.zeros(0, np.float32)
        return Speech(
            audio=np.concatenate([empty, *(sound.pcm_S for sound in sounds)]),
            sample_rate=self._models.speech.model(self._models.voice_model).sample_rate,
            coverage=1.0,
            finish_reason="stop",
            usage=SpeechUsage(),
        )

    async def _turn(self, said: Said) -> AsyncGenerator[TalkEvent, None]:
        async with self._turns, aclosing(self._one_turn(said)) as events:
            async for event in events:
                yield event

    async def _one_turn(self, said: Said) -> AsyncGenerator[TalkEvent, None]:
        is_sound = not isinstance(said, str)
        words = await self._words(said)
        if is_sound and not words:
            yield HeardWords(words)
            return
        before, answer = list(self.messages), {"role": "assistant", "content": ""}
        self._ask(words)
        try:
            if is_sound:
                yield HeardWords(words)
            async with aclosing(self._answer()) as events:
                async for event in events:
                    if isinstance(event, SpokenSound):
                        answer["content"] += event.text
                    yield event
        except Exception:
            if not answer["content"]:
                self.messages[:] = before
            raise
        finally:
            if answer["content"]:
                self.messages.append(answer)

    def _ask(self, words: str) -> None:
        """Add a question; it goes on with one that got no answer, as roles have to alternate."""
        if self.messages and self.messages[-1]["role"] == "user":
            words = f"{self.messages.pop()['content']} {words}"
        self.messages.append({"role": "user", "content": words})

    async def _words(self, said: Any) -> str:
        if isinstance(said, str):
            return said
        if self._models.recognizer is None:
            raise ConfigError(
                "This engine has no recognizer for sound: open it with one, such as"
                " whisper-tiny.en, or send a text."
            )
        transcript = await self._models.recognizer.acall(said)
        return transcript.text.strip()

    def _answer(self) -> AsyncGenerator[TalkEvent, None]:
        """The words as they are written, and their sound."""
        return written_and_spoken(self._write(), lambda event: [event.text], self._speak)

    async def _write(self) -> AsyncGenerator[WrittenWords, None]:
        texts = self._models.chat.astream(self.messages, **self._options)
        async with aclosing(texts):
            async for text in texts:
                yield WrittenWords(text)

    async def _speak(self, texts: AsyncIterator[str]) -> AsyncGenerator[SpokenSound, None]:
        call = replace(self._call, caller=Caller())
        async with aclosing(self._speaker.speak(texts, call)) as chunks:
            async for chunk in chunks:
                yield SpokenSound(chunk.pcm_S, chunk.sample_rate, chunk.text)
