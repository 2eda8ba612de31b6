"""`import triptych` costs nothing until it is used, and the API process loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.asr import write_folder

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


def test_whatever_the_api_and_the_supervisor_load_knows_no_torch() -> None:
    modules = (
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
    )
    assert not _loaded_by(f"import {', '.join(modules)}") & {"torch", "transformers"}


def test_a_command_that_a_server_serves_loads_no_model_and_no_framework() -> None:
    commands = ("asr", "diffusion", "embedding", "llm", "tts", "vlm")
    names = [f"triptych.modalities.{modality}.api.cli" for modality in commands]
    # Vision has the route of chat.
    names += [f"triptych.modalities.{modality}.api.remote" for modality in commands[:-1]]
    code = f"import {', '.join(names)}"
    assert not _loaded_by(code) & {"torch", "transformers", "fastapi", "uvicorn"}


def test_the_embedded_voice_speaks_and_hears_without_av_and_the_compiler_of_torch(
    tmp_path: Path,
) -> None:
    """Machines with a GPU may lack av, of 33 MiB; importing the other takes half of a start."""
    write_folder(tmp_path)
    program = (
        "import sys; sys.modules['av'] = None\n"
        "import numpy as np, triptych\n"
        "with triptych.SpeechPipeline.from_pretrained() as speak:\n"
        f"    speak('Hello.').save({str(tmp_path / 'a.wav')!r})\n"
        "print('torch._dynamo' in sys.modules)\n"
        f"with triptych.TranscriptionPipeline.from_pretrained({str(tmp_path)!r}) as hear:\n"
        "    print(hear(np.random.rand(32000).astype(np.float32)).duration_s)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.stdout.split()[-2:] == ["False", "2.0"], run.stderr
    assert (tmp_path / "a.wav").read_bytes()[:4] == b"RIFF"
