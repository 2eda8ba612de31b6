"""Thousands of valid and invalid requests generated from a server's OpenAPI document.

    pip install -e '.[test]' && triptych serve
    python samples/benchmarks/schema_fuzz.py --url http://127.0.0.1:8000 --cases 10000

Every operation gets its share of requests that fit its schema and of requests that do not. Half of
them are also adapted to the server (its models, small sizes, real files), since few others would be
accepted. A response is wrong if it is a 5xx, has a status, content type, header or body that the
document does not declare, or is an error without a code. Prints the responses of each operation;
the exit code is 1 if any was wrong. `tests/security/test_generated_everything.py` runs the same
over every route with fake engines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import struct
import sys
import time
import wave
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
TASKS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "chat",
    "/v1/responses": "chat",
    "/v1/responses/input_tokens": "chat",
    "/tokenize": "chat",
    "/detokenize": "chat",
    "/v1/messages": "chat",
    "/v1/messages/count_tokens": "chat",
    "/api/chat": "chat",
    "/api/generate": "chat",
    "/api/show": "chat",
    "/api/pull": "chat",
    "/v1/embeddings": "embedding",
    "/api/embed": "embedding",
    "/api/embeddings": "embedding",
    "/v1/audio/speech": "speech",
    "/v1/audio/voices": "speech",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "transcription",
    "/v1/images/generations": "image",
    "/v1/images/edits": "image",
    "/v1/images/variations": "image",
}
"""The kind of model that a route needs."""
MOST = {
    "max_tokens": 4,
    "max_completion_tokens": 4,
    "max_output_tokens": 4,
    "min_tokens": 2,
    "n": 2,
    "steps": 2,
}
"""Upper bounds of adapted requests, so that thousands take minutes."""
WORDS: Mapping[str, Any] = {
    "input": "Good morning.",
    "messages": [{"role": "user", "content": "Good morning."}],
    "prompt": "a red apple",
    "tokens": [5, 6],
}
"""Content of adapted requests."""
USUAL: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": MOST["max_tokens"]},
    "/v1/completions": {"max_tokens": MOST["max_tokens"]},
    "/v1/messages": {"max_tokens": MOST["max_tokens"]},
    "/v1/responses": {"max_output_tokens": MOST["max_output_tokens"], "input": WORDS["input"]},
    "/v1/responses/input_tokens": {"input": WORDS["input"]},
    "/api/chat": {"options": {"num_predict": MOST["max_tokens"]}},
    "/api/generate": {"options": {"num_predict": MOST["max_tokens"]}},
}
"""Defaults of adapted requests: without them an answer would fill the context."""
OPTIONS = frozenset(
    {
        *("continue_final_message", "include[]", "language", "logprobs", "min_tokens", "name"),
        *("consent", "output_format", "progress", "quality", "response_format", "seed", "stop"),
        *("stream", "stream_format", "stream_options", "strength", "temperature", "top_k", "top_p"),
        *MOST,
    }
)
"""Optional fields of adapted requests; more would rarely be valid together."""
ENDLESS = frozenset({"/v1/engine/events"})
"""Routes whose answers end when the client leaves: they get no requests."""
NUM_SHOWN = 20
LONGEST_S = 300
"""Timeout of a response, in seconds; a slower one ends the run."""


@dataclass
class Report:
    """Counts of responses, and the wrong ones."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        """How many requests were sent."""
        return sum(sum(counts.values()) for counts in self.statuses.values())

    def show(self) -> None:
        """Print a table, and the first faults."""
        for name, counts in self.statuses.items():
            listed = ", ".join(f"{status} x {num}" for status, num in sorted(counts.items()))
            print(f"{name:38} {sum(counts.values()):6}  {listed}")
        for fault in self.faults[:NUM_SHOWN]:
            print(f"\n{fault}")
        print(f"\n{self.num_cases} cases, {len(self.faults)} wrong answers")


def sound() -> bytes:
    """A WAV file of one second of a tone."""
    tone = (round(9000 * math.sin(n / 6) * math.sin(n / 900)) for n in range(16_000))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(b"".join(struct.pack("<h", sample) for sample in tone))
    return file.getvalue()


def image() -> bytes:
    """A PNG file of one colour."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(file, "png")
    return file.getvalue()


@st.composite
def _whole(draw: st.DrawFn, cases: st.SearchStrategy[schemathesis.Case]) -> schemathesis.Case:
    """`cases` without forms with files, which schemathesis 4.30 fails to judge after a mutation."""
    try:
        return draw(cases)
    except ValueError as error:
        if "Unsupported type: 'Binary'" not in str(error):
            raise
        reject()


class Fuzzer:
    """Sends requests that a document allows and forbids. `models` are the server's, by kind."""

    def __init__(self, schema: Any, models: Mapping[str, str], headers: Mapping[str, str]) -> None:
        self.operations = [result.ok() for result in schema.get_all_operations()]
        self.report = Report()
        self._models = models
        self._headers = dict(headers)
        self._files = {"image": image(), "sound": sound()}

    def run(self, num_cases: int) -> Report:
        """Send about this many requests, the same in every run."""
        operations = [one for one in self.operations if one.path not in ENDLESS]
        takes = [one for one in operations if one.body or list(one.iter_parameters())]
        modes = list(schemathesis.GenerationMode)
        share = math.ceil(num_cases / max(1, len(takes)) / len(modes))
        for operation in operations:
            for mode in modes:
                self._try(operation, mode, share)
        return self.report

    def _try(self, operation: Any, mode: schemathesis.GenerationMode, num_cases: int) -> None:
        quick = settings(
            max_examples=num_cases,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        cases = operation.as_strategy(generation_mode=mode)
        send = given(case=_whole(cases), fits=st.booleans())(self._send)
        with contextlib.suppress(Unsatisfiable):  # a route without input has no invalid one
            quick(send)()

    def _send(self, case: schemathesis.Case, fits: bool) -> None:
        if fits:
            self._fit(case)
        name = f"{case.method} {case.operation.path}"
        reply = case.call(headers=self._headers, timeout=LONGEST_S)
        self.report.statuses.setdefault(name, Counter())[reply.status_code] += 1
        try:
            case.validate_response(reply, checks=CHECKS)
        except BaseExceptionGroup as faults:
            found = "; ".join(f"{fault.title}: {fault.message}" for fault in faults.exceptions)
            self._note(name, found, case, reply)
        except AssertionError as fault:
            self._note(name, str(fault), case, reply)
        if reply.status_code >= 400 and not _code_of(reply):
            self._note(name, "an error without a code", case, reply)

    def _note(self, name: str, found: str, case: schemathesis.Case, reply: Any) -> None:
        sent, said = repr(case.body)[:300], bytes(reply.content)[:300]
        self.report.faults.append(f"{name}: {found[:600]}\n  sent {sent}\n  got {said!r}")

    def _fit(self, case: schemathesis.Case) -> None:
        """Adapt a well-formed request so that the server can answer it."""
        task = TASKS.get(case.operation.path)
        model = self._models.get(task or "")
        if not isinstance(case.body, dict) or model is None:
            return
        given = {**WORDS, **self._uploads(task)}
        known = given.keys() | OPTIONS
        body = {name: value for name, value in case.body.items() if name in known}
        for name, most in MOST.items():
            if isinstance(body.get(name), int) and body[name] > most:
                body[name] = most
        for name in given.keys() & body.keys():
            if isinstance(body[name], str | list | bytes):
                body[name] = given[name]
        body = {**USUAL.get(case.operation.path, {}), **body}
        case.body = {**body, "model": model} if "model" in case.body else body

    def _uploads(self, task: str | None) -> dict[str, Any]:
        if task == "image":
            file = self._files["image"]
            return {"image": file, "image[]": [file], "mask": file}
        file = self._files["sound"]
        return {"file": file, "audio_sample": file}


def _code_of(reply: Any) -> str:
    """The code of an error, or its equivalent in other APIs than OpenAI's."""
    if reply.headers.get("content-type") in (["application/json"], "application/json"):
        document = reply.json()
        if "error" in document:
            error = document["error"]
            is_coded = isinstance(error, dict)
            return str(error.get("code") or error.get("type", "") if is_coded else error)
        return str(document.get("reason", ""))  # a probe that is not ready
    return ""


def models_of(cards: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The first model of each kind that `/v1/models` lists."""
    models: dict[str, str] = {}
    for card in cards:
        models.setdefault(card["task"], card["id"])
    return models


def main() -> int:
    """Run against a live server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    headers = {"authorization": f"Bearer {args.api_key}"}
    cards = httpx.get(f"{args.url}/v1/models", headers=headers).raise_for_status().json()["data"]
    schema = schemathesis.openapi.from_url(f"{args.url}/openapi.json", headers=headers)
    started_s = time.perf_counter()
    report = Fuzzer(schema, models_of(cards), headers).run(args.cases)
    report.show()
    print(f"{time.perf_counter() - started_s:.0f} s")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
