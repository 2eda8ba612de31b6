"""Which API a request is of, and what that changes where no route is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from support.http import FakeEngine, in_process, make_service
from triptych.core.errors import InvalidRequest, TriptychError
from triptych.core.http.app import create_app
from triptych.core.http.dialects import Dialect, named_message
from triptych.core.options.config import Config, ServerOptions
from triptych.modalities.llm.api.routes import llm_router


class Said(BaseModel):
    said: str
    of: str


def written(error: TriptychError, request_id: str) -> Said:
    return Said(said=error.code, of=request_id)


OTHER = Dialect(
    prefix="/other",
    header="x-other",
    id_header="other-id",
    error=written,
    status=lambda error: error.status + 20,
)


@pytest.mark.parametrize(
    ("path", "headers", "is_other"),
    [
        ("/other", {}, True),
        ("/other/x", {}, True),
        ("/others", {}, False),
        ("/v1/none", {}, False),
        ("/v1/none", {"x-other": "1"}, True),
    ],
)
async def test_an_error_is_in_the_words_of_its_api(
    tmp_path: Path, path: str, headers: dict[str, str], is_other: bool
) -> None:
    engine = FakeEngine()
    router = llm_router(make_service(tmp_path, engine))
    config = Config(server=ServerOptions(api_key=("key",)))
    app = create_app(config, engine, [router], dialects=[OTHER])
    statuses = {}
    async with in_process(app, **headers) as client:
        for name, key in (("not_found", "key"), ("invalid_api_key", "wrong")):
            reply = await client.get(path, headers={"x-api-key": key})
            statuses[name] = reply.status_code
            body: dict[str, Any] = reply.json()
            request_id = reply.headers["x-request-id"]
            if is_other:
                assert body == {"said": name, "of": request_id}
                assert reply.headers["other-id"] == request_id
            else:
                assert body["error"]["code"] == name
                assert "other-id" not in reply.headers
    more = 20 if is_other else 0
    assert statuses == {"not_found": 404 + more, "invalid_api_key": 401 + more}


def test_a_field_is_named_once() -> None:
    assert named_message(InvalidRequest("too long", param="text")) == "text: too long"
    assert named_message(InvalidRequest("text is too long", param="text")) == "text is too long"
    assert named_message(InvalidRequest("too long")) == "too long"


async def test_either_header_has_a_key(tmp_path: Path) -> None:
    engine = FakeEngine()
    config = Config(server=ServerOptions(api_key=("key",)))
    app = create_app(config, engine, [])
    found = {}
    async with in_process(app) as client:
        for headers in (
            {"authorization": "Bearer key"},
            {"x-api-key": "key"},
            {"authorization": "Bearer wrong", "x-api-key": "key"},
            {"x-api-key": "Bearer key"},
            {},
        ):
            reply = await client.get("/v1/models", headers=headers)
            found[str(headers)] = reply.status_code
    assert list(found.values()) == [200, 200, 401, 401, 401]


STAINLESS = "arch helper-method lang os package-version retry-count runtime runtime-version timeout"


@pytest.mark.parametrize("origin", ["https://page.example", "https://other.example"])
async def test_clients_in_pages_may_send_their_headers(tmp_path: Path, origin: str) -> None:
    """Those of OpenAI's and Anthropic's packages for browsers; only from where it is allowed."""
    engine = FakeEngine()
    config = Config(server=ServerOptions(cors_origin=("https://page.example",)))
    names = [f"x-stainless-{word}" for word in STAINLESS.split()]
    names += ["anthropic-beta", "anthropic-dangerous-direct-browser-access", "anthropic-version"]
    names += ["authorization", "content-type", "idempotency-key", "openai-organization"]
    names += ["openai-project", "openai-beta", "x-api-key", "x-request-id"]
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": ", ".join(names),
    }
    async with in_process(create_app(config, engine, [])) as client:
        reply = await client.options("/v1/messages", headers=headers)
    allowed = reply.headers.get("access-control-allow-headers", "").split(", ")
    if origin == "https://page.example":
        assert reply.status_code == 200
        assert set(names) <= set(allowed)
    else:
        assert "access-control-allow-origin" not in reply.headers
