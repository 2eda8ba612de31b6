"""Simulated users of a soak test: each makes one request after another, of every kind.

Owns the requests, which of them are cancelled midway, and the count of outcomes. Knows nothing of
the server's resources.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
from PIL import Image, ImageDraw

from triptych.modalities.llm.api.bench.load import WORDS

CHAT = "smollm2-135m-instruct"
VISION = "triptych-vision"
SPEECH = "triptych-voice"
IMAGES = "triptych-images"
EMBEDDINGS = "all-minilm-l6-v2"
ASR = "whisper-tiny.en"
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "orange", "purple")
THINGS = ("house", "frog", "apple", "car")

Act = Callable[[], Awaitable[None]]


class Users:
    """Clients of one server. `counts` has (route, outcome) and how often."""

    def __init__(self, url: str, seed: int) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._http = httpx.AsyncClient(base_url=url, timeout=300, trust_env=False)
        self._random = random.Random(seed)
        self._sounds: list[bytes] = []
        self._acts: dict[str, tuple[int, Act]] = {
            "chat, streamed": (6, self.chat_streamed),
            "chat": (3, self.chat),
            "look": (2, self.look),
            "speech": (2, self.speak),
            "transcription": (1, self.transcribe),
            "embeddings": (3, self.embed),
            "image": (1, self.imagine),
        }

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def prepare(self) -> None:
        """One request of each kind: loads every model, makes recordings to transcribe."""
        for num_words in (5, 20, 60):
            body = {"model": SPEECH, "input": self.words(num_words), "response_format": "wav"}
            reply = await self._http.post("/v1/audio/speech", json=body)
            self._sounds.append(reply.raise_for_status().content)
        for name in self._acts:
            await self._do(name)

    async def fill(self, model: str, num_words: int) -> None:
        """Leave a unique prompt in the model's cache."""
        body = self._chat_body(num_words, max_tokens=1) | {"model": model}
        (await self._http.post("/v1/chat/completions", json=body)).raise_for_status()

    async def repeat(self, name: str, count: int) -> None:
        """Make this many requests."""
        for _ in range(count):
            await self._do(name)

    async def live(self, is_over: asyncio.Event, may_act: asyncio.Event) -> None:
        """Make one request after another until the end; wait while paused."""
        weights = [weight for weight, _ in self._acts.values()]
        while not is_over.is_set():
            await may_act.wait()
            (name,) = self._random.choices(list(self._acts), weights)
            await self._do(name)
            await asyncio.sleep(self._random.expovariate(4.0))

    async def _do(self, name: str) -> None:
        try:
            await self._acts[name][1]()
        except httpx.HTTPStatusError as error:
            self.counts[name, f"HTTP {error.response.status_code}"] += 1
        except httpx.HTTPError as error:
            self.counts[name, type(error).__name__] += 1
        except TimeoutError:
            self.counts[name, "cancelled"] += 1
        else:
            self.counts[name, "ok"] += 1

    def words(self, count: int) -> str:
        """A unique text."""
        return " ".join(self._random.choices(WORDS, k=count))

    async def chat_streamed(self) -> None:
        """Stream an answer; a third are cancelled midway."""
        body = self._chat_body(self._random.choice((10, 40, 150, 600)), max_tokens=96)
        await self._stream("/v1/chat/completions", body | {"stream": True}, share=1 / 3)

    async def chat(self) -> None:
        """Request a whole answer; some time out early."""
        body = self._chat_body(self._random.choice((10, 40, 150)), max_tokens=48)
        is_patient = self._random.random() < 0.8
        async with asyncio.timeout(None if is_patient else self._random.uniform(0.01, 1.0)):
            (await self._http.post("/v1/chat/completions", json=body)).raise_for_status()

    async def look(self) -> None:
        """Ask about an image; half of the images are repeated."""
        number = self._random.choice((self._random.randrange(4), self._random.getrandbits(32)))
        url = f"data:image/png;base64,{base64.b64encode(image(number)).decode()}"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is this?"},
        ]
        body = {
            "model": VISION,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 16,
        }
        (await self._http.post("/v1/chat/completions", json=body)).raise_for_status()

    async def speak(self) -> None:
        """Stream speech; some are cancelled."""
        kind = self._random.choice(("pcm", "mp3", "wav", "opus"))
        text = self.words(self._random.choice((5, 15, 40)))
        body = {"model": SPEECH, "input": text, "response_format": kind}
        await self._stream("/v1/audio/speech", body, share=1 / 5)

    async def transcribe(self) -> None:
        """Transcribe a recording."""
        files = {"file": ("sound.wav", self._random.choice(self._sounds), "audio/wav")}
        data = {"model": ASR}
        reply = await self._http.post("/v1/audio/transcriptions", files=files, data=data)
        reply.raise_for_status()

    async def embed(self) -> None:
        """Embed a few texts."""
        texts = [self.words(self._random.randint(3, 60)) for _ in range(self._random.randint(1, 8))]
        body = {"model": EMBEDDINGS, "input": texts}
        (await self._http.post("/v1/embeddings", json=body)).raise_for_status()

    async def imagine(self) -> None:
        """Generate an image or two; a third are cancelled."""
        body = {
            "model": IMAGES,
            # A few prompts only: their encodings are cached, 64 MiB of it.
            "prompt": f"a {self._random.choice(COLOURS)} {self._random.choice(THINGS)}",
            "n": self._random.randint(1, 2),
            "seed": self._random.getrandbits(31),
            "steps": self._random.choice((8, 16)),
        }
        is_patient = self._random.random() < 2 / 3
        async with asyncio.timeout(None if is_patient else self._random.uniform(0.05, 2.0)):
            (await self._http.post("/v1/images/generations", json=body)).raise_for_status()

    def _chat_body(self, num_words: int, *, max_tokens: int) -> dict[str, Any]:
        message = {"role": "user", "content": self.words(num_words)}
        return {"model": CHAT, "messages": [message], "max_tokens": max_tokens}

    async def _stream(self, path: str, body: dict[str, Any], *, share: float) -> None:
        """Read a stream; a `share` of them is cancelled after a few pieces."""
        leaves = self._random.random() < share
        num_pieces = self._random.randint(1, 20) if leaves else 0
        async with self._http.stream("POST", path, json=body) as reply:
            reply.raise_for_status()
            async for number in _numbered(reply.aiter_raw()):
                if number == num_pieces:
                    raise TimeoutError


async def _numbered(pieces: AsyncIterator[bytes]) -> AsyncIterator[int]:
    number = 0
    async for _ in pieces:
        number += 1
        yield number


def image(number: int) -> bytes:
    """A PNG that is unique to its number."""
    source = random.Random(number)
    canvas = Image.new("RGB", (source.randint(64, 640), source.randint(64, 480)), "white")
    brush = ImageDraw.Draw(canvas)
    for _ in range(source.randint(1, 6)):
        left, top = source.randrange(canvas.width - 20), source.randrange(canvas.height - 20)
        box = (left, top, left + source.randint(10, 200), top + source.randint(10, 200))
        brush.ellipse(box, fill=source.choice(COLOURS))
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()
