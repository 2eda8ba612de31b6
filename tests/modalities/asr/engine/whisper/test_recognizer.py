"""A recording on its way through a small network: stages, rules, samples, parts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.asr import (
    CONFIG,
    END,
    FIRST_TIME,
    GENERATION,
    MULTILINGUAL,
    WINDOW_S,
    noise,
    run,
    spec,
    text_ids,
    tokenizer,
    transcribe_request,
    write_folder,
)
from triptych.core.errors import NonFinite, WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.asr.engine.whisper.model import WhisperNetwork
from triptych.modalities.asr.engine.whisper.recognizer import (
    TOKENS_PER_STAGE,
    SpeechRecognizer,
    TokenRules,
    TranscriptionJob,
)
from triptych.modalities.asr.spec import WhisperSpec

CPU = torch.device("cpu")
SPEC = spec()


def load(folder: Path, **generation: Any) -> SpeechRecognizer:
    write_folder(folder, **generation)
    with Checkpoint.open(folder) as checkpoint:
        network = WhisperNetwork.load(
            checkpoint, WhisperSpec.read(folder), dtype=torch.float32, device=CPU
        )
    return SpeechRecognizer.of(network, tokenizer())


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> SpeechRecognizer:
    return load(tmp_path_factory.mktemp("ears"))


def test_stages_are_short_and_in_order(whisper: SpeechRecognizer) -> None:
    hearing = TranscriptionJob(
        whisper, transcribe_request(noise(2 * WINDOW_S - 1), temperature=0.5, has_word_times=True)
    )
    names = []
    with torch.inference_mode():
        while hearing.next_stage is not None:
            names.append(hearing.next_stage.name)
            assert hearing.next_stage.name != "decode" or (
                hearing.next_stage.size <= TOKENS_PER_STAGE
            )
            hearing.advance()
    runs = [name for name, _ in itertools.groupby(names)]
    assert runs[:3] == ["listen", "encode", "decode"]
    assert names.count("listen") == 2
    num_windows = runs.count("encode")
    assert names.count("encode") == num_windows * (1 + SPEC.config.encoder_layers)
    assert num_windows >= 2


def test_same_seed_gives_the_same_transcript(whisper: SpeechRecognizer) -> None:
    def ids(seed: int) -> list[int]:
        return text_ids(
            run(
                TranscriptionJob(
                    whisper, transcribe_request(noise(4.0), temperature=0.9, seed=seed)
                )
            )
        )

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_word_times_change_no_word_and_run_forward(whisper: SpeechRecognizer) -> None:
    plain = run(TranscriptionJob(whisper, transcribe_request(noise(4.0), temperature=0.4)))
    timed = run(
        TranscriptionJob(
            whisper, transcribe_request(noise(4.0), temperature=0.4, has_word_times=True)
        )
    )
    assert text_ids(plain) == text_ids(timed)
    assert all(t.start_s == -1 for delta in plain for s in delta.segments for t in s.tokens)
    for delta in timed:
        tokens = [token for segment in delta.segments for token in segment.tokens]
        times = [time for token in tokens for time in (token.start_s, token.end_s)]
        assert times == sorted(times)
        assert not times or 0 <= times[0] <= times[-1] <= 4.0


def test_each_window_reports_progress(whisper: SpeechRecognizer) -> None:
    deltas = run(TranscriptionJob(whisper, transcribe_request(noise(7.5), temperature=0.4)))
    progress_s = [delta.heard_s for delta in deltas]
    assert progress_s == sorted(set(progress_s))
    assert progress_s[-1] == 7.5
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert {delta.language for delta in deltas} == {"en"}


def test_a_part_leaves_to_the_next_what_fills_no_window(whisper: SpeechRecognizer) -> None:
    deltas = run(
        TranscriptionJob(whisper, transcribe_request(noise(7.5), temperature=0.4, is_last=False))
    )
    assert 7.5 - WINDOW_S < deltas[-1].heard_s <= 7.5
    assert deltas[-1].finish_reason == "stop"


def test_a_language_is_found_out_once(tmp_path: Path) -> None:
    whisper = load(tmp_path, **MULTILINGUAL)
    found = {
        delta.language
        for delta in run(TranscriptionJob(whisper, transcribe_request(noise(7.0), temperature=0.4)))
    }
    assert len(found) == 1
    assert found < {"en", "zh", "de"}


def test_sound_that_breaks_the_network_fails_alone(whisper: SpeechRecognizer) -> None:
    broken = noise(2.0)
    broken[5000] = np.nan
    with torch.inference_mode():
        bad, good = (
            whisper.begin(transcribe_request(broken), 0),
            whisper.begin(transcribe_request(noise(2.0), temperature=0.2), 0),
        )
        given: list[Any] = [None, None]
        while bad.next_stage is not None and not isinstance(given[0], NonFinite):
            given = whisper.advance([bad, good])
    assert isinstance(given[0], NonFinite)
    assert not isinstance(given[1], Exception)


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_a_network_that_breaks_while_it_writes_fails_its_recording(
    whisper: SpeechRecognizer, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    whole = whisper.network.logits

    def breaks_at_last(hidden_TD: torch.Tensor) -> torch.Tensor:
        is_first = len(hidden_TD) > 1  # of a window: the prompt's
        return whole(hidden_TD) if is_first else whole(hidden_TD) * torch.nan

    monkeypatch.setattr(whisper.network, "logits", breaks_at_last)
    with pytest.raises(NonFinite):
        run(TranscriptionJob(whisper, transcribe_request(noise(2.0), temperature=temperature)))


@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_whatever_is_sampled_keeps_the_grammar_of_times(seed: int, length: int) -> None:
    """A window begins with a time, times come in pairs and never run backwards."""
    rules, generator = TokenRules(SPEC, CPU), torch.Generator().manual_seed(seed)
    said: list[int] = []
    while len(said) < length and (not said or said[-1] != END):
        logits_V = 4 * torch.randn(SPEC.config.vocab_size, generator=generator)
        allowed_V = rules.apply(logits_V, said)
        assert torch.isfinite(allowed_V).any()
        said.append(int(torch.multinomial(allowed_V.softmax(0), 1, generator=generator)))
    assert SPEC.is_timestamp(said[0])
    assert said[0] <= FIRST_TIME + 50
    times = [token for token in said if SPEC.is_timestamp(token)]
    assert times == sorted(times)
    assert not set(said) & {*SPEC.suppressed_ids, SPEC.no_timestamps_id}
    inside = said[1 : len(said) - (said[-1] == END)]
    for run_of_times in ("".join("t" if SPEC.is_timestamp(t) else "w" for t in inside)).split("w"):
        assert len(run_of_times) <= 2


@pytest.mark.parametrize(
    ("config", "generation", "complaint"),
    [
        ({"d_model": None}, {}, "d_model"),
        ({}, {"no_timestamps_token_id": None}, "no_timestamps_token_id"),
        ({"vocab_size": 51_865}, {}, "lang_to_id"),
    ],
)
def test_other_folders_are_refused(
    config: dict[str, Any], generation: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(WeightsError, match=complaint):
        WhisperSpec.of(CONFIG | config, GENERATION | generation)


def test_without_known_heads_the_upper_half_is_taken() -> None:
    assert spec(alignment_heads=None).alignment_heads == ((1, 0), (1, 1))
