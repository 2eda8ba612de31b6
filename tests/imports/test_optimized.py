"""Bad requests are refused where Python runs without asserts, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
from pydantic import ValidationError
from triptych.core.errors import RequestError
from {module} import {kind} as Request
try:
    Request.model_validate({fields!r})
except (RequestError, ValidationError) as error:
    print("refused")
"""
API = "triptych.modalities.llm.api"
FUNCTION = {"type": "function", "name": "f"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("module", "kind", "fields"),
    [
        (
            f"{API}.responses.tools",
            "NamespaceTool",
            {"type": "namespace", "name": "n" * 128, "tools": [FUNCTION]},
        ),
        (f"{API}.protocol", "ChatRequest", {**CHAT, "tool_choice": "required"}),
    ],
)
def test_checks_are_no_asserts(module: str, kind: str, fields: dict[str, object]) -> None:
    code = CODE.format(module=module, kind=kind, fields=fields)
    run = subprocess.run(
        [sys.executable, "-O", "-c", code], check=False, capture_output=True, text=True
    )
    assert run.stdout == "refused\n", run.stderr
