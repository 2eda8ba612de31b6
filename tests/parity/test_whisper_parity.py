"""Whisper against transformers on the same random weights: features, tokens, segments, the warp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from support.asr import (
    CONFIG,
    MULTILINGUAL,
    WINDOW_S,
    noise,
    run,
    spec,
    tokenizer,
    transcribe_request,
    write_folder,
)
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.asr import windows
from triptych.modalities.asr.engine.whisper.features import LogMel, Spectrogram
from triptych.modalities.asr.engine.whisper.model import (
    WhisperNetwork,
    WhisperWindow,
    median_filter,
    warp,
)
from triptych.modalities.asr.engine.whisper.recognizer import SpeechRecognizer, TranscriptionJob
from triptych.modalities.asr.spec import SAMPLE_RATE, WhisperSpec
from triptych.modalities.asr.wire import TimedTokens, TranscriptToken

CPU = torch.device("cpu")
WINDOW_FRAMES = 100 * WINDOW_S


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More only wait for each other on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=CONFIG["num_mel_bins"], chunk_length=WINDOW_S)


def their_features(pcm_S: np.ndarray) -> torch.Tensor:
    is_long = len(pcm_S) > WINDOW_S * SAMPLE_RATE
    features: torch.Tensor = extractor()(
        pcm_S,
        sampling_rate=SAMPLE_RATE,
        return_tensors="pt",
        truncation=False,
        padding="longest" if is_long else "max_length",
    ).input_features
    return features


@pytest.mark.parametrize("num_samples", [1600, 30_011, 48_000, 48_001, 100_000, 150_399])
def test_features_are_the_extractors(num_samples: int) -> None:
    pcm_S = noise(num_samples / SAMPLE_RATE)
    theirs_MF = their_features(pcm_S)[0]
    ours = Spectrogram(LogMel(spec(), CPU), torch.from_numpy(pcm_S))
    while not ours.is_made:
        ours.make()
    for start in range(0, theirs_MF.shape[1], 70):
        expected_MF = theirs_MF[:, start : start + WINDOW_FRAMES]
        window_MF = ours.window(start)
        assert window_MF.shape[1] == WINDOW_FRAMES
        torch.testing.assert_close(
            window_MF[:, : expected_MF.shape[1]], expected_MF, atol=2e-5, rtol=0
        )
        assert not window_MF[:, expected_MF.shape[1] :].any()


class Pair:
    """Transformers' model and ours out of one folder, both greedy and never falling back."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **generation: Any) -> None:
        write_folder(folder, **generation)
        self.theirs = WhisperForConditionalGeneration.from_pretrained(folder).eval()
        own = WhisperSpec.read(folder)
        with Checkpoint.open(folder) as checkpoint:
            network = WhisperNetwork.load(checkpoint, own, dtype=torch.float32, device=CPU)
        self.ours = SpeechRecognizer.of(network, tokenizer())
        monkeypatch.setattr(windows, "FALLBACK_TEMPERATURES", (0.0,))
        # Theirs goes on until the decoder is full, whatever the prompt took of it.
        monkeypatch.setattr(WhisperSpec, "max_new_tokens", 10_000)

    def their_segments(self, pcm_S: np.ndarray, **options: Any) -> list[tuple[Any, ...]]:
        with torch.inference_mode():
            generated = self.theirs.generate(
                their_features(pcm_S),
                return_timestamps=True,
                return_segments=True,
                condition_on_prev_tokens=True,
                temperature=0.0,
                **options,
            )
        return [
            (
                round(float(segment["start"]), 2),
                round(float(segment["end"]), 2),
                [int(token) for token in segment["tokens"] if token < CONFIG["eos_token_id"]],
            )
            for segment in generated["segments"][0]
        ]

    def our_segments(self, pcm_S: np.ndarray, **fields: Any) -> list[tuple[Any, ...]]:
        return [
            (
                round(segment.start_s, 2),
                round(segment.end_s, 2),
                [token.token_id for token in segment.tokens],
            )
            for delta in run(TranscriptionJob(self.ours, transcribe_request(pcm_S, **fields)))
            for segment in delta.segments
        ]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pair]:
    return partial(Pair, tmp_path, monkeypatch)


@pytest.mark.parametrize(("seconds", "seed"), [(4.0, 0), (4.0, 1), (4.0, 2), (9.3, 0), (9.3, 1)])
def test_tokens_and_times_are_theirs(pair: Callable[..., Pair], seconds: float, seed: int) -> None:
    """Window by window, each prompted with the text before it."""
    both, pcm_S = pair(seed=seed), noise(seconds, seed)
    ours = both.our_segments(pcm_S)
    assert len(ours) >= 2
    assert sum(len(ids) for *_, ids in ours) > 4
    assert ours == both.their_segments(pcm_S)


@pytest.mark.parametrize("num_right", [0, 1, 3, 99])
def test_what_is_expected_changes_no_token(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, num_right: int
) -> None:
    """Of an earlier pass: right to its end, up to some token, or not at all."""
    both, pcm_S = pair(seed=1), noise(2.4, 1)
    num_fed: list[int] = []
    feed = WhisperWindow.feed

    def counted(self: WhisperWindow, token_ids: Sequence[int]) -> torch.Tensor:
        num_fed.append(len(token_ids))
        return feed(self, token_ids)

    monkeypatch.setattr(WhisperWindow, "feed", counted)
    plain = both.our_segments(pcm_S)
    num_plain = len(num_fed)
    start_s, end_s, ids = plain[0]
    assert len(ids) > 4
    spelled = [*ids[:num_right], *(token % 7 + 3 for token in ids[num_right:])]
    first = TimedTokens(
        start_s=start_s + 0.02 * (num_right == 0),
        end_s=end_s,
        tokens=tuple(map(TranscriptToken, spelled)),
    )
    assert both.our_segments(pcm_S, expected=(first,)) == plain
    num_less = num_plain - (len(num_fed) - num_plain)
    assert num_less >= min(num_right, len(ids))


def test_what_is_expected_of_later_windows_is_left_to_them(pair: Callable[..., Pair]) -> None:
    both, pcm_S = pair(seed=1), noise(7.0, 1)
    plain = both.our_segments(pcm_S)
    assert plain[-1][1] > WINDOW_S
    expected = tuple(
        TimedTokens(start_s=start_s, end_s=end_s, tokens=tuple(map(TranscriptToken, ids[:2])))
        for start_s, end_s, ids in plain
    )
    assert both.our_segments(pcm_S, expected=expected) == plain


def test_a_prompt_comes_before_the_first_window(pair: Callable[..., Pair]) -> None:
    both, pcm_S = pair(seed=3), noise(7.0, 3)
    prompt_ids = tuple(b" the words before")
    theirs = both.their_segments(
        pcm_S,
        prompt_ids=torch.tensor([360, *prompt_ids]),
        prompt_condition_type="first-segment",
    )
    ours = both.our_segments(pcm_S, prompt_ids=prompt_ids)
    assert ours == theirs
    assert ours != both.our_segments(pcm_S)


@pytest.mark.parametrize("language", ["", "de"])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_languages_and_tasks_are_theirs(
    pair: Callable[..., Pair], language: str, task: str
) -> None:
    """A language is named, or found out by both."""
    both, pcm_S = pair(seed=4, **MULTILINGUAL), noise(5.0, 4)
    theirs = both.their_segments(pcm_S, language=language or None, task=task)
    assert both.our_segments(pcm_S, language=language, task=task) == theirs


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**32 - 1), st.booleans())
def test_the_warp_is_the_references(rows: int, columns: int, seed: int, has_ties: bool) -> None:
    cost_TP = np.random.default_rng(seed).normal(size=(rows, columns))
    # Theirs adds up in single precision: whole numbers, so that both are exact.
    cost_TP = np.round(cost_TP) if has_ties else np.round(1000 * cost_TP)
    ours, theirs = warp(cost_TP), _dynamic_time_warping(cost_TP)
    np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.sampled_from([1, 3, 7]), st.integers(0, 2**32 - 1))
def test_the_median_filter_is_theirs(length: int, width: int, seed: int) -> None:
    values = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(median_filter(values, width), _median_filter(values, width))
