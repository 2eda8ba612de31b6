"""What is imported without torch's compiler, and what is put back after."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from triptych.core.engine.lean_imports import lean_imports

MARKED = """
import sys, torch
from triptych.core.engine.lean_imports import lean_imports

with lean_imports():
    @torch.compiler.disable
    def plain(x): return x + 1

    @torch.compiler.disable(recursive=False)
    def optioned(x): return x + 2

    @torch.compiler.allow_in_graph
    @torch._dynamo.allow_in_graph
    def allowed(x): return x + 3

    print("torch._dynamo.decorators" in sys.modules, plain(0), optioned(0), allowed(0))
print(torch._dynamo.allow_in_graph.__module__, torch.compiler.disable.__module__)
with lean_imports():
    print(torch._dynamo.allow_in_graph.__module__)
"""


def test_marks_are_left_off_inside_and_the_compiler_is_there_after() -> None:
    run = subprocess.run([sys.executable, "-c", MARKED], capture_output=True, check=True, text=True)
    assert run.stdout.splitlines() == [
        "False 1 2 3",
        "torch._dynamo.decorators torch.compiler",
        "torch._dynamo.decorators",
    ]


def test_all_is_put_back_where_an_import_fails() -> None:
    before = importlib.metadata.packages_distributions, torch.compiler.disable
    with pytest.raises(ModuleNotFoundError), lean_imports():
        import no_such_module  # noqa: F401
    assert (importlib.metadata.packages_distributions, torch.compiler.disable) == before
