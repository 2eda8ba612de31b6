"""How good a voice is: fifty sentences it never saw, judged by models, beside its ceilings.

Owns the table. The teacher's own sound is the ceiling of all, the codec's (of codes that it made
itself from the teacher's frames) that of the token decoder.
"""

from __future__ import annotations

import statistics
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from codec_training import CodecTrainer, CodecTraining, frames_of, to_codes
from corpus import STEP_FRAMES
from hibari import dsp
from metrics import Judge, Listener, resample
from rich.progress import track
from sentences import held_out_sentences
from speaking import Speaker
from teacher import Teacher
from torch import Tensor

from triptych.modalities.tts.models.voice.config import CodecConfig

Say = Callable[[list[int]], Tensor]


def evaluate(voice: Path, folder: Path | None, count: int, wavs: Path | None) -> None:
    """Print a Markdown table; with `folder`, where the checkpoints are, the ceilings too."""
    teacher, speaker = Teacher(), Speaker(voice)
    rate = speaker.config.codec.sample_rate
    ways: dict[str, Say] = {"voice": lambda ids: speaker.sound(speaker.codes(ids))}
    if folder is not None:
        ways["codec alone"] = _through_codec(teacher, speaker, folder)
        ways["teacher"] = lambda ids: torch.from_numpy(
            dsp.synth(*teacher.spectra(ids), np.random.default_rng(0))
        )
    listener, judge = Listener(), Judge()
    rows = ["| | WER | DNSMOS overall | signal | background |", "|---|---|---|---|---|"]
    for name, say in ways.items():
        errors = words = 0
        scores = []
        for number, sentence in enumerate(track(held_out_sentences()[:count], name)):
            pcm_S = say(teacher.symbols(sentence))
            if wavs is not None:
                _write(wavs / f"{name.replace(' ', '-')}-{number:02d}.wav", pcm_S, rate)
            heard_S = resample(pcm_S, rate)
            wrong, said = listener.word_errors(sentence, listener.text(heard_S))
            errors, words = errors + wrong, words + said
            scores.append(judge(heard_S))
        signal, background, overall = (
            statistics.mean(column) for column in zip(*scores, strict=True)
        )
        rows.append(
            f"| {name} | {errors / words:.1%} | {overall:.2f} | {signal:.2f} | {background:.2f} |"
        )
    print("\n".join(rows))


def _through_codec(teacher: Teacher, speaker: Speaker, folder: Path) -> Say:
    trainer = CodecTrainer(folder, CodecTraining(), CodecConfig())
    num_levels = speaker.config.codec.num_levels

    @torch.inference_mode()
    def say(ids: list[int]) -> Tensor:
        reading = teacher.read(ids)
        missing = -len(reading.f0_F) % STEP_FRAMES
        hidden = np.pad(reading.hidden_FC.astype(np.float32), ((0, missing), (0, 0)), "edge")
        f0 = np.pad(reading.f0_F, (0, missing), "edge")
        frames = frames_of(torch.from_numpy(hidden)[None], torch.from_numpy(f0)[None])
        values = trainer.encoder.cpu()(frames.features())
        return speaker.sound(to_codes(values, num_levels))

    return say


def _write(path: Path, pcm_S: Tensor, rate: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = (pcm_S.clamp(-1, 1) * 32767).to(torch.int16).numpy()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
