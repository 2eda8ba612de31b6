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


@pytest.mark.parametrize("modality", ["asr", "diffusion", "embedding", "llm", "tts", "vlm"])
def test_a_command_that_a_server_serves_loads_no_model_and_no_framework(modality: str) -> None:
    chosen = "llm" if modality == "vlm" else modality  # both chat by the same route
    code = (
        f"import triptych.modalities.{modality}.api.cli\n"
        f"import triptych.modalities.{chosen}.api.remote"
    )
    assert not _loaded_by(code) & {"torch", "transformers", "fastapi", "uvicorn"}


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


WITHOUT_AV = "import sys; sys.modules['av'] = None\n"


def test_sound_that_is_not_compressed_is_spoken_and_heard_without_av(tmp_path: Path) -> None:
    """It is a package of 33 MiB, which machines with a GPU may lack."""
    write_folder(tmp_path)
    program = (
        f"{WITHOUT_AV}import numpy as np, triptych\n"
        "with triptych.SpeechPipeline.from_pretrained() as speak:\n"
        f"    speak('Hello.').save({str(tmp_path / 'a.wav')!r})\n"
        f"with triptych.TranscriptionPipeline.from_pretrained({str(tmp_path)!r}) as hear:\n"
        "    print(hear(np.random.rand(32000).astype(np.float32)).duration_s)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.stdout.split()[-1:] == ["2.0"], run.stderr
    assert (tmp_path / "a.wav").read_bytes()[:4] == b"RIFF"
