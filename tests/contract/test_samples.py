"""Samples keep up with the code they show."""

import runpy
import shlex
from pathlib import Path

import pytest

from triptych.cli import COMMANDS, Command

SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.mark.parametrize("path", sorted(SAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_sample_imports_and_has_a_main(path: Path) -> None:
    assert callable(runpy.run_path(str(path), run_name="sample")["main"])


def test_benchmark_workloads_are_flags_of_bench() -> None:
    workloads = runpy.run_path(str(SAMPLES / "benchmarks" / "chat_cpu.py"))["WORKLOADS"]
    (bench,) = (command for command in COMMANDS if command.name == "bench")
    for flags in workloads.values():
        assert bench.parser().parse_args(flags.split()).num_requests > 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_examples_in_help_are_flags_of_their_command(command: Command) -> None:
    for line in command.examples:
        words = shlex.split(line.rpartition("|")[2])
        assert words[:2] == ["triptych", command.name]
        command.parser().parse_args(words[2:])
