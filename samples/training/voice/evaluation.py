"""Quality of a voice on fifty unseen sentences, scored by models, beside its upper bounds.

Owns the table. The voice runs in the package's own pipeline, as served. The upper bounds are the
codec with the codes of the teacher's frames, and the teacher's own audio.
"""

from __future__ import annotations

import statistics
import wave
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from codec_training import CodecTrainer, CodecTraining
from hibari import dsp
from metrics import Judge, Listener, resample
from rich.progress import track
from sentences import held_out_sentences
from talker_training import encode
from teacher import Teacher
from torch import Tensor

from triptych import SpeechPipeline
from triptych.modalities.tts.configs.voice import CodecConfig
from triptych.modalities.tts.engine.models.voice.synthesis import synthesize

Say = Callable[[str], Tensor]


def evaluate(voice: Path, folder: Path | None, count: int, wavs: Path | None) -> None:
    """Print a Markdown table; with `folder`, where the checkpoints are, the upper bounds too."""
    listener, judge = Listener(), Judge()
    rows = ["| | WER | DNSMOS overall | signal | background |", "|---|---|---|---|---|"]
    with ExitStack() as stack:
        for name, say in _ways(stack, voice, folder).items():
            errors, words, scores = 0, 0, []
            for number, sentence in enumerate(track(held_out_sentences()[:count], name)):
                pcm_S = say(sentence)
                if wavs is not None:
                    _write(wavs / f"{name.replace(' ', '-')}-{number:02d}.wav", pcm_S)
                heard_S = resample(pcm_S, CodecConfig().sample_rate)
                wrong, said = listener.word_errors(sentence, listener.text(heard_S))
                errors, words = errors + wrong, words + said
                scores.append(judge(heard_S))
            signal, background, overall = map(statistics.mean, zip(*scores, strict=True))
            shares = f"{errors / words:.1%} | {overall:.2f} | {signal:.2f} | {background:.2f}"
            rows.append(f"| {name} | {shares} |")
    print("\n".join(rows))


def _ways(stack: ExitStack, voice: Path, folder: Path | None) -> dict[str, Say]:
    speak = stack.enter_context(SpeechPipeline.from_pretrained(str(voice)))
    ways: dict[str, Say] = {"voice": lambda sentence: torch.from_numpy(speak(sentence).audio)}
    if folder is not None:
        teacher = Teacher()
        ways["codec alone"] = _through_codec(teacher, folder)
        ways["teacher"] = lambda sentence: torch.from_numpy(
            dsp.synth(*teacher.spectra(teacher.symbols(sentence)), np.random.default_rng(0))
        )
    return ways


def _through_codec(teacher: Teacher, folder: Path) -> Say:
    trainer = CodecTrainer(folder, CodecTraining(), CodecConfig())
    encoder, codec = trainer.encoder.cpu(), trainer.codec.cpu().prepare()

    @torch.inference_mode()
    def say(sentence: str) -> Tensor:
        codes_SQ = encode(encoder, teacher.read(teacher.symbols(sentence)), codec.config)
        codes_1QS = torch.from_numpy(codes_SQ.T[None].astype(np.int64))
        return synthesize(codec(codes_1QS), torch.zeros(1, dtype=torch.int64), codec.config)[0]

    return say


def _write(path: Path, pcm_S: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = (pcm_S.clamp(-1, 1) * 32767).to(torch.int16).numpy()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(CodecConfig().sample_rate)
        file.writeframes(samples.astype("<i2").tobytes())
