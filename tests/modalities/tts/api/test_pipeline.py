"""The Python object, in front of an engine that hums."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from support.hosts import hosted
from support.http import until
from support.speech_app import (
    RATE,
    FakeSpeechEngine,
    SpellingFrontEnd,
    heard,
    make_speech_service,
    num_samples,
    tone,
)
from triptych.core.errors import ConfigError, InvalidRequest, NotFound
from triptych.core.http.auth import owners
from triptych.core.options.config import Config, ModelOptions, ServerOptions
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api import pipeline
from triptych.modalities.tts.api.pipeline import SpeechPipeline, format_of
from triptych.modalities.tts.api.voices.record import VoiceDescription
from triptych.modalities.tts.api.voices.store import VoiceStore
from triptych.modalities.tts.sources.voice import EMBEDDED_VOICE

TEXT = "Hello there, this is a sentence. And this is another."


@pytest.fixture
def engine() -> FakeSpeechEngine:
    return FakeSpeechEngine()


@pytest.fixture
def speak(engine: FakeSpeechEngine) -> Iterator[SpeechPipeline]:
    service = make_speech_service(engine, max_characters=100_000)
    with SpeechPipeline("hum", hosted(service, "hum")) as pipeline:
        yield pipeline


def test_a_call_returns_the_speech(speak: SpeechPipeline, engine: FakeSpeechEngine) -> None:
    speech = speak(TEXT, voice="bob", seed=4)
    np.testing.assert_allclose(speech.audio, heard(TEXT), atol=1e-5)
    assert speech.sample_rate == speak.sample_rate == RATE
    assert speech.duration_s == pytest.approx(num_samples(TEXT) / RATE)
    assert (speech.coverage, speech.finish_reason) == (1.0, "stop")
    assert speech.usage.num_prompt_tokens == 41
    (request,) = engine.submitted.values()
    assert (request.voice, request.sampling.seed, request.is_live) == ("bob", 4, False)


def test_a_stream_gives_arrays_as_they_come(
    speak: SpeechPipeline, engine: FakeSpeechEngine
) -> None:
    engine.is_endless = True
    stream = speak.stream(TEXT)
    assert len(next(stream))  # it did not wait for the end, as there is none
    stream.close()  # type: ignore[attr-defined]
    engine.is_endless = False
    arrays = list(speak.stream(TEXT))
    assert all(array.dtype == np.float32 and len(array) for array in arrays)
    np.testing.assert_allclose(np.concatenate(arrays), heard(TEXT), atol=1e-5)
    assert next(iter(engine.submitted.values())).is_live


async def test_async_twins_work_on_any_loop(speak: SpeechPipeline) -> None:
    one, two = await asyncio.gather(speak.acall(TEXT), speak.acall("Hello."))
    assert len(two.audio) < len(one.audio)
    arrays = [array async for array in speak.astream(TEXT)]
    np.testing.assert_array_equal(np.concatenate(arrays), one.audio)


def test_leaving_a_stream_early_cancels_it(speak: SpeechPipeline, engine: FakeSpeechEngine) -> None:
    engine.is_endless = True
    for _ in range(3):
        stream = speak.stream(TEXT)
        next(stream)
        stream.close()
    engine.is_endless = False
    speak("Hi.")
    until(lambda: len(engine.cancelled) == 3)  # a stream is left at once, and ended soon


def test_what_an_ssml_text_asks_in_vain_is_logged(
    speak: SpeechPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    speak("<speak><emphasis>Hello</emphasis> there.</speak>", input_format="ssml")
    assert caplog.messages == ["without effect here: emphasis"]


def test_files_are_saved_in_the_format_of_their_name(speak: SpeechPipeline, tmp_path: Path) -> None:
    speech = speak(TEXT)
    for name in ("a.wav", "b.flac", "c.ogg", "d.mp3"):
        speech.save(tmp_path / name)
        pcm_S, rate = soundfile.read(tmp_path / name)
        assert len(pcm_S) == pytest.approx(len(speech.audio) * rate / RATE, abs=2)
    speech.save(tmp_path / "raw", audio_format="pcm")
    assert (tmp_path / "raw").stat().st_size == 2 * len(speech.audio)
    with pytest.raises(ConfigError, match="give the format"):
        speech.save(tmp_path / "speech.doc")


def test_a_notebook_shows_a_player(speak: SpeechPipeline) -> None:
    html = speak("Hi.")._repr_html_()
    data = base64.b64decode(html.partition("base64,")[2].partition('"')[0])
    assert len(soundfile.read(io.BytesIO(data))[0]) == num_samples("Hi.")


def test_voices_are_listed(speak: SpeechPipeline) -> None:
    assert [voice.name for voice in speak.voices] == ["ada", "bob"]


@pytest.mark.parametrize("server", [ServerOptions(), ServerOptions(api_key=("one", "two"))])
def test_voices_made_on_this_machine_are_spoken_with(
    engine: FakeSpeechEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ServerOptions
) -> None:
    config = Config(models=ModelOptions(cache_dir=str(tmp_path)), server=server)
    monkeypatch.setattr(
        pipeline, "open_front_end", lambda resolved: SpellingFrontEnd(can_clone=True)
    )
    store = VoiceStore.from_config(config)
    about = VoiceDescription(name="Ada", model="hum")
    made = store.add(owners(server)[-1], about, tone(RATE), RATE)
    resolved = ResolvedModel(name="hum", reference="hum", folder="", digest="")
    service = SpeechPipeline._open_service(resolved, config)(engine)
    with SpeechPipeline("hum", hosted(service, "hum")) as speak:
        speak("Hi.", voice=made.id)
        with pytest.raises(NotFound, match="triptych voices"):
            speak("Hi.", voice="voice_" + 32 * "0")
    (request,) = engine.submitted.values()
    assert request.clip is not None
    np.testing.assert_allclose(np.frombuffer(request.clip.pcm, "<f4"), tone(RATE), atol=1e-6)


def test_mistakes_say_what_to_do(speak: SpeechPipeline) -> None:
    with pytest.raises(InvalidRequest, match="ada and bob"):
        speak("Hi.", voice="nobody")
    with pytest.raises(InvalidRequest, match="no words"):
        next(speak.stream("🎉"))
    with pytest.raises(TypeError, match="voic"):
        speak("Hi.", voic="ada")  # type: ignore[call-arg]


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff", "x\0y"])
def test_odd_text_keeps_the_pipeline_usable(speak: SpeechPipeline, text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert speak(text).finish_reason == "stop"
    assert speak("Fine.").finish_reason == "stop"


def test_a_book_is_spoken_in_parts(speak: SpeechPipeline, engine: FakeSpeechEngine) -> None:
    engine.step_samples = 100_000
    book = "This is a sentence of some length that is spoken. " * 400
    num = sum(len(array) for array in speak.stream(book))
    assert num == num_samples(book)
    assert len(engine.submitted) > 20


@pytest.mark.parametrize(
    ("name", "kind"), [("a.wav", "wav"), ("a.OGG", "opus"), ("a.b.opus", "opus"), ("x.aac", "aac")]
)
def test_format_is_inferred_from_the_file_name(name: str, kind: str) -> None:
    assert format_of(name) == kind


@pytest.fixture(scope="module")
def embedded() -> Iterator[SpeechPipeline]:
    options = {"threads": 1, "kv_cache_memory_mb": 64}
    with SpeechPipeline.from_pretrained(EMBEDDED_VOICE.name, progress=False, **options) as pipeline:
        yield pipeline


def test_a_real_voice_speaks_as_long_as_people_do(embedded: SpeechPipeline) -> None:
    speech = embedded(TEXT, seed=1)
    assert (speech.coverage, speech.finish_reason) == (1.0, "stop")
    assert 2.0 < speech.duration_s < 6.0
    assert 0.05 < np.abs(speech.audio).max() <= 1.0
    assert speech.usage.num_output_tokens > 20


def test_a_real_stream_is_the_same_sound_sooner(embedded: SpeechPipeline) -> None:
    whole = embedded(TEXT, seed=2)
    arrays = list(embedded.stream(TEXT, seed=2))
    assert len(arrays) > 3
    assert len(arrays[0]) < len(whole.audio) / 4
    np.testing.assert_allclose(np.concatenate(arrays), whole.audio, atol=1e-3)


def test_leaving_a_real_stream_early_leaves_the_voice_usable(embedded: SpeechPipeline) -> None:
    for _ in range(40):  # more than may speak at once: a leak would block the last ones
        stream = embedded.stream(TEXT)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert embedded("Hi.").finish_reason == "stop"


def test_a_real_voice_speaks_faster_and_slower(embedded: SpeechPipeline) -> None:
    slow, fast = (embedded(TEXT, seed=3, speed=speed).duration_s for speed in (0.5, 2.0))
    assert slow / fast == pytest.approx(4.0, rel=0.1)


async def test_real_voices_speak_at_once_as_each_alone(embedded: SpeechPipeline) -> None:
    texts = [TEXT, "Hello.", "One, two, three."]
    together = await asyncio.gather(*(embedded.acall(text, seed=4) for text in texts))
    for text, speech in zip(texts, together, strict=True):
        alone = await embedded.acall(text, seed=4)
        np.testing.assert_allclose(alone.audio, speech.audio, atol=1e-3)
