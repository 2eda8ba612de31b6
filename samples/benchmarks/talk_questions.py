"""Twenty spoken questions with pauses and noise, in voices that are not ours, for talk.py.

    apt-get install flite
    python samples/benchmarks/talk_questions.py /tmp/questions

Flite (Carnegie Mellon, BSD-like licence) speaks with the voices rms, slt and awb. A `|` in a text
is a pause of 150 to 350 ms in mid-sentence. Pink noise lies 15 to 30 dB below the speech, also
before and after it. Everything follows from the number of the question. Writes WAV files at 24 kHz,
and questions.json with the texts and the moments (seconds) at which speech begins and ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.intake import ClipLimits, read_clip
from triptych.core.media.audio.resampling import Pcm

SAMPLE_RATE = 24_000
"""That of pcm16 in OpenAI's realtime API."""
VOICES = ("rms", "slt", "awb")
LEAD_S = 0.6
LEVEL = 0.1
"""Root mean square of the speech."""
_AUDIBLE = 10 ** (-45 / 20)
_EDGE_S = 0.01
_LIMITS = ClipLimits(max_bytes=2**24, max_seconds=60)
QUESTIONS = (
    "What is the capital of France?",
    "Can you tell me | how many days there are in a week?",
    "Why is the sky blue?",
    "Who wrote the play | Romeo and Juliet?",
    "How do I boil an egg?",
    "What is the largest ocean | on our planet?",
    "Please tell me | a short story about a dog.",
    "What color do you get | if you mix blue and yellow?",
    "How far away is the moon?",
    "What is the difference | between a cat and a tiger?",
    "Where do penguins live?",
    "How does a bicycle | stay upright?",
    "What should I cook | for dinner tonight?",
    "Which planet is closest | to the sun?",
    "Can you explain | what a computer does?",
    "What do bees make?",
    "How long does it take | to learn a language?",
    "What is a good name | for a small black horse?",
    "Why do leaves fall | in the autumn?",
    "How many minutes | are there in two hours?",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A recorded question: its file, its text, and when it is spoken."""

    file: str
    text: str
    voice: str
    begin_s: float
    end_s: float


def spoken(flite: str, voice: str, text: str) -> Pcm:
    """Speech of a text [S], without the silence around it."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as wav:
        subprocess.run([flite, "-voice", voice, "-t", text, "-o", wav.name], check=True)
        pcm_S = read_clip(Path(wav.name).read_bytes(), sample_rate=SAMPLE_RATE, limits=_LIMITS)
    loud = np.flatnonzero(np.abs(pcm_S) > _AUDIBLE * np.abs(pcm_S).max())
    edge = round(_EDGE_S * SAMPLE_RATE)
    return np.asarray(pcm_S[max(0, loud[0] - edge) : loud[-1] + edge], np.float32)


def pink_noise(rng: np.random.Generator, num: int) -> Pcm:
    """Noise [S] whose power falls with the frequency, as in rooms; root mean square 1."""
    spectrum = np.fft.rfft(rng.standard_normal(num))
    spectrum /= np.sqrt(np.maximum(np.fft.rfftfreq(num, 1 / SAMPLE_RATE), 20))
    noise = np.fft.irfft(spectrum, num)
    return np.asarray(noise / np.sqrt(np.square(noise).mean()), np.float32)


def record(number: int, flite: str, folder: Path, tail_s: float) -> Question:
    """Speak a question and write its file, with `tail_s` of noise after it."""
    rng = np.random.default_rng(number)
    voice = VOICES[number % len(VOICES)]
    pieces: list[Pcm] = []
    for part in QUESTIONS[number].split("|"):
        pause_s = rng.uniform(0.15, 0.35) if pieces else 0.0
        pieces += [np.zeros(round(pause_s * SAMPLE_RATE), np.float32), spoken(flite, voice, part)]
    speech_S = np.concatenate(pieces)
    speech_S *= LEVEL / np.sqrt(np.square(speech_S).mean())
    lead, tail = round(LEAD_S * SAMPLE_RATE), round(tail_s * SAMPLE_RATE)
    clean_S = np.pad(speech_S, (lead, tail))
    level = LEVEL * 10 ** (-rng.uniform(15, 30) / 20)
    noisy_S = np.clip(clean_S + level * pink_noise(rng, len(clean_S)), -1, 1)
    name = f"question_{number:02}.wav"
    (folder / name).write_bytes(encode_clip("wav", SAMPLE_RATE, noisy_S.astype(np.float32)))
    text = " ".join(QUESTIONS[number].replace("|", "").split())
    edge_s = lead / SAMPLE_RATE + len(speech_S) / SAMPLE_RATE - _EDGE_S
    return Question(name, text, voice, LEAD_S + _EDGE_S, round(edge_s, 3))


def main() -> None:
    """Write all questions into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flite", default="flite", help="the program, if it is not on the path")
    parser.add_argument("--tail", type=float, default=3.0, help="seconds of noise after the speech")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    found = [record(n, args.flite, args.folder, args.tail) for n in range(len(QUESTIONS))]
    text = json.dumps([asdict(each) for each in found], indent=1)
    (args.folder / "questions.json").write_text(text, encoding="utf-8")
    print(f"{len(found)} questions in {args.folder}")


if __name__ == "__main__":
    main()
