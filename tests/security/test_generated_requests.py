"""Requests generated from the OpenAPI document, right and wrong: never an error of ours."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import schemathesis
from fakes_http import FakeEngine, make_app
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

NUM_CASES = 25  # of either kind, for each route

quick = settings(
    max_examples=NUM_CASES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def check(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "tiny"  # or hardly any would get past the model's name
    reply = case.call()
    assert reply.status_code < 500, reply.text
    assert "x-request-id" in reply.headers
    if reply.status_code >= 400:
        assert reply.json()["error"]["code"]


def test_no_request_is_answered_with_an_error_of_ours(tmp_path: Path) -> None:
    engine = FakeEngine(answer="hi")
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(tmp_path, engine))
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 11
    for operation, mode in itertools.product(operations, schemathesis.GenerationMode):
        cases = operation.as_strategy(generation_mode=mode)
        with contextlib.suppress(Unsatisfiable):  # routes without input have no wrong one
            quick(given(case=cases)(check))()
    assert len(engine.finished) > NUM_CASES // 8  # they were not all refused at the door
