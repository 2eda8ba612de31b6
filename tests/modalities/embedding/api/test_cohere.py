"""`/v2/embed`, as Cohere's clients ask for it."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from support.http import refused

TEXTS = ["w1 w2", "w3"]


def vectors(asking: httpx.Client, **fields: Any) -> np.ndarray:
    """What OpenAI's route says."""
    reply = asking.post("/v1/embeddings", json={"model": "tiny", **fields}).json()
    return np.array([entry["embedding"] for entry in reply["data"]])


def embed(asking: httpx.Client, **fields: Any) -> httpx.Response:
    return asking.post("/v2/embed", json={"texts": TEXTS, **fields})


def test_the_answer_has_cohere_s_shape_and_the_same_vectors(asking: httpx.Client) -> None:
    reply = embed(asking, model="tiny").json()
    np.testing.assert_allclose(reply["embeddings"]["float"], vectors(asking, input=TEXTS))
    assert reply["response_type"] == "embeddings_by_type"
    assert reply["texts"] == TEXTS
    assert reply["meta"]["api_version"] == {"version": "2"}
    assert reply["meta"]["billed_units"] == {"input_tokens": 7, "image_tokens": 0}
    assert reply["id"].startswith("embd-")
    assert embed(asking).json()["embeddings"] == reply["embeddings"]  # the only model there is


def test_every_form_says_the_same_numbers(asking: httpx.Client) -> None:
    forms = ["float", "base64", "binary", "ubinary"]
    found = embed(asking, embedding_types=forms).json()["embeddings"]
    assert [*found] == forms
    for index, numbers in enumerate(found["float"]):
        data = base64.b64decode(found["base64"][index])
        np.testing.assert_allclose(np.frombuffer(data, "<f4"), numbers)
        bits = "".join("01"[number >= 0] for number in numbers)
        whole = [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]
        assert found["ubinary"][index] == whole
        assert found["binary"][index] == [byte - 128 for byte in whole]


@pytest.mark.parametrize(
    ("fields", "prompt", "ignored"),
    [
        ({}, "", None),
        ({"input_type": "search_query"}, "w9 w8 ", None),
        ({"input_type": "query"}, "w9 w8 ", None),
        ({"input_type": "search_document"}, "", "input_type"),
        ({"input_type": "clustering"}, "", "input_type"),
    ],
)
def test_a_type_of_input_is_one_of_the_models_instructions(
    asking: httpx.Client, fields: dict[str, str], prompt: str, ignored: str | None
) -> None:
    reply = embed(asking, **fields)
    wanted = vectors(asking, input=[prompt + text for text in TEXTS])
    np.testing.assert_allclose(reply.json()["embeddings"]["float"], wanted)
    assert reply.headers.get("x-triptych-ignored") == ignored


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, "w0 w1"),
        ({"truncate": "END"}, "w0 w1"),
        ({"truncate": "START"}, "w58 w59"),
    ],
)
def test_long_texts_are_cut_at_the_end_that_is_asked_for(
    asking: httpx.Client, fields: dict[str, str], kept: str
) -> None:
    text = " ".join(f"w{n}" for n in range(60))
    found = embed(asking, texts=[text], max_tokens=4, **fields).json()["embeddings"]["float"]
    np.testing.assert_allclose(found, vectors(asking, input=[kept]), rtol=1e-5)
    longer = embed(asking, texts=[text + " w1" * 90], max_tokens=9000, **fields)
    assert longer.json()["meta"]["billed_units"]["input_tokens"] == 64


def test_texts_in_parts_are_texts(asking: httpx.Client) -> None:
    parts = [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]
    reply = asking.post("/v2/embed", json={"inputs": [{"content": parts}]}).json()
    np.testing.assert_allclose(reply["embeddings"]["float"], vectors(asking, input=["w1 w2"]))
    assert "texts" not in reply


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"texts": None}, "texts"),
        ({"texts": []}, "texts"),
        ({"inputs": [{"content": [{"type": "text", "text": "w1"}]}]}, "texts"),
        ({"texts": None, "inputs": [{"content": [{"type": "text", "text": ""}]}]}, None),
        ({"images": ["data:image/png;base64,AA=="]}, "images"),
        ({"priority": 3}, "priority"),
        ({"embedding_types": ["int8"]}, "embedding_types"),
        ({"embedding_types": []}, "embedding_types"),
        ({"embedding_types": ["binary"], "output_dimension": 12}, "embedding_types"),
        ({"output_dimension": 33}, "output_dimension"),
        ({"input_type": "poem"}, "input_type"),
        ({"truncate": "NONE", "texts": ["w1 " * 90]}, "texts"),
        ({"truncate": "NONE", "max_tokens": 4}, "max_tokens"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    asking: httpx.Client, fields: dict[str, Any], param: str | None
) -> None:
    error = refused(embed(asking, **fields))
    assert param is None or error["param"] == param


@pytest.mark.parametrize("fields", [{"images": []}, {"priority": 0}, {"images": None}])
def test_what_asks_for_nothing_is_let_pass(asking: httpx.Client, fields: dict[str, Any]) -> None:
    assert embed(asking, **fields).is_success
