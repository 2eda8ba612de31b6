"""Blocks of README and docs that need no server: each one parses, each command exists.

`tests/live/test_docs_blocks.py` runs those that are not marked.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import triptych
from support.doc_blocks import REASONS, ROOT, RUN, Block, all_blocks, pages
from support.doc_commands import check, check_triptych, commands_of
from triptych.core.errors import ConfigError

TEXT = frozenset({"", "ini", "mermaid", "nginx", "text"})
DATA = frozenset({"json", "toml", "yaml"})
OTHERS_YAML = frozenset({"apiVersion", "services", "scrape_configs", "groups"})
"""Keys of files that are not Triptych's: Kubernetes', Compose's, Prometheus'."""
BLOCKS = all_blocks()


def blocks_in(*languages: str) -> list[Block]:
    found = [block for block in BLOCKS if block.language in languages]
    assert found
    return found


def test_marks_name_a_reason_and_stand_before_a_block() -> None:
    for page, blocks in pages().items():
        reasons = [block.reason for block in blocks if block.reason is not None]
        assert set(reasons) <= REASONS.keys(), page
        text = (ROOT / page).read_text("utf-8")
        assert text.count("\n<!-- not run") == len(reasons), f"{page}: a mark without a block"


def test_every_mark_is_needed() -> None:
    """Each reason is used, and only blocks that would be run or parsed have one."""
    marked = [block for block in BLOCKS if block.reason is not None]
    assert {block.reason for block in marked} == REASONS.keys()
    assert [str(block) for block in marked if block.language not in RUN | DATA] == []


def test_every_language_is_known() -> None:
    assert {block.language for block in BLOCKS} <= RUN | DATA | TEXT


def test_blocks_without_a_language_hold_no_commands() -> None:
    command = re.compile(r"^\$? *(triptych [a-z]|pip |python |curl )", re.MULTILINE)
    assert [str(block) for block in blocks_in("") if command.search(block.text)] == []


@pytest.mark.parametrize("block", blocks_in("sh"), ids=str)
def test_commands_exist_and_take_their_options(block: Block) -> None:
    check(block.text)


def test_a_command_that_does_not_exist_is_found() -> None:
    wrong = (
        "triptych serve --max-lenght 4",
        "cat x | triptych sing -o y",
        "pip install 'triptych[ray]'",
        "pip install '.[rays]'",
        "make tests",
        "python samples/missing.py",
        "python samples/vision.py --missing",
    )
    for script in wrong:
        with pytest.raises((AssertionError, ConfigError)):
            check(f"{script}\n")


def test_commands_are_split_as_a_shell_does() -> None:
    script = "A=b cat > x <<'END'\ntriptych\nEND\necho 'a | b' \\\n  c | jq # it's\ncd d && ls\n"
    assert commands_of(script) == [["cat"], ["echo", "a | b", "c"], ["jq"], ["cd", "d"], ["ls"]]


@pytest.mark.parametrize("block", blocks_in("python"), ids=str)
def test_python_parses_and_imports_what_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module == "triptych":
            assert {alias.name for alias in node.names} <= set(triptych.__all__)


@pytest.mark.parametrize("block", blocks_in(*DATA), ids=str)
def test_data_parses(block: Block, tmp_path: Path) -> None:
    if block.reason == "excerpt":
        return
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        tomllib.loads(block.text)
    else:
        documents = list(yaml.safe_load_all(block.text))
        if not OTHERS_YAML.intersection(*documents):
            (tmp_path / "config.yaml").write_text(block.text)
            check_triptych(["config", "--config-file", str(tmp_path / "config.yaml")])
