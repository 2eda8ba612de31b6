"""The embedded recognizer on the embedded voice, compared with transformers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from support.asr import run, text_ids, transcribe_request
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import resolve
from triptych.modalities.asr import windows
from triptych.modalities.asr.api.pipeline import TranscriptionPipeline, resample
from triptych.modalities.asr.engine.whisper.model import WhisperNetwork
from triptych.modalities.asr.engine.whisper.recognizer import SpeechRecognizer, TranscriptionJob
from triptych.modalities.asr.source import WHISPER_TINY
from triptych.modalities.asr.spec import SAMPLE_RATE, WhisperSpec
from triptych.modalities.tts.api.pipeline import SpeechPipeline

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(900)]
SENTENCES = (
    "The old man walked slowly along the beach and looked at the sea.",
    "Please bring me a glass of water and two slices of bread.",
    "In the morning we will take the first train to the city.",
)


@pytest.fixture(scope="module")
def speech() -> tuple[Pcm, ...]:
    """The sentences, said by the embedded voice; with other noise, other words are misheard."""
    with SpeechPipeline.from_pretrained(progress=False, threads=1) as speak:
        said = (speak(text, seed=1).audio for text in SENTENCES)
        return tuple(resample(audio, speak.sample_rate) for audio in said)


@pytest.fixture(scope="module")
def folder() -> Path:
    options, progress = ModelOptions(), SilentProgress()
    resolved = resolve(
        WHISPER_TINY.name, name=None, options=options, progress=progress, sources=(WHISPER_TINY,)
    )
    return Path(resolved.folder)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def test_transcript_has_the_spoken_words(speech: tuple[Pcm, ...]) -> None:
    with TranscriptionPipeline.from_pretrained(progress=False, threads=1) as pipeline:
        for sentence, pcm_S in zip(SENTENCES, speech, strict=True):
            transcript = pipeline(pcm_S, has_word_times=True)
            pairs = zip(words(transcript.text), words(sentence), strict=True)
            assert (
                sum(transcribed != meant for transcribed, meant in pairs) <= 1
            )  # of both models' mistakes
            times = [t for word in transcript.words for t in (word.start_s, word.end_s)]
            assert times == sorted(times)
            assert times[-1] <= transcript.duration_s
            # A word takes more than a moment, and less than a sentence.
            lengths = [word.end_s - word.start_s for word in transcript.words]
            assert 0.05 < float(np.median(lengths)) < 0.8
            assert max(lengths) < 2.0


def test_long_speech_gives_the_tokens_of_transformers(
    speech: tuple[Pcm, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token over several windows, each prompted with the text before it, in float32."""
    monkeypatch.setattr(windows, "FALLBACK_TEMPERATURES", (0.0,))
    pause_S = np.zeros(SAMPLE_RATE // 2, np.float32)
    pcm_S = np.concatenate(
        [part for _ in range(4) for sentence in speech for part in (sentence, pause_S)]
    )
    assert len(pcm_S) > 35 * SAMPLE_RATE
    with Checkpoint.open(folder) as checkpoint:
        network = WhisperNetwork.load(
            checkpoint,
            WhisperSpec.read(folder),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = text_ids(
        run(TranscriptionJob(SpeechRecognizer.of(network, tokenizer), transcribe_request(pcm_S)))
    )
    theirs = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    features = WhisperFeatureExtractor()(
        pcm_S, sampling_rate=SAMPLE_RATE, return_tensors="pt", truncation=False, padding="longest"
    ).input_features
    with torch.inference_mode():
        ids = theirs.generate(
            features, return_timestamps=True, condition_on_prev_tokens=True, temperature=0.0
        )[0]
    assert ours == [token for token in ids.tolist() if token < network.spec.end_id]
