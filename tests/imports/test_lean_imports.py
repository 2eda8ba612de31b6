"""`import triptych` costs nothing until it is used, and the API process loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "matplotlib", "rich")


def _loaded_by(code: str) -> set[str]:
    """Which heavy packages are loaded after `code` ran in a fresh interpreter."""
    report = f"json.dump([name for name in {HEAVY!r} if name in sys.modules], sys.stderr)"
    program = f"{code}\nimport json, sys\n{report}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stderr))


@pytest.mark.parametrize(
    "code",
    [
        "import triptych",
        "import triptych.cli",
        "from triptych.cli import main; main(['--help'])",
        "from triptych.cli import main; main(['config', '--format', 'json'])",
    ],
)
def test_importing_the_face_loads_nothing_heavy(code: str) -> None:
    assert _loaded_by(code) == set()


@pytest.mark.parametrize(
    "module",
    [
        "triptych.api_process",
        "triptych.core.http.app",
        "triptych.modalities.llm.api.bench.cli",
        "triptych.modalities.llm.api.cli",
        "triptych.modalities.llm.api.routes",
        "triptych.modalities.asr.api.routes",
        "triptych.modalities.tts.api.routes",
        "triptych.modalities.tts.api.voices.routes",
        "triptych.models_cli",
        "triptych.schedulers.engine",
        "triptych.schedulers.tokens.scheduler",
        "triptych.serve",
    ],
)
def test_whatever_the_api_and_the_supervisor_load_knows_no_torch(module: str) -> None:
    assert not _loaded_by(f"import {module}") & {"torch", "transformers"}


def test_the_embedded_voice_starts_without_the_compiler_of_torch() -> None:
    """Importing it takes a quarter of the start."""
    program = (
        "import sys, triptych\n"
        "with triptych.SpeechPipeline.from_pretrained() as speak:\n"
        "    speak('Hello.')\n"
        "print('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert run.stdout.split()[-1] == "False"
