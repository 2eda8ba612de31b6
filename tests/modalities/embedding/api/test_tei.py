"""`/embed`, `/similarity` and `/rerank` for clients of Text Embeddings Inference."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from support.http import refused

LONG = " ".join(f"w{n % 60}" for n in range(90))


def ask(asking: httpx.Client, path: str, **fields: Any) -> Any:
    reply = asking.post(path, json=fields)
    assert reply.is_success, reply.text
    return reply.json()


def vectors(asking: httpx.Client, *texts: str, **fields: Any) -> np.ndarray:
    reply = ask(asking, "/v1/embeddings", input=[*texts], **fields)
    return np.array([entry["embedding"] for entry in reply["data"]])


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"inputs": "w1 w2"}, ["w1 w2"]),
        ({"inputs": ["w1", "w2 w3"], "model": "tiny"}, ["w1", "w2 w3"]),
        ({"inputs": [1, 5, 2]}, ["w1"]),
        ({"inputs": [[1, 5, 2], "w2"]}, ["w1", "w2"]),
        ({"inputs": "w1", "prompt_name": "query"}, ["w9 w8 w1"]),
        ({"inputs": LONG, "truncate": True}, [" ".join(LONG.split()[:62])]),
        (
            {"inputs": LONG, "truncate": True, "truncation_direction": "Left"},
            [" ".join(LONG.split()[-62:])],
        ),
    ],
)
def test_vectors(asking: httpx.Client, fields: dict[str, Any], texts: list[str]) -> None:
    np.testing.assert_allclose(
        ask(asking, "/embed", **fields), vectors(asking, *texts), rtol=1e-5, atol=1e-7
    )


def test_fewer_dimensions(asking: httpx.Client) -> None:
    wanted = vectors(asking, "w1", dimensions=8)
    np.testing.assert_allclose(ask(asking, "/embed", inputs="w1", dimensions=8), wanted)


def test_similarity_is_the_cosine(asking: httpx.Client) -> None:
    inputs = {"source_sentence": "w1 w2", "sentences": ["w3", "w1 w2", "w4 w5"]}
    found = ask(asking, "/similarity", inputs=inputs)
    first, *others = vectors(asking, "w1 w2", *inputs["sentences"])
    np.testing.assert_allclose(found, [float(first @ each) for each in others], atol=1e-6)
    long = {"source_sentence": "w1", "sentences": [LONG]}
    assert refused(asking.post("/similarity", json={"inputs": long}))["param"] == "inputs"
    assert len(ask(asking, "/similarity", inputs=long, parameters={"truncate": True})) == 1


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_texts_are_ranked_in_a_bare_list(asking: httpx.Client, path: str) -> None:
    texts = ["w3 w4 w5", "w1 w2 w3", "w9"]
    wanted = ask(asking, path, query="w1 w2", documents=texts)["results"]
    found = ask(asking, path, query="w1 w2", texts=texts)
    assert [each["index"] for each in found] == [each["index"] for each in wanted]
    scores = [each["relevance_score"] for each in wanted]
    assert [each["score"] for each in found] == pytest.approx(scores)
    assert not any("text" in each for each in found)
    for most, num_kept in ((2, 2), (99, 3), (0, 3)):
        assert ask(asking, path, query="w1 w2", texts=texts, top_n=most) == found[:num_kept]
    shown = ask(asking, path, query="w1 w2", texts=texts, return_text=True)
    assert [each["text"] for each in shown] == [texts[each["index"]] for each in found]


def test_raw_scores_are_those_before_the_sigmoid(asking: httpx.Client) -> None:
    fields = {"query": "w1", "texts": ["w2"]}
    (scored,) = ask(asking, "/rerank", **fields)
    (raw,) = ask(asking, "/rerank", **fields, raw_scores=True)
    assert scored["score"] == pytest.approx(1 / (1 + np.exp(-raw["score"])))


def test_long_texts_are_cut_where_asked(asking: httpx.Client) -> None:
    fields = {"query": "w1", "texts": [LONG]}
    assert refused(asking.post("/rerank", json=fields))["param"] == "texts"
    right, left = (
        ask(asking, "/rerank", **fields, truncate=True, truncation_direction=side)[0]["score"]
        for side in ("Right", "Left")
    )
    num_left = 64 - 3 - 1
    kept = [" ".join(LONG.split()[:num_left]), " ".join(LONG.split()[-num_left:])]
    for score, text in zip((right, left), kept, strict=True):
        (whole,) = ask(asking, "/rerank", query="w1", texts=[text])
        assert score == pytest.approx(whole["score"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/embed", {}, "inputs"),
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": LONG}, "inputs"),
        ("/embed", {"inputs": "w1", "normalize": False}, "normalize"),
        ("/embed", {"inputs": "w1", "truncation_direction": "up"}, "truncation_direction"),
        ("/embed", {"inputs": "w1", "surprise": 1}, "surprise"),
        (
            "/rerank",
            {"query": "w1", "texts": ["w2"], "model": "tiny", "raw_scores": True},
            "raw_scores",
        ),
        ("/similarity", {"inputs": {"source_sentence": "w1", "sentences": []}}, None),
        ("/rerank", {"query": "w1", "texts": []}, "texts"),
        ("/rerank", {"query": "w1", "texts": [1]}, None),
        ("/rerank", {"query": "w1", "texts": ["w2"], "documents": ["w2"]}, "texts"),
        ("/rerank", {"query": "w1", "texts": ["w2"], "top_n": -1}, "top_n"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    asking: httpx.Client, path: str, fields: dict[str, Any], param: str | None
) -> None:
    error = refused(asking.post(path, json=fields))
    assert param is None or error["param"] == param
