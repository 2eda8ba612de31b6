# /// script
# dependencies = ["pydantic==2.14.4"]
# ///
"""OpenAI's Codex through `npx`: an answer, its continuation, a schema, a command.

`CONFIG` is the configuration that a user writes to ~/.codex/config.toml. A first prompt has some
8,600 tokens of instructions and tools; later prompts find them in the cache.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any

from checks import Server, run_checks, said
from tasks import QUESTION, Answer

PACKAGE = "@openai/codex@0.171.0"
CODEX = ("npx", "--yes", PACKAGE, "exec")
CONFIG = """
model = "{model}"
model_provider = "triptych"

[model_providers.triptych]
name = "Triptych"
base_url = "{url}"
env_key = "TRIPTYCH_API_KEY"
wire_api = "responses"
"""
TIMEOUT_S = 240
"""Codex sets no `max_tokens`, and a small model may repeat itself until its context is full."""
SECRET = "marzipan"


@cache
def home() -> tempfile.TemporaryDirectory[str]:
    """The folder of Codex and its sessions; prompts name it, and with one they are cached."""
    return tempfile.TemporaryDirectory()


def run(server: Server, *arguments: str) -> list[dict[str, Any]]:
    """Run `codex exec` and return the items of its events, at most for `TIMEOUT_S`."""
    folder = Path(home().name)
    config = CONFIG.format(model=server.model, url=server.v1)
    (folder / "config.toml").write_text(config, encoding="utf-8")
    environment = {**os.environ, "CODEX_HOME": str(folder), "TRIPTYCH_API_KEY": server.key}
    with subprocess.Popen(
        (*CODEX, *arguments[:-1], "--json", "--skip-git-repo-check", arguments[-1]),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        timer = Timer(TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))  # of npx and Codex
        timer.start()
        events = [json.loads(line) for line in process.stdout or () if line.endswith("\n")]
        timer.cancel()
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(str(events[-1:]))
    return [event["item"] for event in events if "item" in event]


def text_of(items: Sequence[dict[str, Any]]) -> str:
    """The text of the last answer."""
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    return str(texts[-1]) if texts else ""


def answer(server: Server) -> str:
    """Ask for one answer."""
    return said(text_of(run(server, QUESTION)), "Paris")


def resume(server: Server) -> str:
    """Ask again in the same session."""
    items = run(server, "resume", "--last", "And what is the capital of Italy?")
    return said(text_of(items), "Rome")


def output_schema(server: Server) -> str:
    """An answer that follows a schema."""
    schema = Path(home().name, "schema.json")
    schema.write_text(json.dumps(Answer.model_json_schema() | {"additionalProperties": False}))
    items = run(server, "--output-schema", str(schema), QUESTION)
    return said(Answer.model_validate_json(text_of(items)).answer, "Paris")


def command(server: Server) -> str:
    """Let the model run a command in Codex's sandbox."""
    Path(home().name, "notes.txt").write_text(f"The secret word is {SECRET}.\n")
    items = run(server, "--sandbox", "read-only", "Run the shell command: cat notes.txt")
    outputs = [item["aggregated_output"] for item in items if item["type"] == "command_execution"]
    return said("".join(outputs), SECRET)


def main() -> None:
    """Run the checks."""
    name, _, release = PACKAGE.rpartition("@")
    run_checks(name, answer, resume, output_schema, command, release=release)


if __name__ == "__main__":
    main()
