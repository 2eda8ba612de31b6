"""The kernels' thread pool, driven from C, and from Python through a kernel that uses it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.core.runtime.kernels.native import build as build_module
from triptych.core.runtime.kernels.native.library import NativeKernels

_HERE = Path(__file__).parent
_NATIVE = Path(build_module.__file__).parent
_CHECKS = ("sizes", "nesting", "concurrency", "pauses", "fork", "float_mode", "signals")
_TIMEOUT_S = 120.0  # a pool that hangs, on however slow a machine

pytestmark = pytest.mark.skipif(
    os.name != "posix" or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="needs a C compiler",
)


@pytest.fixture(scope="module", params=["", "-DPOOL_WITHOUT_FUTEX"], ids=["futex", "condition"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "stress"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    flags = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{_NATIVE}")
    sources = (_HERE / "pool_stress.c", _NATIVE / "pool.c")
    defines = (request.param,) if request.param else ()
    subprocess.run([compiler, *flags, *defines, *sources, "-o", path], check=True)
    return path


@pytest.mark.parametrize("check", _CHECKS)
def test_the_pool_withstands(program: Path, check: str) -> None:
    done = subprocess.run(
        [program, check], check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    assert (done.returncode, done.stderr) == (0, "")


_PYTHON = """
import os, signal, sys, threading
from pathlib import Path
import torch
from triptych.core.runtime.kernels.native.arguments import RowEdits
from triptych.core.runtime.kernels.native.library import NativeKernels

kernels = NativeKernels.open("native", Path(sys.argv[1]))
torch.set_num_threads(4)
generator = torch.Generator().manual_seed(0)
logits = torch.randn(9, 500, generator=generator)
shapes, slots = torch.tensor([[1.0, 20.0, 0.9, 0.0]] * 9), torch.arange(9)
numbers = torch.rand(9, generator=generator, dtype=torch.float64)

def drawn():
    return kernels.sample_rows(logits, RowEdits(), shapes, slots, numbers)[0]

first = drawn()

def same():
    for _ in range(200):
        assert torch.equal(drawn(), first)

threads = [threading.Thread(target=same) for _ in range(4)]
for thread in threads:
    thread.start()
child = os.fork()
if not child:
    signal.alarm(60)
    same()
    os._exit(7)
for thread in threads:
    thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_python_threads_and_children_may_call_at_once(native: NativeKernels) -> None:
    """And the process ends although workers sleep."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PYTHON, native.path.parent],
        check=False, capture_output=True, text=True, timeout=_TIMEOUT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
