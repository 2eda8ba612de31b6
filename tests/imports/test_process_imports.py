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
PROGRAM = """
import sys
for modules in {stages}:
    for name in modules:
        __import__(name)
    print(*sys.modules)
"""
WEB = {"fastapi", "uvicorn", "starlette"}
ONE_SIDE = (
    (["triptych.serve"], {"torch", "transformers", *WEB, "tokenizers", "ray"}),
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
)
ENGINE = (
    (
        ["triptych.engine_process", "triptych.schedulers.engine"],
        {"torch", *WEB, "pydantic", "tokenizers", "ray"},
    ),
    (
        [
            "triptych.modalities.llm.engine.loader",
            "triptych.modalities.embedding.engine.loader",
        ],
        {
            *WEB,
            "transformers",
            "diffusers",
            "torch._dynamo",
            "triptych.core.runtime.devices.rank_group",  # where models are divided alone
            "triptych.core.runtime.engine.rank_sampler",
            "triptych.core.runtime.engine.ranks",
        },
    ),
    (
        [
            "triptych.modalities.asr.engine.loader",
            "triptych.modalities.vlm.engine.loader",
            "triptych.modalities.diffusion.engine.loader",
        ],
        WEB,
    ),
)


def loaded_by(*stages, **environment):
    """The modules that are loaded after each stage, a list of them, in a fresh interpreter.

    Importing prints nothing, no warning either.
    """
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(stages=stages)],
        env=os.environ | environment,
        capture_output=True,
        check=True,
        text=True,
    )
    assert (run.stdout.count("\n"), run.stderr) == (len(stages), "")
    return [set(line.split()) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("stages", [ONE_SIDE, ENGINE], ids=["API", "engine"])
def test_a_process_does_not_load_the_others_half(stages):
    """What a stage may not load the stages before it may not either."""
    found = loaded_by(*(modules for modules, _ in stages))
    assert [loaded & unwanted for loaded, (_, unwanted) in zip(found, stages, strict=True)] == (
        [set()] * len(stages)
    )


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
    (found,) = loaded_by(modules, PYTHONPATH=str(tmp_path))
    assert "triptych.core.bulk.cluster" in found
    assert "ray" not in found


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
