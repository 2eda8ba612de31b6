"""Requests generated from the OpenAPI document, right and wrong, to every route: no wrong answer.

`PYTHONPATH=tests python tests/security/test_generated_everything.py 10000` sends so many.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
import schemathesis
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from support.full_app import MODELS, FullApp, open_full_app
from triptych.core.http import sleep
from triptych.core.http.sse import described

BENCHMARKS = Path(__file__).parents[2] / "samples" / "benchmarks"
NUM_CASES = 240


def fuzzer(app: FastAPI) -> Any:
    """The sample's, in front of `app`."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from schema_fuzz import Fuzzer
    finally:
        sys.path.remove(str(BENCHMARKS))
    return Fuzzer(schemathesis.openapi.from_asgi("/openapi.json", app), MODELS, {})


@pytest.mark.timeout(1800)  # finds a hang; on a quiet machine it is about a minute
def test_every_route_answers_as_its_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep, "_MAX_POLLS", 1)  # the made-up engine never reports that it sleeps
    full_app = open_full_app(tmp_path)
    report = fuzz(full_app, NUM_CASES)
    assert report.faults == []
    assert report.num_cases >= NUM_CASES
    assert min(full_app.num_finished.values()) > 0  # not all refused at the door
    assert not full_app.chat.running | full_app.speech.running | full_app.image.running


def fuzz(full_app: FullApp, num_cases: int) -> Any:
    found = fuzzer(full_app.app)
    operations = {operation.label for operation in found.operations}
    documented = full_app.app.openapi()["paths"].items()
    assert operations == {f"{how.upper()} {path}" for path, ways in documented for how in ways}
    return found.run(num_cases)


class Chunk(BaseModel):
    kind: Literal["chunk"]


def events(frames: str) -> Response:
    return Response(frames, media_type="text/event-stream")


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (Response(status_code=500), "Server error"),
        (JSONResponse({}, status_code=302), "Undocumented status code"),
        (JSONResponse({"kind": 1}), "Response violates schema"),
        (Response("x", media_type="text/plain"), "Undocumented Content-Type"),
        (events('data: {"kind": 1}\n\n'), "violates"),
        (events("data: x\n\n"), "violates"),
        (JSONResponse({"error": {}}, status_code=404), "without a code"),
        (events('data: {"kind":"chunk"}\n\ndata: [DONE]\n\n'), ""),
    ],
)
def test_the_fuzzer_finds_what_is_wrong(reply: Response, fault: str) -> None:
    app = FastAPI()
    documented: Any = {
        200: {"model": Chunk, "content": described(Chunk)},
        404: {"content": {"application/json": {"schema": {"type": "object"}}}},
    }

    @app.get("/x", responses=documented, response_model=None)
    async def show() -> Response:
        return reply

    found = fuzzer(app).run(1).faults
    assert bool(found) is bool(fault)
    assert not fault or any(fault in output for output in found), found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        everything = fuzz(open_full_app(Path(folder)), int(sys.argv[1]))
    everything.show()
    sys.exit(1 if everything.faults else 0)
