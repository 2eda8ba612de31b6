"""The loop closes: what the served voice says, the served recognizer writes down."""

from __future__ import annotations

import re
import threading

import numpy as np
import openai
import pytest

SENTENCE = "The morning train to London leaves at seven."
WORDS = ["the", "morning", "train", "to", "london", "leaves", "at", "seven"]

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]  # the first start fetches models


@pytest.fixture(scope="module")
def models(client: openai.OpenAI) -> dict[str, str]:
    """One served model of each task."""
    return {card.model_extra["task"]: card.id for card in client.models.list()}


def speak(client: openai.OpenAI, model: str, **fields: object) -> bytes:
    whole = {"model": model, "voice": "alloy", "input": SENTENCE, **fields}
    with client.audio.speech.with_streaming_response.create(**whole) as reply:  # type: ignore[arg-type]
        return b"".join(reply.iter_bytes())


def written(client: openai.OpenAI, model: str, name: str, sound: bytes) -> list[str]:
    reply = client.audio.transcriptions.create(model=model, file=(name, sound))
    return re.findall(r"[a-z0-9']+", reply.text.lower().replace("7", "seven"))


def test_there_is_a_model_of_each_kind(models: dict[str, str]) -> None:
    assert set(models) == {"chat", "embedding", "image", "speech", "transcription"}


@pytest.mark.parametrize("kind", ["wav", "mp3", "opus"])
def test_what_is_spoken_is_understood(
    client: openai.OpenAI, models: dict[str, str], kind: str
) -> None:
    sound = speak(client, models["speech"], response_format=kind)
    transcript = written(client, models["transcription"], f"speech.{kind}", sound)
    missing = [word for word in WORDS if word not in transcript]
    assert len(missing) <= 1, transcript


@pytest.mark.parametrize("text", ["No.", "map", "mum", "nine"])
def test_it_begins_without_a_step(client: openai.OpenAI, models: dict[str, str], text: str) -> None:
    reply = client.audio.speech.create(
        model=models["speech"], voice="nova", input=text, response_format="pcm"
    )
    pcm_S = np.abs(np.frombuffer(reply.content, "<i2").astype(float))
    assert pcm_S[:24].max() < 0.06 * pcm_S.max()  # the first millisecond


def test_a_seed_repeats_the_sound_and_half_speed_lasts_longer(
    client: openai.OpenAI, models: dict[str, str]
) -> None:
    def samples(**fields: object) -> np.ndarray:
        sound = speak(
            client, models["speech"], response_format="pcm", extra_body={"seed": 7}, **fields
        )
        return np.frombuffer(sound, "<i2")

    first = samples()
    # How many frames a step decodes follows the clock, and floats are rounded accordingly.
    np.testing.assert_allclose(samples(), first, rtol=0, atol=1)
    assert 1.6 < len(samples(speed=0.5)) / len(first) < 2.4


def test_chat_goes_on_while_it_speaks(client: openai.OpenAI, models: dict[str, str]) -> None:
    sounds: list[bytes] = []
    speaking = threading.Thread(
        target=lambda: sounds.append(
            speak(client, models["speech"], input=" ".join([SENTENCE] * 3), response_format="pcm")
        )
    )
    speaking.start()
    answer = client.chat.completions.create(
        model=models["chat"],
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=16,
    )
    speaking.join()
    assert "Paris" in answer.choices[0].message.content
    (sound,) = sounds
    assert len(sound) / 2 / 24_000 > 5


def test_a_chat_model_does_not_speak(client: openai.OpenAI, models: dict[str, str]) -> None:
    with pytest.raises(openai.BadRequestError, match=models["speech"]):
        client.audio.speech.create(model=models["chat"], voice="alloy", input="Hello.")
