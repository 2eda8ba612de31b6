"""Speech requests generated from the OpenAPI document: never an error of ours."""

from __future__ import annotations

import schemathesis
from fakes_voice import HummingEngine, SpellingFrontEnd, make_speech_app, make_speech_service
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

NUM_CASES = 60

quick = settings(
    max_examples=NUM_CASES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_no_speech_request_is_answered_with_an_error_of_ours() -> None:
    engine = HummingEngine(step_samples=20_000)
    service = make_speech_service(engine, SpellingFrontEnd(takes_instructions=True))
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_speech_app(engine, service))
    operation = schema["/v1/audio/speech"]["POST"]

    def check(case: schemathesis.Case, text: str | None) -> None:
        if isinstance(case.body, dict):  # or hardly any would get past model, voice and words
            case.body |= {"model": "hum", "voice": "ada"} if "model" in case.body else {}
            case.body |= {"input": text} if text is not None else {}
        reply = case.call()
        assert reply.status_code < 500, reply.text
        assert "x-request-id" in reply.headers
        if reply.status_code >= 400:
            assert reply.json()["error"]["code"]

    for mode in schemathesis.GenerationMode:
        cases = operation.as_strategy(generation_mode=mode)
        texts = st.none() | st.text(min_size=1, max_size=60)
        quick(given(case=cases, text=texts)(check))()
    assert len(engine.finished) > NUM_CASES // 4
    assert not engine.running
