"""Faults an uploaded recording can cause."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from support.child_processes import decoders
from support.crashing_clip_decoder import CRASHING, MODULE
from support.http import ask, live, refused
from support.voices_app import RATE, make_voice_app, make_voice_service, recording
from triptych.core.http.server import HttpServer
from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.framing import OggOpusPages
from triptych.core.media.child import DecodePool
from triptych.modalities.tts.api.voices.store import VoiceQuota

VOICES = "/v1/audio/voices"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """One server; whatever is sent to it, it must still make voices afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        pool = DecodePool([MODULE])
        folder = tmp_path_factory.mktemp("voices")
        service = make_voice_service(folder, pool, quota=VoiceQuota())
        with live(make_voice_app(service)) as server:
            yield server
            assert sent(server, recording()).status_code == 200
            assert len(list(folder.glob("*/*.voice"))) == len(listed(server))
        asyncio.run(pool.close())


def sent(server: HttpServer, sound: bytes) -> Any:
    fields = {"name": "Ada", "consent": "yes"}
    return ask(server.url, VOICES, data=fields, files={"audio_sample": ("a.wav", sound)})


def listed(server: HttpServer) -> list[Any]:
    cards = httpx.get(server.url + VOICES).json()["data"]
    return [card for card in cards if card["type"] == "audio_sample"]


def refusal(server: HttpServer, sound: bytes, status: int) -> str:
    """Why `sound` is refused; nothing is kept of it."""
    before = listed(server)
    error = refused(sent(server, sound), status)
    assert listed(server) == before
    return str(error["message"])


def opus_bomb(num_packets: int) -> bytes:
    """60 ms of silence in each packet of one byte."""
    pages = OggOpusPages()
    head = pages.header(b"OpusHead\x01\x01" + struct.pack("<HIhB", 312, 8000, 0, 0))
    starts = range(0, num_packets, 250)
    return head + b"".join(pages.page([b"\x18"] * 250, (start + 250) * 2880) for start in starts)


def wav(pcm_S: np.ndarray, **header: int) -> bytes:
    """A WAV file, with fields of its header forged."""
    data = bytearray(encode_clip("wav", RATE, pcm_S.astype(np.float32)))
    for name, value in header.items():
        start = {"size": data.index(b"data") + 4, "rate": 24}[name]
        struct.pack_into("<I", data, start, value)
    return bytes(data)


def test_a_bomb_of_sound_is_refused_at_the_limit(server: HttpServer) -> None:
    hours = opus_bomb(250_000)  # 4 hours in a megabyte
    assert len(hours) < 2 * 2**20
    zeros = encode_clip("flac", RATE, np.zeros(RATE * 120, np.float32))
    for bomb in (hours, zeros):
        assert "longer than 60 s" in refusal(server, bomb, 413)


def test_what_a_header_declares_changes_nothing(server: HttpServer) -> None:
    tone_S = 0.3 * np.sin(np.arange(2 * RATE) / 20)
    for size in (0xFFFFFFFF, 0x7FFFFFFF, 2**31):
        assert sent(server, wav(tone_S, size=size)).json()["duration_s"] == 2.0
    assert "samples per second" in refusal(server, wav(tone_S, rate=1_000_000), 400)
    assert "damaged" in refusal(server, wav(tone_S, rate=4_000_000_000), 400)
    assert "10 MiB" in refusal(server, bytes(10 * 2**20 + 1), 413)


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        (b"", "empty"),
        (wav(np.zeros(0)), "no sound"),
        (wav(np.zeros(1)), "at least 1 s"),
        (wav(np.ones(1)), "at least 1 s"),
        (recording(0.9), "at least 1 s"),
        (wav(np.zeros(3 * RATE)), "silent"),
        (wav(np.full(3 * RATE, 0.5)), "silent"),
        (recording(3, level=1e-4), "silent"),
    ],
    ids=["0 bytes", "0 samples", "1 sample", "1 loud sample", "short", "zeros", "offset", "faint"],
)
def test_a_recording_without_a_voice(server: HttpServer, sound: bytes, message: str) -> None:
    assert message in refusal(server, sound, 400)


def test_a_crash_of_the_decoder_costs_its_own_request_alone(server: HttpServer) -> None:
    assert sent(server, recording()).status_code == 200
    (before,) = decoders()
    assert "crash" in refusal(server, CRASHING, 400)
    assert not before.is_running() or before.status() == psutil.STATUS_ZOMBIE
    assert sent(server, recording()).status_code == 200
    (after,) = decoders()
    assert after.pid != before.pid
