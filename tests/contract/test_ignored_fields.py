"""Every route reports in a header the fields that its body's types ignore."""

from __future__ import annotations

import pytest
from fastapi.routing import APIRoute

from support.http import FakeEngine
from triptych.compose import build_app
from triptych.core.http.fields import IgnoresHints, ignored_in, models_of
from triptych.core.options.config import Config

BODIES = {
    route.path: route.body_field.field_info.annotation
    for route in build_app(Config(), (), FakeEngine()).state.routes
    if isinstance(route, APIRoute) and route.body_field is not None
}
HINTED = {
    path: hinted
    for path, body in BODIES.items()
    if (hinted := [kind for kind in models_of(body) if issubclass(kind, IgnoresHints)])
}


def test_the_routes_with_hints_are_these() -> None:
    assert HINTED.keys() >= {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/api/chat", "/api/generate", "/v1/embeddings", "/v1/rerank", "/v1/score"),
    }


@pytest.mark.parametrize("path", HINTED)
def test_every_ignored_field_is_found_in_the_body(path: str) -> None:
    for kind in HINTED[path]:
        for name in kind.ignored:
            assert name in ignored_in(BODIES[path], {name: 1})


@pytest.mark.parametrize("path", HINTED)
def test_no_other_type_of_the_body_reads_it(path: str) -> None:
    ignored = {name for kind in HINTED[path] for name in kind.ignored}
    for kind in models_of(BODIES[path]):
        assert ignored.isdisjoint(kind.model_fields)


def test_labels_of_messages_are_found_on_every_route_with_conversations() -> None:
    value = {"messages": [{"role": "user", "content": "a", "timestamp": 1}]}
    talking = (
        "/v1/chat/completions",
        "/v1/embeddings",
        "/tokenize",
        "/apply-template",
        "/api/chat",
    )
    for path in talking:
        assert "messages.timestamp" in ignored_in(BODIES[path], value), path
