"""Many realtime sessions with random cuts: whether anything of them is left behind.

    python samples/benchmarks/realtime_soak.py --sessions 50 --minutes 5

Starts a server with the embedded chat, transcription and speech models. Sessions ask in text and in
speech, interrupt answers, cancel, send hostile events, leave politely or without a word, and are
replaced. The same is done briefly before the measurement, since pools start threads on demand.
Prints, before and after, the bytes of the ledger, unfinished jobs, and descriptors, threads and
memory of each process; then the time from the first sound of an interruption to the end of the
answer. The exit code is 1 if ledger, jobs or descriptors have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from processes import tree, usage
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from triptych import Server

MODELS = ("smollm2-135m-instruct", "whisper-tiny.en", "triptych-voice")
QUESTIONS = ("What is the capital of Italy?", "Please tell me a story about a king.")
RATE, PIECE_S = 24_000, 0.1
PIECE = int(RATE * PIECE_S) * 2
HOSTILE = ("{", "[]", '{"type":"none"}', '{"type":"input_audio_buffer.append","audio":"%"}')
MAX_NEW_DESCRIPTORS = 4
REST_S = 12.0


@dataclass
class Soak:
    """The clients of one server, and what they met."""

    server: Server
    sounds: list[bytes]
    random: random.Random
    until_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    barge_in_s: list[float] = field(default_factory=list)

    async def run(self, num_sessions: int, seconds: float) -> None:
        """Keep this number of sessions open for some time."""
        self.until_s = time.monotonic() + seconds
        await asyncio.gather(*(self.seat() for _ in range(num_sessions)))

    async def seat(self) -> None:
        """One session after another."""
        while time.monotonic() < self.until_s:
            url = f"{self.server.url.replace('http', 'ws')}/v1/realtime?model={MODELS[0]}"
            try:
                async with asyncio.timeout(90), connect(url, proxy=None, max_size=None) as socket:
                    await self.session(socket)
            except ConnectionClosed as error:
                self.ends[f"closed {error.rcvd.reason if error.rcvd else 'abruptly'}"] += 1
            except TimeoutError:
                self.ends["timeout"] += 1

    async def session(self, socket: ClientConnection) -> None:
        """A few turns, and one of several ends."""
        session = {"type": "realtime", "max_output_tokens": 40}
        await send(socket, "session.update", session=session)
        for _ in range(self.random.randint(1, 3)):
            turn = self.random.choice((self.ask, self.speak, self.interrupt, self.annoy))
            self.ends[turn.__name__] += 1
            if self.random.random() < 0.3:  # cut in the middle
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.random.random() * 3):
                        await turn(socket)
                self.ends["cut"] += 1
                socket.transport.abort()
                return
            await turn(socket)

    async def ask(self, socket: ClientConnection) -> None:
        """A question in text, and perhaps a cancellation."""
        content = [{"type": "input_text", "text": self.random.choice(QUESTIONS)}]
        item = {"type": "message", "role": "user", "content": content}
        await send(socket, "conversation.item.create", item=item)
        await send(socket, "response.create")
        if self.random.random() < 0.3:
            await asyncio.sleep(self.random.random())
            await send(socket, "response.cancel")
        await until(socket, "response.done")

    async def speak(self, socket: ClientConnection) -> None:
        """A question in speech."""
        sound = self.random.choice(self.sounds)
        await self.say(socket, sound + bytes(RATE * 2))
        await until(socket, "response.done")

    async def interrupt(self, socket: ClientConnection) -> None:
        """Speech into an answer."""
        content = [{"type": "input_text", "text": QUESTIONS[1]}]
        item = {"type": "message", "role": "user", "content": content}
        await send(socket, "conversation.item.create", item=item)
        await send(socket, "response.create")
        await until(socket, "response.output_audio.delta")
        saying = asyncio.create_task(self.say(socket, self.sounds[0] + bytes(RATE * 2)))
        try:
            await until(socket, "input_audio_buffer.speech_started", "response.done")
            begun_s = time.monotonic()
            if await until(socket, "response.done", "conversation.item.truncated"):
                self.barge_in_s.append(time.monotonic() - begun_s)
        finally:
            await asyncio.gather(saying, return_exceptions=True)

    async def annoy(self, socket: ClientConnection) -> None:
        """Events that are refused."""
        for message in HOSTILE:
            await socket.send(message)
        await until(socket, "error")

    async def say(self, socket: ClientConnection, sound: bytes) -> None:
        """Send sound as fast as it is spoken."""
        for start in range(0, len(sound), PIECE):
            piece = base64.b64encode(sound[start : start + PIECE]).decode()
            await send(socket, "input_audio_buffer.append", audio=piece)
            await asyncio.sleep(PIECE_S)


async def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    """Send an event."""
    await socket.send(json.dumps({"type": kind, **fields}))


async def until(socket: ClientConnection, *kinds: str) -> str:
    """Read up to an event of one of these types; returns its type."""
    while (kind := json.loads(await socket.recv())["type"]) not in kinds:
        pass
    return str(kind)


def held(server: Server) -> dict[str, float]:
    """The bytes of the ledger, and the unfinished jobs."""
    found: Counter[str] = Counter()
    for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        name, value = line.partition("{")[0].split(" ")[0], line.rpartition(" ")[2]
        if name in (
            "triptych_device_memory_bytes",
            "triptych_jobs_waiting",
            "triptych_jobs_running",
        ):
            found[name] += float(value)
    return dict(found)


def snapshot(server: Server) -> dict[str, Any]:
    """Everything that must not grow."""
    time.sleep(REST_S)
    processes = [found for each in tree(server.pid) if (found := usage(each))]
    return {
        **held(server),
        "descriptors": [each.num_descriptors for each in processes],
        "threads": [each.num_threads for each in processes],
        "rss_mib": [each.rss_bytes >> 20 for each in processes],
    }


def spoken(server: Server, text: str) -> bytes:
    """A question as PCM at 24 kHz."""
    body = {"model": MODELS[2], "voice": "alloy", "input": text, "response_format": "pcm"}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=120).content


def main() -> None:
    """Read the arguments, run, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with Server(MODELS, log_level="warning") as server:
        soak = Soak(server, [spoken(server, each) for each in QUESTIONS], random.Random(args.seed))
        asyncio.run(soak.run(args.sessions, 15.0))
        before = snapshot(server)
        print("before", before, flush=True)
        soak.ends.clear()
        soak.barge_in_s.clear()
        asyncio.run(soak.run(args.sessions, 60 * args.minutes))
        after = snapshot(server)
        print("after ", after)
        print(dict(sorted(soak.ends.items())))
        if soak.barge_in_s:
            median, p95 = np.quantile(soak.barge_in_s, (0.5, 0.95)) * 1000
            print(
                f"end of an answer after speech_started: median {median:.0f} ms, p95 {p95:.0f} ms"
            )
        print(server.log.read_text()[-2000:])
    grown = sum(after["descriptors"]) - sum(before["descriptors"]) > MAX_NEW_DESCRIPTORS
    grown |= any(after[name] > before[name] for name in held_names(before))
    sys.exit(grown)


def held_names(found: dict[str, Any]) -> list[str]:
    """The names of what the engine holds."""
    return [name for name in found if name.startswith("triptych_")]


if __name__ == "__main__":
    main()
