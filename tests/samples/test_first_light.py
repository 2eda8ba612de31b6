"""The first light on a GPU: a stage that fails or hangs leaves the others and their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from support.samples import SAMPLES, importing_samples
from support.tiers import nightly

GPU = SAMPLES / "gpu"
STAGES = {
    "good": "def run(place):\n    yield {'name': 'a', 'figures': {'x': 1.5}, 'error': None}\n",
    "fails": "def run(place):\n    yield from STAGES['good']\n",
    "hangs": (
        "import subprocess, time\n"
        "def run(place):\n"
        "    yield {'name': 'begun', 'figures': {}, 'error': None}\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    (place.scratch.parent / 'child').write_text(str(child.pid))\n"
        "    time.sleep(600)\n"
    ),
}
DRIVER = """
import first_light

first_light.LIMITS_S.clear()
first_light.LIMITS_S.update({limits})
first_light.LEAST_S = 1
first_light.main()
"""

INTERPRETED = pytest.mark.skipif(
    version("triton") < "3.8" and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton's interpreter before 3.8 needs numpy before 2.4",
)


def _run(folder: Path, limits: dict[str, float], *arguments: str) -> tuple[str, list[Any]]:
    """What stages print and yield when they run with these limits."""
    for name in limits:
        (folder / f"{name}.py").write_text(STAGES[name], encoding="utf-8")
    paths = [str(GPU), str(folder), os.environ.get("PYTHONPATH", "")]
    script = ["-c", DRIVER.format(limits=limits), "--out", "results", "--device", "cpu", "--tiny"]
    ended = subprocess.run(
        [sys.executable, *script, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ended.stderr
    lines = (folder / "results" / "first_light.jsonl").read_text(encoding="utf-8").splitlines()
    return ended.stdout, [json.loads(line) for line in lines]


def test_stage_that_fails_or_hangs_does_not_end_the_others(tmp_path: Path) -> None:
    shown, lines = _run(tmp_path, {"fails": 60, "hangs": 8, "good": 60})
    errors = {line["stage"]: line["error"] for line in lines if line["name"] == "all"}
    assert "NameError" in errors["fails"]
    assert "its limit of 8 s" in errors["hangs"]
    assert errors["good"] is None
    assert [line["name"] for line in lines if line["stage"] == "hangs"] == ["begun", "all"]
    assert "good | a: x 1.5" in shown
    with suppress(psutil.NoSuchProcess):  # it may wait for its parent to see its end
        child = psutil.Process(int((tmp_path / "child").read_text()))
        assert child.status() == psutil.STATUS_ZOMBIE
    assert "in run" in (tmp_path / "results" / "first_light.log").read_text()


def test_stage_for_which_no_time_is_left_is_not_started(tmp_path: Path) -> None:
    _, lines = _run(tmp_path, {"good": 60}, "--budget-s", "0.5")
    assert [line["name"] for line in lines] == ["all"]
    assert "not started" in lines[0]["error"]


def test_summary_has_the_errors_and_fits() -> None:
    with importing_samples(GPU):
        first_light: Any = import_module("first_light")
    lines = [
        {"stage": f"stage{index % 3}", "name": "n" * 50, "figures": {"a": index / 7}, "error": None}
        for index in range(300)
    ]
    lines.append({"stage": "last", "name": "b", "figures": {}, "error": "Traceback\nValueError: c"})
    shown = first_light.summary(lines, 3000)
    assert len(shown) < 3300
    assert shown.splitlines()[1] == "last | b: ValueError: c"
    assert [f"stage{index}: " in shown for index in range(3)] == [True, True, True]


def test_a_stage_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    script = [str(GPU / "first_light.py"), "--out", str(tmp_path / "results"), "--stages", "limits"]
    subprocess.run([sys.executable, *script, "--device", "cpu", "--tiny"], check=True)
    lines = (tmp_path / "results" / "first_light.jsonl").read_text(encoding="utf-8").splitlines()
    check_results([json.loads(line) for line in lines])


def check_results(found: list[Any]) -> None:
    assert found
    assert [line["error"] for line in found if line["error"]] == []


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("kernel_times", marks=INTERPRETED),
        "text_figures",
        nightly("text_figures_fp8"),
        "image_figures",
        "images",
        "codec_figures",
        "chat_with_images",
    ],
)
def test_stage_can_be_rehearsed(stage: str, tmp_path: Path) -> None:
    """In this process, which has what all of them import."""
    with importing_samples(GPU):
        place: Any = import_module("place")
        here = place.Place(torch.device("cpu"), True, tmp_path, time.monotonic() + 150)
        check_results(list(import_module(stage).run(here)))


def test_all_kernels_are_timed_and_can_be_compiled_ahead(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [str(GPU / "compile_ahead.py"), "cuda:90", "--count"]
    ended = subprocess.run(
        [sys.executable, *script],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    num_launches, _, rest = ended.stdout.partition(" launches, ")
    assert rest == f"0 failed\n{tmp_path}\n", ended.stdout + ended.stderr
    assert int(num_launches) > 40
