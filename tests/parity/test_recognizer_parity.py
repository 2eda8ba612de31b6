"""Recognizers on transformers' classes against their own `generate`, on the same random weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.asr import noise, run, text_ids, transcribe_request
from support.recognizers import BUILDERS, write_recognizer
from support.tiers import first
from triptych.core.media.audio.resampling import Pcm
from triptych.core.process.lazy import load
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.text.tokenizer import encode
from triptych.modalities.asr.engine.blueprint import BlueprintSetup
from triptych.modalities.asr.engine.decoding.ctc import CtcModel
from triptych.modalities.asr.engine.decoding.transducer import TransducerModel
from triptych.modalities.asr.engine.window_model import WindowModel
from triptych.modalities.asr.engine.windowed import WindowedRecognizer
from triptych.modalities.asr.families import FAMILIES
from triptych.modalities.asr.pauses import window_end
from triptych.modalities.asr.spec import SAMPLE_RATE

CPU = torch.device("cpu")
SEEDS = {"granite_speech5_ctc": 2, "canary": 1}  # others always say the same
IN_BOTH_TYPES = {"parakeet_ctc", "parakeet_tdt", "canary", "qwen3_asr"}
LANGUAGES = dict.fromkeys(("canary", "cohere_asr", "voxtral"), "de") | {
    "qwen3_asr": "en",
    "fun_asr_nano": "ja",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=BUILDERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(family)
    write_recognizer(family, place, seed=SEEDS.get(family, 0))
    return place


def recognizer(family: str, folder: Path, dtype: torch.dtype) -> WindowedRecognizer:
    with Checkpoint.open(folder) as checkpoint:
        setup = BlueprintSetup(checkpoint=checkpoint, name="ears", dtype=dtype, device=CPU)
        built: WindowedRecognizer = load(FAMILIES[family].engine)(setup).build(lambda share: None)
    return built


def hear(ours: WindowedRecognizer, pcm_S: Pcm, **fields: Any) -> list[int]:
    return text_ids(run(ours.begin(transcribe_request(pcm_S, **fields), 0)))


class Theirs:
    """The class and the processor of a folder, used as transformers' documentation does."""

    def __init__(self, model: WindowModel, folder: Path, dtype: torch.dtype) -> None:
        self.model = model
        kind = getattr(transformers, model.network_class)
        self.network = kind.from_pretrained(folder, dtype=dtype).eval()
        self.processor = getattr(transformers, model.processor_class).from_pretrained(folder)

    def inputs(self, pcm_S: Pcm, language: str) -> Any:
        processor = self.processor
        if self.model.network_class.startswith("GraniteSpeechP") or (
            self.model.network_class == "GraniteSpeechForConditionalGeneration"
        ):
            asked = "<|audio|>can you transcribe the speech into a written format?"
            prompt = processor.tokenizer.apply_chat_template(
                [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
            )
            return processor(prompt, pcm_S, return_tensors="pt")
        if self.model.network_class.startswith("Voxtral"):
            return self._voxtral_inputs(pcm_S, language)
        if self.model.network_class.startswith("Canary"):
            return processor.apply_transcription_request(pcm_S, source_language=language)
        if self.model.network_class.startswith("Cohere"):
            return processor(pcm_S, language=language, sampling_rate=SAMPLE_RATE)
        if hasattr(processor, "apply_transcription_request"):
            named = {"language": language} if language else {}
            return processor.apply_transcription_request(pcm_S, **named)
        return processor(pcm_S, sampling_rate=SAMPLE_RATE, return_tensors="pt")

    def _voxtral_inputs(self, pcm_S: Pcm, language: str) -> Any:
        """As `VoxtralProcessor` and `mistral_common` make them: a token for 80 ms of the window."""
        found = self.processor(
            pcm_S,
            sampling_rate=SAMPLE_RATE,
            padding=True,
            truncation=False,
            pad_to_multiple_of=2 * SAMPLE_RATE,
            return_tensors="pt",
        )
        place = "[AUDIO]" * 25
        text = f"<s>[INST][BEGIN_AUDIO]{place}[/INST]lang:{language}[TRANSCRIBE]"
        (encoding,) = encode(self.model.tokenizer, [text], add_special_tokens=False)
        found["input_ids"] = torch.tensor([encoding.ids])
        return found

    def tokens(self, pcm_S: Pcm, language: str) -> list[int]:
        inputs = self.inputs(pcm_S, language).to(self.network.dtype)
        config = self.network.config
        with torch.inference_mode():
            if isinstance(self.model, CtcModel):
                (ids,) = self.network.generate(**inputs).tolist()
                return [each for each, _ in groupby(ids) if each != config.pad_token_id]
            if isinstance(self.model, TransducerModel):
                (ids,) = self.network.generate(**inputs, max_new_tokens=2000).sequences.tolist()
                return [each for each in ids if each != config.blank_token_id]
            most = round(len(pcm_S) / SAMPLE_RATE * 12) + 16
            (ids,) = self.network.generate(**inputs, max_new_tokens=most, do_sample=False).tolist()
        start = inputs["input_ids"].shape[1] if "input_ids" in inputs else self._start(inputs)
        return [each for each in ids[start:] if each != 2]

    def _start(self, inputs: Any) -> int:
        prompt = inputs["decoder_input_ids"][0].tolist() if "decoder_input_ids" in inputs else []
        return len(prompt) + (prompt[:1] != [self.network.config.decoder_start_token_id])


@pytest.mark.parametrize(
    "dtype", first([torch.float32, torch.bfloat16]), ids=["float32", "bfloat16"]
)
def test_tokens_equal_transformers(
    family: str, folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One window, several of a longer recording, and two recordings in turns."""
    if dtype == torch.bfloat16 and family not in IN_BOTH_TYPES:
        pytest.skip("the type is the same code; one family of each way of decoding is enough")
    ours, language = recognizer(family, folder, dtype), LANGUAGES.get(family, "")
    monkeypatch.setattr(type(ours.model), "max_window_s", 2.0)
    theirs = Theirs(ours.model, folder, dtype)
    short_S, long_S = noise(1.5, seed=1), noise(4.5)
    expected, start = [], 0
    while start < len(long_S):
        end = window_end(long_S, start, 2 * SAMPLE_RATE)
        expected.append(theirs.tokens(long_S[start:end], language))
        start = end
    assert len(expected) >= 3
    assert len(set(map(tuple, expected))) > 1
    works = [
        ours.begin(transcribe_request(each_S, language=language), 0) for each_S in (long_S, short_S)
    ]
    deltas: list[list[Any]] = [[], []]
    with torch.inference_mode():
        while any(work.next_stage for work in works):
            for work, found in zip(works, deltas, strict=True):
                if work.next_stage is not None:
                    found.extend(filter(None, [work.advance()]))
    assert [text_ids([delta]) for delta in deltas[0]] == expected
    assert text_ids(deltas[1]) == theirs.tokens(short_S, language)
    assert [delta.heard_s for delta in deltas[0]][-1] == 4.5


def test_token_times_equal_those_of_the_processor(tmp_path: Path) -> None:
    write_recognizer("parakeet_tdt", tmp_path)
    ours = recognizer("parakeet_tdt", tmp_path, torch.float32)
    theirs, pcm_S = Theirs(ours.model, tmp_path, torch.float32), noise(2.0)
    deltas = run(ours.begin(transcribe_request(pcm_S, has_word_times=True), 0))
    tokens = [token for delta in deltas for part in delta.segments for token in part.tokens]
    with torch.inference_mode():
        found = theirs.network.generate(**theirs.inputs(pcm_S, ""), max_new_tokens=500)
    _, (times,) = theirs.processor.decode(
        found.sequences, durations=found.durations, skip_special_tokens=True
    )
    assert [token.start_s for token in tokens] == pytest.approx([each["start"] for each in times])
    ends_s = [min(each["end"], 2.0) for each in times]
    assert [token.end_s for token in tokens] == pytest.approx(ends_s)
