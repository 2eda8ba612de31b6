"""Each process loads its own half: no torch beside the engine, no web framework in it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from triptych.cli import all_commands

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
PROGRAM = "import {modules}, sys; print(*sys.modules)"


def loaded_by(*modules, **environment):
    """The modules that are loaded with these; importing prints nothing, no warning either."""
    program = PROGRAM.format(modules=", ".join(modules))
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        check=True,
        text=True,
    )
    assert (run.stdout.count("\n"), run.stderr) == (1, "")
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            ["triptych.serve"],
            {"torch", "transformers", "fastapi", "uvicorn", "tokenizers", "ray"},
        ),
        (
            [
                "triptych.api_process",
                "triptych.core.http.app",
                "triptych.core.http.server",
                "triptych.modalities.llm.api.routes",
                "triptych.modalities.diffusion.api.routes",
                "triptych.modalities.asr.api.routes",
                "triptych.modalities.asr.source",
            ],
            {"torch", "transformers", "ray"},
        ),
        (
            ["triptych.engine_process", "triptych.schedulers.engine"],
            {"torch", "fastapi", "uvicorn", "starlette", "pydantic", "tokenizers", "ray"},
        ),
        (
            [
                "triptych.modalities.llm.engine.loader",
                "triptych.modalities.embedding.engine.loader",
            ],
            {"fastapi", "uvicorn", "starlette", "transformers", "diffusers", "torch._dynamo"},
        ),
        (
            [
                "triptych.modalities.asr.engine.loader",
                "triptych.modalities.vlm.engine.loader",
                "triptych.modalities.diffusion.engine.loader",
            ],
            {"fastapi", "uvicorn", "starlette"},
        ),
    ],
)
def test_a_process_does_not_load_the_others_half(modules, unwanted):
    assert not loaded_by(*modules) & unwanted


def test_ray_is_imported_where_it_is_asked_for_alone(tmp_path):
    """A stand-in is found first, whether Ray is installed or not."""
    (tmp_path / "ray.py").touch()
    modules = (
        "triptych.serve",
        "triptych.api_process",
        "triptych.engine_process",
        "triptych.schedulers.engine",
        "triptych.replicas.plan",
        "triptych.replicas.scaling",
        "triptych.replicas.handover",
        "triptych.core.http.app",
        "triptych.core.bulk.run",
        *(command.module for command in all_commands()),
    )
    found = loaded_by(*modules, PYTHONPATH=str(tmp_path))
    assert "triptych.core.bulk.cluster" in found
    assert "ray" not in found


def test_what_divides_models_is_loaded_where_one_is_divided_alone():
    program = (
        "import triptych.modalities.llm.engine.loader, sys;"
        " print(*(name for name in sys.modules if 'rank' in name and 'triptych' in name));"
        " import torch.distributed; print(torch.distributed.is_initialized())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert run.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("environment", "logged"),
    [
        ({}, "GOMP_SPINCOUNT = '2000'"),
        ({"GOMP_SPINCOUNT": "70"}, "GOMP_SPINCOUNT = '70'"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY = 'ACTIVE'"),
    ],
)
def test_openmp_spin_time_is_short_unless_the_environment_sets_it(environment, logged):
    """OpenMP's runtime says at its start what it goes by; runtimes other than GCC's say less.

    It is loaded without torch, which would take two seconds more.
    """
    torch = find_spec("torch")
    assert torch is not None
    openmp = Path(torch.origin).parent / "lib" / "libgomp.so.1"
    if not openmp.exists():
        pytest.skip("torch was built with another OpenMP")
    ours = {name: value for name, value in os.environ.items() if name not in _WAITING}
    run = subprocess.run(
        [sys.executable, "-c", f"import triptych, ctypes; ctypes.CDLL({str(openmp)!r})"],
        env=ours | environment | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert logged in run.stderr
