"""The commands of a shell block, and checks of them that run nothing.

`triptych` commands are parsed and their options resolved; extras, scripts, their flags and make's
targets are looked up in the repository.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.doc_blocks import ROOT
from triptych.cli import COMMANDS
from triptych.core.options.table import parse, resolve

_HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?(.*?)\n.*?\n\1(?=\n)", re.DOTALL)
_COMMENT = re.compile(r"(^|(?<=\s))#[^\n]*", re.MULTILINE)
_ASSIGNMENT = re.compile(r"\w+=")
_EXTRAS = re.compile(r"\.\[(.*)\]")
_ENDS = frozenset({"|", "||", "&", "&&", ";", "\n"})


def commands_of(script: str) -> list[list[str]]:
    """Each command's words, without comments, redirections and variables set before it."""
    text = _HEREDOC.sub(r"\2", script.replace("\\\n", " "))
    lexer = shlex.shlex(_COMMENT.sub("", text), posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    is_redirected = False
    for word in lexer:
        if word in _ENDS or not word.strip():
            commands.append([])
        elif word in ("<", ">", ">>"):
            is_redirected = True
        elif is_redirected:
            is_redirected = False
        elif commands[-1] or not _ASSIGNMENT.match(word):
            commands[-1].append(word)
    return [command for command in commands if command]


def check(script: str) -> None:
    """Check every command of a script; raises AssertionError or ConfigError."""
    folder = ROOT
    for program, *words in commands_of(script):
        if program == "cd":
            folder = folder / words[0] if (folder / words[0]).is_dir() else folder
        elif program == "triptych":
            check_triptych(words)
        elif program == "pip":
            _check_pip(words)
        elif program == "make":
            assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text("utf-8"), words[0]
        elif program in ("python", "pytest", "uv") or "/" in program:
            _check_script(folder, [program, *words])


def check_triptych(words: list[str]) -> None:
    """The command exists and takes these options with these values."""
    name, *argv = words
    command = next((command for command in COMMANDS if command.name == name), None)
    assert command is not None, f"triptych {name}: there is no such command"
    resolve(parse(command.parser(), argv), environ={})


def _check_pip(words: list[str]) -> None:
    for word in words:
        assert not word.startswith("triptych"), f"{word}: on no index, install from a clone"
        if extras := _EXTRAS.fullmatch(word):
            unknown = set(extras[1].split(",")) - _extras()
            assert not unknown, f"extras that pyproject.toml does not have: {unknown}"


@cache
def _extras() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return frozenset(project["optional-dependencies"])


def _check_script(folder: Path, words: list[str]) -> None:
    """The file or module is there, and the code next to it declares each long flag."""
    if "-m" in words and words[words.index("-m") + 1].startswith("triptych."):
        module = words[words.index("-m") + 1]
        path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
    else:
        path = next(_paths_in(folder, words), folder)
    if path == folder:
        return
    assert path.exists(), path
    if path.suffix == ".py" and words[0] != "pytest":
        code = "".join(file.read_text("utf-8") for file in path.parent.rglob("*.py"))
        for word in words:
            if word.startswith("--"):
                assert f'"{word.partition("=")[0]}"' in code, f"{path.name} has no {word}"


def _paths_in(folder: Path, words: list[str]) -> Iterator[Path]:
    for word in words:
        if word.endswith((".py", ".sh")) and not word.startswith("-"):
            yield folder / word
