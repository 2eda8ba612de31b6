"""`triptych embed` and `EmbeddingPipeline` on a tiny encoder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from support.embedding_models import save
from triptych import EmbeddingPipeline
from triptych.cli import main
from triptych.core.errors import InvalidRequest


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "encoder"
    folder.mkdir()
    save(folder, pooling_mode_mean_tokens=True)
    return str(folder)


def embed(*argv: str) -> int:
    return main(["embed", *argv, "--device", "cpu"])


def test_lines_become_an_array(model: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("w1 w2\n\nw3\n")
    out = tmp_path / "out.npy"
    assert embed("-i", str(tmp_path / "texts"), "-o", str(out), "--model", model) == 0
    with EmbeddingPipeline.from_pretrained(model, progress=False, device="cpu") as pipeline:
        np.testing.assert_allclose(np.load(out), pipeline(["w1 w2", "w3"]), atol=1e-6)
        assert pipeline([]).shape == (0, 32)
        assert pipeline("w1", dimensions=5).shape == (1, 5)


async def test_every_call_has_a_twin_and_entries_keep_their_places(model: str) -> None:
    with EmbeddingPipeline.from_pretrained(model, progress=False, device="cpu") as pipeline:
        near, far = await asyncio.gather(pipeline.acall(["w1", "w2"]), pipeline.acall("w3"))
        np.testing.assert_allclose(near, pipeline(["w1", "w2"]), atol=1e-6)
        entries = [{"texts": "w1"}, {"texts": "w2", "dimensions": 99}, {"texts": ["w2", "w3"]}]
        first, error, last = pipeline.map(entries)
        assert isinstance(error, InvalidRequest)
        np.testing.assert_allclose(first, near[:1], atol=1e-6)
        np.testing.assert_allclose(last, np.concatenate([near[1:], far]), atol=1e-6)


def test_json_lines_go_to_stdout(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed("w1", "w2", "--model", model) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["w1", "w2"]
    assert len(rows[0]["embedding"]) == 32


def test_texts_are_put_in_order_of_similarity(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed("w30", "w1 w2", "w1", "--similar-to", "w1", "--model", model) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == " 1.000  w1"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["w1", "-i", "file"], "not both"),
        (["w1", "-o", "x.txt"], ".npy or .jsonl"),
        (["w1", "--dimensions", "-1"], "above 0"),
        (["w1", "-o", "x.npy", "--similar-to", "w2"], "omit --output"),
        (["-i", "/nowhere"], "cannot be read"),
    ],
)
def test_wrong_use_is_reported_in_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed(*argv) == 2
    assert complaint in capsys.readouterr().err


def test_rows_are_embedded_once_and_wrong_ones_are_kept(model: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    batch = {"method": "POST", "url": "/v1/embeddings"}
    rows = [
        {"text": "w1", "id": 1},
        {"custom_id": "two", **batch, "body": {"input": ["w1", "w2"], "dimensions": 4}},
        {"text": "w3", "colour": "red"},
        {"text": "w3", "model": "other"},
        {"text": "w3", "dimensions": "many"},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):
        assert embed("-i", str(source), "-o", str(out), "--model", model) == 1
        found = [json.loads(line) for line in out.read_text().splitlines()]
        assert (found[0]["id"], len(found[0]["embedding"])) == (1, 32)
        assert [len(vector) for vector in found[1]["embeddings"]] == [4, 4]
        codes = [row["error"]["code"] for row in found[2:]]
        assert codes == ["invalid_request", "model_not_found", "invalid_request"]
