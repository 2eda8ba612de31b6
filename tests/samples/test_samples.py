"""Samples keep up with the code they show."""

import re
import runpy
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

from support.samples import SAMPLES, importing_samples
from triptych.cli import COMMANDS, Command

SCRIPT = 'if __name__ == "__main__":'
OTHERS = frozenset(
    {
        "agent_framework",
        "agents",
        "agno",
        "anthropic",
        "cohere",
        "crewai",
        "dspy",
        "efficientnet_lite_pytorch",
        "google.adk",
        "haystack",
        "instructor",
        "langchain",
        "langchain_anthropic",
        "litellm",
        "livekit",
        "llama_cpp",
        "llama_index",
        "ollama",
        "openvino_genai",
        "outlines",
        "pipecat",
        "pydantic_ai",
        "resvg_py",
        "semantic_kernel",
        "sentence_transformers",
        "smolagents",
        "strands",
    }
)
"""What recipes, benchmarks and clients need beyond the tests."""
BLACK = (0, 0, 0)
PATHS = sorted(SAMPLES.rglob("*.py"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers
def test_sample_imports_and_has_a_main_if_it_is_run(path: Path) -> None:
    folders = (path.parent, path.parent.parent)  # as when a script is run; a library's, by recipes
    try:
        with importing_samples(*folders):
            names = runpy.run_path(str(path), run_name="sample")
    except ModuleNotFoundError as error:
        if error.name not in OTHERS:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert callable(names["main"]) if SCRIPT in path.read_text() else "main" not in names


def test_sample_leaves_no_module_behind() -> None:
    known, path = set(sys.modules), list(sys.path)
    with importing_samples(SAMPLES / "training"):
        import_module("pictures.arrangements")
    assert "pictures.arrangements" in known or "pictures.arrangements" not in sys.modules
    assert sys.path == path


def test_package_is_found_where_its_module_was_left_behind() -> None:
    with importing_samples(SAMPLES / "training"):
        package = import_module("pictures")
        with importing_samples(SAMPLES / "training"):
            import_module("pictures.arrangements")
        assert sys.modules["pictures"] is package
        assert import_module("pictures.arrangements") is package.arrangements


FOLDERS = sorted({path.parent for path in PATHS if not (path.parent / "__init__.py").exists()})


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_folder_of_samples_can_be_run(folder: Path) -> None:
    assert any(SCRIPT in path.read_text() for path in folder.glob("*.py"))


def test_benchmark_workloads_are_flags_of_bench() -> None:
    workloads = runpy.run_path(str(SAMPLES / "benchmarks" / "chat_cpu.py"))["WORKLOADS"]
    (bench,) = (command for command in COMMANDS if command.name == "bench")
    for flags in workloads.values():
        assert bench.parser().parse_args(flags.split()).num_requests > 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_examples_in_help_are_flags_of_their_command(command: Command) -> None:
    for line in command.examples:
        parts = [shlex.split(part.partition("<")[0]) for part in line.split("|")]
        ours = [words for words in parts if words[0] == "triptych"]
        assert command.name in {words[1] for words in ours}
        for _, name, *arguments in ours:
            (used,) = (each for each in COMMANDS if each.name == name)
            used.parser().parse_args(arguments)


CLIENTS = SAMPLES / "clients"
SCRIPTS = sorted(CLIENTS.glob("with_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_clients_are_pinned_to_the_versions_of_the_table(script: Path) -> None:
    runner = runpy.run_path(str(CLIENTS / "run.py"))
    table = (SAMPLES.parent / "docs" / "clients.md").read_text().splitlines()
    versions = [requirement.split("==") for requirement in runner["requirements_of"](script)]
    of_npm = re.search(r'^PACKAGE = "(.+)@(.+)"$', script.read_text(), re.MULTILINE)
    name, version = of_npm.groups() if of_npm else versions[0]
    row = next(line for line in table if line.startswith(f"| {name.partition('[')[0]}"))
    assert f"| {version} |" in row
    assert all(len(pinned) == 2 for pinned in versions)


def test_lines_of_a_client_become_a_row() -> None:
    runner = runpy.run_path(str(CLIENTS / "run.py"))
    lines = (
        "client ollama 0.6.3",
        "works chat (1 s) Hi.",
        "fails tools (0 s) X: y",
        "small a (2 s)",
    )
    outcome = runner["Outcome"].of(CLIENTS / "with_ollama.py", "\n".join(lines))
    assert outcome.row == "| ollama | 0.6.3 | chat | a | tools |"


def test_sheet_has_each_image_above_its_caption() -> None:
    with importing_samples(SAMPLES):
        sheet = import_module("see_what_is_drawn").sheet([Image.new("RGB", (8, 8))] * 5, ["a"] * 5)
    dark = [sheet.getpixel((100, y)) == BLACK for y in range(sheet.height)]
    assert sum(dark) == 2 * 192, "two rows of images"
    assert not dark[-1]
