"""Each block of README and docs that is not marked, run as a reader would type it.

All pages share one server with the default models. The blocks of a page share a folder, with the
files that a reader has, and a Python namespace. Commands that start servers, fetch models or
install packages do nothing here: `tests/contract/test_docs_blocks.py` checks their options.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image, ImageDraw

from support.doc_blocks import Block, pages
from support.doc_commands import commands_of
from support.serve_process import Server

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.timeout(600),  # the first start fetches models
]
ADDRESS = "127.0.0.1:8000"  # after http:// or ws://
QUESTION = "What is the capital of France?"
CHECKED = frozenset({"calibrate", "pull", "serve", "warm-cache"})
"""Subcommands that are checked by their options alone."""
SHIMS = {
    "triptych": f'case "$1" in {"|".join(sorted(CHECKED))}) exit 0;; esac\n'
    f'exec {sys.executable} -m triptych "$@"',
    "python": f'exec {sys.executable} "$@"',
    "pip": "exit 0",
    "pytest": "exit 0",
    "aplay": "head -c 4 | grep -aq RIFF && cat > /dev/null",
}
_IDLE = frozenset({"cd", "export", "pip", "pytest"})
SHAPES = ("apple", "house", "circle", "cat", "a", "b")
ROWS = {
    "prompts.jsonl": ({"prompt": "a red apple"}, {"prompt": "a blue car"}),
    "texts.jsonl": ({"text": "a cat"}, {"text": "a kitten"}),
}
TEXTS = {
    "nouns.txt": "dog\nhouse\n",
    "chapter.txt": "It was late. It rained.\n",
    "person.json": json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}}),
}
_EXPECTED = re.compile(r"# -> (.*)$", re.MULTILINE)


def is_work(block: Block) -> bool:
    if block.language != "sh":
        return block.is_run
    commands = commands_of(block.text) if block.is_run else []
    return any(command[0] not in _IDLE and not is_checked(command) for command in commands)


def is_checked(command: list[str]) -> bool:
    return command[0] == "triptych" and command[1] in CHECKED


PAGES = [name for name, blocks in pages().items() if any(map(is_work, blocks))]


@pytest.fixture(scope="module")
def files(default_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that pages take for granted."""
    folder = tmp_path_factory.mktemp("reader")
    for name in SHAPES:
        image = Image.new("RGB", (128, 128), "white")
        ImageDraw.Draw(image).ellipse((20, 20, 108, 108), fill="red")
        image.save(folder / f"{name}.png")
    mask = Image.new("RGBA", (128, 128), "black")
    mask.paste((0, 0, 0, 0), (40, 40, 80, 80))
    mask.save(folder / "hole.png")
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    spoken = {"model": "triptych-voice", "input": "Good morning.", "response_format": "mp3"}
    talk = default_server.client.post("/v1/audio/speech", json=spoken)
    (folder / "recordings").mkdir()
    for path in ("talk.mp3", "recordings/talk.mp3"):
        (folder / path).write_bytes(talk.content)
    return folder


@pytest.fixture(scope="module")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of commands for the front of PATH."""
    folder = tmp_path_factory.mktemp("bin")
    for name, script in SHIMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


class Reader:
    """Types the blocks of one page, in a folder of their own."""

    def __init__(self, folder: Path, shims: Path, server: Server) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{server.port}"
        self.module = ModuleType("docs_page")
        (folder / ".curlrc").write_text("fail-with-body\n")
        paths = os.pathsep.join((str(shims), os.environ["PATH"]))
        self.environ = os.environ | {
            "PATH": paths,
            "CURL_HOME": str(folder),
            "XDG_RUNTIME_DIR": str(server.log.parent),  # commands find the server there
            "TRIPTYCH_SERVER": "",
        }

    def run(self, block: Block) -> str:
        """Run a block, and return its output."""
        text = block.text.replace(ADDRESS, self.address)
        return self.run_shell(text) if block.language == "sh" else self.run_python(text, str(block))

    def run_shell(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=self.folder,
            env=self.environ,
            input=QUESTION,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        print(done.stderr)
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        return done.stdout

    def run_python(self, text: str, name: str) -> str:
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(text, name, "exec"), vars(self.module))
        return output.getvalue()

    def leave(self) -> None:
        """Close clients, as the end of a reader's script does."""
        for value in vars(self.module).values():
            if hasattr(value, "close") and not isinstance(value, type):
                value.close()


@pytest.fixture
def reader(
    default_server: Server,
    files: Path,
    shims: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Reader]:
    folder = tmp_path / "page"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    found = Reader(folder, shims, default_server)
    monkeypatch.setitem(sys.modules, "docs_page", found.module)  # for the hints of its functions
    yield found
    found.leave()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_in_order(page: str, reader: Reader) -> None:
    output = ""
    for block in pages()[page]:
        if is_work(block):
            output = reader.run(block)
            print(f"-- {block}\n{output}")
            check_comments(block, output)
        elif block.language == "json" and block.reason is None and output.startswith("{"):
            assert differences(json.loads(block.text), json.loads(output)) == [], block
            output = ""


def check_comments(block: Block, output: str) -> None:
    """The text of each comment `# -> text` is printed."""
    for expected in _EXPECTED.findall(block.text):
        assert expected in output, f"{block}: not printed: {expected!r}, but {output!r}"


def differences(shown: Any, given: Any, path: str = "") -> list[str]:
    """Places where JSON differs from the documented one; `...` stands for any end of a text."""
    if isinstance(shown, dict) and isinstance(given, dict) and shown.keys() == given.keys():
        pairs = [(f"{path}.{key}", shown[key], given[key]) for key in shown if key != "created"]
    elif isinstance(shown, list) and isinstance(given, list) and len(shown) == len(given):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(shown, given, strict=True))]
    else:
        return [] if is_same(shown, given) else [f"{path}: {shown!r} is {given!r}"]
    return [found for place, *pair in pairs for found in differences(*pair, place)]


def is_same(shown: Any, given: Any) -> bool:
    if isinstance(shown, str) and shown.endswith("..."):
        return isinstance(given, str) and given.startswith(shown[:-3])
    return (
        bool(pytest.approx(shown, rel=1e-3) == given)
        if isinstance(shown, float)
        else shown == given
    )


def test_a_different_answer_is_found() -> None:
    shown = {"id": "score-...", "created": 1, "data": [{"score": 0.5}, "a"]}
    assert (
        differences(shown, {"id": "score-1", "created": 2, "data": [{"score": 0.50001}, "a"]}) == []
    )
    given = {"id": "rank-1", "created": 2, "data": [{"score": 0.6}, "b"]}
    assert len(differences(shown, given)) == 3
    assert differences({"a": 1}, {"b": 1}) == [": {'a': 1} is {'b': 1}"]
