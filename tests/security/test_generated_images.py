"""Requests for images generated from the OpenAPI document: never an error of ours."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.image_app import FakeImageEngine, image_model, make_image_app, make_image_service
from support.images import hole_mask, hostile, image, saved

NUM_CASES = 40
PNG = saved(image(64, 64))
FILES = [PNG, hole_mask(64, 64, (0, 0, 32, 32)), b"", *(data for data, _ in hostile().values())]
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
MODES = {
    "generations": (POSITIVE, NEGATIVE),
    "edits": (POSITIVE,),  # it does not know how to spoil a list of files
    "variations": (POSITIVE, NEGATIVE),
}

quick = settings(
    max_examples=NUM_CASES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("route", ["generations", "edits", "variations"])
def test_no_request_for_images_is_answered_with_an_error_of_ours(route: str) -> None:
    engine = FakeImageEngine()
    service = make_image_service(engine, image_model(max_references=16))
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_image_app(engine, service))
    operation = schema[f"/v1/images/{route}"]["POST"]

    def check(case: schemathesis.Case, fits: bool, file: bytes) -> None:
        if isinstance(case.body, dict):  # or hardly any would get past the model and the size
            case.body |= {"model": "paint", "size": "64x64"} if fits else {}
            for name in ("image", "mask"):
                if name in case.body:
                    case.body[name] = PNG if fits and name == "image" else file
            if "image[]" in case.body:
                case.body["image[]"] = [file]
            if fits:
                case.body = {
                    key: value
                    for key, value in case.body.items()
                    if key in ("model", "size", "prompt", "n", "seed", "steps", "stream", "image")
                }
        reply = case.call()
        assert reply.status_code < 500, reply.text
        assert "x-request-id" in reply.headers
        if reply.status_code >= 400:
            assert reply.json()["error"]["code"]

    for mode in MODES[route]:
        cases = operation.as_strategy(generation_mode=mode)
        quick(given(case=cases, fits=st.booleans(), file=st.sampled_from(FILES))(check))()
    assert engine.finished
    assert not engine.running
