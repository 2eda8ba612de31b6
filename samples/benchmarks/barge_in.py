"""Interruptions of an answer: how soon it is held and ended, and how often by something else.

    apt-get install flite bucklespring-data
    apt-get install asterisk-core-sounds-{en,es,fr}-g722 asterisk-moh-opsound-g722
    python samples/benchmarks/barge_in.py  # or with --url: a running server, in real time

Onsets are beginnings of recorded prompts (women, in English, Spanish and French) and of sentences
of Flite's voices with plosive and soft beginnings, at random places of a frame and of a client's
piece of 20 ms, in pink noise 15 to 30 dB below the speech. Speech begins with the first 5 ms of the
clean recording whose energy is within 30 dB of its level. Non-speech is noise, clicks, a recorded
keyboard, knocks, breath, coughs of noise, recorded and made-up music, hum, and the echo of an
answer of `triptych-voice`, 20 to 30 dB below the user. Prints, for several shares of the threshold
from which on a frame is suspicious, the delays (median / 95 %, ms of sound) up to the piece that
holds or ends the answer, and how often a minute that happens without speech.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from talk_questions import LEVEL, VOICES, spoken
from websockets.asyncio.client import ClientConnection, connect

from triptych import SpeechPipeline
from triptych.core.media.audio.resampling import Pcm, Resampler
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.talk.hearing import suspicion
from triptych.modalities.talk.hearing.source import open_network
from triptych.modalities.talk.hearing.turns import VoiceTurnDetector
from triptych.modalities.talk.hearing.voice_activity import FRAME, VoiceNetwork
from triptych.modalities.talk.ports import (
    HEARING_RATE,
    SpeechDismissed,
    SpeechStarted,
    SpeechSuspected,
    TurnOptions,
)

RATE = HEARING_RATE
CALM_S = 3.0
"""Seconds of noise before an onset."""
EDGE = RATE // 200
"""Samples in 5 ms."""
PIECE = RATE // 50
"""Samples that a client sends at a time."""
STEP = RATE // 100
"""Samples whose level is looked at."""
SENTENCES = (
    *("Please stop.", "Tell me more.", "Can you repeat that?", "But why?", "Do that again."),
    *("And then?", "I have a question.", "Only one more thing.", "Every day?", "Okay, enough."),
    *("No, wait.", "Maybe later.", "My name is John.", "Stop it.", "How about tomorrow?"),
    *("Who is that?", "First of all.", "Sorry, what?", "Thank you.", "Hello there."),
    *("Wait a moment.", "Well, I think so.", "Listen to me.", "Really?", "Yes, please."),
)
ANSWER = (
    "Bees make honey from the nectar of flowers. They store it in their hive for the winter."
    " A ship sailed to a far island, where an old man lived with his dog. Every morning he walked"
    " along the shore and looked for shells. One day he found a bottle with a letter in it."
)
STARTED = "input_audio_buffer.speech_started"
KINDS = (("input_audio_buffer.speech_suspected", STARTED), (STARTED,))
"""The events that hold an answer, and those that end it."""
SKIPPED = ("silence", "beep", "tone", "ring", "noise", "conf-")
Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Onset:
    """A clip [S] in which speech begins at the sample `begin`."""

    pcm_S: Pcm
    begin: int


@dataclass(frozen=True, slots=True)
class Reaction:
    """The samples after which an answer was held, and ended, and the seconds that it was held."""

    holds: list[int]
    ends: list[int]
    held_s: float


def level_of(pcm_S: Pcm) -> float:
    """The root mean square of samples."""
    return float(np.sqrt(np.square(pcm_S, dtype=np.float64).mean()))


def levels(pcm_S: Pcm, size: int) -> Pcm:
    """The level of each `size` samples."""
    whole = pcm_S[: len(pcm_S) // size * size].reshape(-1, size)
    return np.asarray(np.sqrt(np.square(whole).mean(1)), np.float32)


def pink(rng: Rng, num: int, level: float) -> Pcm:
    """Pink noise of this level."""
    spectrum = np.fft.rfft(rng.standard_normal(num))
    spectrum /= np.sqrt(np.maximum(np.fft.rfftfreq(num, 1 / RATE), 20))
    noise = np.fft.irfft(spectrum, num)
    return np.asarray(noise * level / level_of(noise), np.float32)


def band(rng: Rng, num: int, low_hz: float, high_hz: float) -> Pcm:
    """Noise between two frequencies; level 1."""
    spectrum = np.fft.rfft(rng.standard_normal(num))
    hertz = np.fft.rfftfreq(num, 1 / RATE)
    noise = np.fft.irfft(np.where((hertz < low_hz) | (hertz > high_hz), 0, spectrum), num)
    return np.asarray(noise / level_of(noise), np.float32)


def decibels(value: float) -> float:
    """A ratio of amplitudes."""
    return float(10 ** (value / 20))


def read(path: Path) -> Pcm:
    """A file of sound [S]; G.722 has no header that names it."""
    import av

    with av.open(str(path), format="g722" if path.suffix == ".g722" else None) as file:
        resampler = av.AudioResampler("flt", "mono", RATE)
        frames = [out for each in file.decode(audio=0) for out in resampler.resample(each)]
        pieces = [out.to_ndarray()[0] for out in (*frames, *resampler.resample(None))]
    return np.concatenate(pieces).astype(np.float32)


def onset(rng: Rng, speech_S: Pcm, echo_S: Pcm | None = None) -> Onset:
    """Speech after some noise, and over the echo of an answer if there is one."""
    frames = levels(speech_S, STEP)
    loud = frames[frames > 0.1 * frames.max()]
    speech_S = speech_S * np.float32(LEVEL / level_of(loud))
    audible = np.flatnonzero(levels(speech_S, EDGE) > LEVEL * decibels(-30))
    first = int(audible[0]) * EDGE
    lead = round(CALM_S * RATE) + int(rng.integers(FRAME))
    kept_S = speech_S[max(0, first - RATE // 20) : first + 3 * RATE]
    clean_S = np.pad(kept_S, (lead, RATE))
    begin = lead + min(first, RATE // 20)
    clip_S = clean_S + pink(rng, len(clean_S), LEVEL * decibels(-rng.uniform(15, 30)))
    if echo_S is not None:
        clip_S += np.resize(echo_S, len(clip_S)) * LEVEL * decibels(-rng.uniform(20, 30))
    return Onset(clip_S.astype(np.float32), begin)


def recorded(sounds: Path, num: int) -> Iterator[Pcm]:
    """Recorded prompts, mixed."""
    files = sorted((sounds / "asterisk/sounds").rglob("*.g722"))
    names = [str(path.relative_to(sounds)) for path in files]
    usable = [
        path
        for path, name in zip(files, names, strict=True)
        if not any(word in name for word in SKIPPED)
    ]
    order = np.random.default_rng(0).permutation(len(usable))
    clips = (read(usable[at]) for at in order)
    for _ in range(num):
        clip_S = next(clip for clip in clips if len(clip) > RATE // 2)
        yield clip_S


def flite(program: str) -> Iterator[Pcm]:
    """Sentences of voices that are not ours."""
    for text in SENTENCES:
        for voice in VOICES:
            resampler = Resampler(24_000, RATE)
            yield np.concatenate([resampler.push(spoken(program, voice, text)), resampler.flush()])


def click(rng: Rng) -> Pcm:
    """A click of some milliseconds."""
    num = int(rng.uniform(0.0005, 0.004) * RATE) + 4
    fading = np.exp(-np.arange(num) / (num / 4))
    return np.asarray(rng.standard_normal(num) * fading * rng.uniform(0.1, 0.8), np.float32)


def knock(rng: Rng) -> Pcm:
    """A low knock."""
    num = int(rng.uniform(0.08, 0.25) * RATE)
    tone = np.sin(2 * np.pi * rng.uniform(60, 300) * np.arange(num) / RATE)
    sound = (tone + 0.3 * rng.standard_normal(num)) * np.exp(-np.arange(num) / (num / 6))
    return np.asarray(sound * rng.uniform(0.1, 0.5), np.float32)


def breath(rng: Rng) -> Pcm:
    """A breath."""
    num = int(rng.uniform(0.2, 0.6) * RATE)
    sound = band(rng, num, 300, 6000) * np.hanning(num) * rng.uniform(0.005, 0.05)
    return np.asarray(sound, np.float32)


def cough(rng: Rng) -> Pcm:
    """A burst of noise like a cough."""
    num = int(rng.uniform(0.12, 0.3) * RATE)
    shape = np.minimum(np.arange(num) / (0.01 * RATE), 1) * np.exp(-np.arange(num) / (num / 3))
    return np.asarray(band(rng, num, 200, 5000) * shape * rng.uniform(0.05, 0.3), np.float32)


def scattered(rng: Rng, make: Callable[[Rng], Pcm], every_s: float, seconds: float) -> Pcm:
    """Sounds at random times in soft noise."""
    whole_S = pink(rng, round(seconds * RATE), LEVEL * decibels(-30))
    at = RATE
    while at < len(whole_S):
        piece_S = make(rng)[: len(whole_S) - at]
        whole_S[at : at + len(piece_S)] += piece_S
        at += int(rng.exponential(every_s) * RATE) + RATE // 40
    return whole_S


def tones(rng: Rng, seconds: float) -> Pcm:
    """Made-up music: notes with harmonics."""
    whole_S = np.zeros(round(seconds * RATE))
    for at in range(0, len(whole_S) - 2 * RATE, RATE // 4):
        for _ in range(rng.integers(1, 4)):
            hertz = 110 * 2 ** (rng.integers(36) / 12)
            time_S = np.arange(int(rng.uniform(0.3, 1.8) * RATE)) / RATE
            parts = [n for n in range(1, 7) if n * hertz < RATE / 2]
            note = sum(np.sin(2 * np.pi * hertz * n * time_S) / n**1.5 for n in parts)
            fading = np.minimum(time_S / 0.01, 1) * np.exp(-time_S / rng.uniform(0.2, 1))
            whole_S[at : at + len(time_S)] += note * fading
    return np.asarray(whole_S * 0.05 / level_of(whole_S), np.float32)


def hum(rng: Rng, seconds: float) -> Pcm:
    """The hum of mains."""
    time_S = np.arange(round(seconds * RATE)) / RATE
    phases = rng.uniform(0, 6, 11)
    waves = [np.sin(2 * np.pi * 50 * n * time_S + phases[n - 1]) / n for n in range(1, 12)]
    return np.asarray(0.02 * np.sum(waves, 0), np.float32)


def non_speech(sounds: Path, echo_S: Pcm, seconds: float) -> dict[str, Pcm]:
    """Sounds that are not the user's, each for about so long."""
    rng = np.random.default_rng(0)
    num = round(seconds * RATE)
    keys = [read(path) for path in sorted((sounds / "buckle/wav").glob("*.wav"))]
    steps = np.repeat([decibels(-rng.uniform(5, 40)) for _ in range(num // 8000)], 8000)
    found = {
        "noise": pink(rng, num, LEVEL * decibels(-15)),
        "noise in steps": pink(rng, len(steps), LEVEL) * steps.astype(np.float32),
        "clicks": scattered(rng, click, 0.3, seconds),
        "keyboard": scattered(rng, lambda rng: keys[rng.integers(len(keys))][:8000], 0.1, seconds),
        "knocks": scattered(rng, knock, 0.7, seconds),
        "breath": scattered(rng, breath, 1.0, seconds),
        "coughs": scattered(rng, cough, 1.0, seconds),
        "hum": hum(rng, seconds),
        "tones": tones(rng, seconds),
    }
    for path in sorted((sounds / "asterisk/moh").glob("*.g722")):
        music_S = read(path)[:num]
        found[f"music: {path.stem}"] = music_S * np.float32(0.03 / level_of(music_S))
    for below in (20, 25, 30):
        soft = pink(rng, num, LEVEL * decibels(-40))
        found[f"echo {-below} dB"] = soft + np.resize(echo_S, num) * LEVEL * decibels(-below)
    return found


def react(network: VoiceNetwork, pcm_S: Pcm, first: int = PIECE) -> Reaction:
    """The reaction to sound in pieces, of which the first has `first` samples."""
    detector = VoiceTurnDetector(network, TurnOptions(reports_suspicion=True))
    detector._tracker._echo.hear(LEVEL)  # the question before the answer
    detector._tracker._echo.end_turn()
    found, held_from = Reaction([], [], 0.0), 0
    held_s = 0.0
    for end in range(first, len(pcm_S) + PIECE, PIECE):
        for event in detector.push(pcm_S[max(0, end - PIECE) : end], is_answering=True):
            match event:
                case SpeechSuspected():
                    found.holds.append(held_from := end)
                case SpeechDismissed():
                    held_s += (end - held_from) / RATE
                case SpeechStarted():
                    found.ends.append(end)
    return replace(found, held_s=held_s)


def delay_ms(onset: Onset, moments: Sequence[int]) -> float:
    """The delay of the first moment after speech has begun; a second if there is none."""
    later = [at for at in moments if at > onset.begin]
    return (later[0] - onset.begin) * 1000 / RATE if later else 1000.0


def measure(
    network: VoiceNetwork, sets: Mapping[str, Sequence[Onset]], other: Mapping[str, Pcm]
) -> Iterator[str]:
    """Yield the cells of a row."""
    rng = np.random.default_rng(1)
    for onsets in sets.values():
        found = [react(network, each.pcm_S, int(rng.integers(1, PIECE))) for each in onsets]
        pairs = list(zip(onsets, found, strict=True))
        holds = [delay_ms(onset, sorted(each.holds + each.ends)) for onset, each in pairs]
        ends = [delay_ms(onset, each.ends) for onset, each in pairs]
        for delays in (holds, ends):
            yield "{:.0f} / {:.0f}".format(*np.quantile(delays, (0.5, 0.95)))
    for is_echo in (True, False):
        sounds = [pcm_S for name, pcm_S in other.items() if name.startswith("echo") == is_echo]
        minutes = sum(map(len, sounds)) / RATE / 60
        found = [react(network, pcm_S) for pcm_S in sounds]
        held_s = sum(each.held_s for each in found) / minutes
        yield f"{sum(len(each.holds) for each in found) / minutes:.2f} ({held_s:.2f} s)"
        yield f"{sum(len(each.ends) for each in found) / minutes:.2f}"


async def live_delays(url: str, onset: Onset) -> tuple[float, float]:
    """The delays with which a client learns to hold and to end an answer, in real time."""
    resampler = Resampler(RATE, 24_000)
    pcm_S = np.concatenate([resampler.push(onset.pcm_S), resampler.flush()])
    data = (np.clip(pcm_S, -1, 1) * 32767).astype("<i2").tobytes()
    turns = {"hold_response": True}
    update = {"type": "realtime", "audio": {"input": {"turn_detection": turns}}}
    moments: list[tuple[str, float]] = []

    async def read(socket: ClientConnection) -> None:
        while True:
            event = json.loads(await socket.recv())
            moments.append((event["type"], time.perf_counter()))

    async with connect(f"{url}/v1/realtime", proxy=None) as socket:
        await socket.send(json.dumps({"type": "session.update", "session": update}))
        reading = asyncio.create_task(read(socket))
        start = time.perf_counter()
        for at in range(0, len(data), 960):  # 20 ms, sent once they have been spoken
            await asyncio.sleep(max(0.0, start + (at + 960) / 48_000 - time.perf_counter()))
            sound = base64.b64encode(data[at : at + 960]).decode()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": sound}))
        reading.cancel()
    begin = start + onset.begin / RATE
    found = [[when for kind, when in moments if kind in kinds and when > begin] for kinds in KINDS]
    held, ended = ((times[0] - begin) * 1000 if times else 1000.0 for times in found)
    return held, ended


async def measure_live(url: str, onsets: Sequence[Onset]) -> None:
    """Print the delays of a running server, four sessions at a time."""
    places = asyncio.Semaphore(4)

    async def one(onset: Onset) -> tuple[float, float]:
        async with places:
            return await live_delays(url, onset)

    for name, delays in zip(
        ("held", "ended"), zip(*await asyncio.gather(*map(one, onsets)), strict=True), strict=True
    ):
        print("{}: {:.0f} / {:.0f} ms".format(name, *np.quantile(delays, (0.5, 0.95))))


def answer() -> Pcm:
    """An answer of the embedded voice; level 1."""
    with SpeechPipeline.from_pretrained("triptych-voice") as speak:
        speech = speak(ANSWER, voice="alloy")
    resampler = Resampler(speech.sample_rate, RATE)
    echo_S = np.concatenate([resampler.push(speech.audio), resampler.flush()])
    return np.asarray(echo_S / level_of(echo_S), np.float32)


def main() -> None:
    """Measure several shares of the threshold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sounds", type=Path, default=Path("/usr/share"), help="their folder")
    parser.add_argument("--flite", default="flite", help="the program, if it is not on the path")
    parser.add_argument("--num", type=int, default=240, help="number of recorded onsets")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each other sound")
    parser.add_argument("--url", help="measure a running server instead: ws://HOST:PORT")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 0.2, 0.4, 1.0])
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    if args.url:
        onsets = [onset(rng, each) for each in recorded(args.sounds, args.num)]
        asyncio.run(measure_live(args.url, onsets))
        return
    echo_S = answer()
    clips = {"recorded": list(recorded(args.sounds, args.num)), "Flite": list(flite(args.flite))}
    sets = {name: [onset(rng, each) for each in found] for name, found in clips.items()}
    sets["over an echo"] = [onset(rng, each, echo_S) for each in clips["recorded"]]
    other = non_speech(args.sounds, echo_S, args.seconds)
    network = open_network(ModelOptions(), SilentProgress())
    named = [*sets, "echo", "other sounds"]
    print(f"| share | {' | '.join(f'{name}, held | ended' for name in named)} |")
    for share in args.shares:
        suspicion.SUSPICIOUS_SHARE = share
        print(f"| {share} | {' | '.join(measure(network, sets, other))} |", flush=True)


if __name__ == "__main__":
    main()
