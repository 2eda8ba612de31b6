"""What is built when it is first used, by threads that use it together."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import triptych
from triptych.core.process.once import once

SOURCE = Path(triptych.__file__).parent
RACE = """
import sys, threading
import msgspec
from triptych.core.process import typed

sys.setswitchinterval(1e-6)

def race(kind, raw, decode):
    start = threading.Barrier(4)
    def run():
        start.wait()
        decode(raw, kind)
    threads = [threading.Thread(target=run) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

def nested(depth):
    inner = [] if depth == 0 else [(f"inner{n}", nested(depth - 1)) for n in range(3)]
    return msgspec.defstruct(f"Kind{depth}", [*inner, ("numbers", dict[str, int], {})])

def whole(depth):
    return {f"inner{n}": whole(depth - 1) for n in range(3)} if depth else {}

raw = msgspec.json.encode(whole(3))
for n in range(20):
    race(nested(3), raw, {decode})
"""


def sources(*words: str) -> Iterator[tuple[Path, ast.Module]]:
    """The files that have one of the words."""
    for folder in ("core", "modalities", "schedulers", "."):
        files = (SOURCE / folder).glob("*.py") if folder == "." else (SOURCE / folder).rglob("*.py")
        for file in files:
            text = file.read_text()
            if any(word in text for word in words):
                yield file, ast.parse(text)


def race(decode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", RACE.replace("{decode}", decode)],
        capture_output=True,
        check=False,
    )
    return done.returncode


def test_a_type_that_threads_meet_together_is_learned_once() -> None:
    assert race("typed.decode_json") == 0


def test_all_typed_decoding_goes_the_guarded_way() -> None:
    """msgspec alone, met by four threads at once, ends the process now and then."""
    bare = []
    for file, tree in sources("msgspec.convert", "msgspec.toml", ".decode"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("convert", "decode"):
                continue
            called = ast.unparse(node.func)
            has_type = any(word.arg == "type" for word in node.keywords)
            is_decode = called in ("msgspec.json.decode", "msgspec.msgpack.decode")
            if called in ("msgspec.convert", "msgspec.toml.decode") or is_decode:
                is_typed = called == "msgspec.convert" or has_type
                bare += [f"{file.name}:{node.lineno}"] if is_typed else []
    assert {place.partition(":")[0] for place in bare} == {"typed.py"}


def test_loaders_without_arguments_have_a_lock() -> None:
    unlocked = [
        f"{file.name}: {node.name}"
        for file, tree in sources("cache")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if "cache" in ast.unparse(decorator) and not ast.unparse(node.args)
    ]
    assert unlocked == []


def test_threads_that_come_together_get_one_thing_made_once() -> None:
    made: list[object] = []
    start, release = threading.Barrier(8), threading.Event()

    @once
    def thing() -> object:
        release.wait(10)
        made.append(object())
        return made[-1]

    found: list[object] = []

    def ask() -> None:
        start.wait()
        if start.n_waiting == 0:
            release.set()
        found.append(thing())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == made * 8


def test_what_could_not_be_made_is_tried_again() -> None:
    outcomes = iter([OSError("no disk"), "made"])

    @once
    def thing() -> str:
        outcome = next(outcomes)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    with pytest.raises(OSError, match="no disk"):
        thing()
    assert [thing(), thing()] == ["made", "made"]
