"""Try every client against a running server, each in its own environment, and print a table.

Start the server of docs/clients.md, then:

    python samples/clients/run.py --environments ~/clients            # all of them
    python samples/clients/run.py --environments ~/clients langchain  # those of this name

An environment has the packages in the script's first lines, as `uv run` and `pipx run` read them.
Node's clients are installed next to their scripts.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
NODE = HERE / "node"
METADATA = re.compile(r"^# /// script$(?P<lines>.*?)^# ///$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"(?P<verdict>works|small|fails) (?P<check>\S+) ")
CLIENT = re.compile(r"client (?P<name>\S+) (?P<version>\S+)")
TIMEOUT_S = 900


@dataclass
class Outcome:
    """The results in a script's output."""

    client: str
    version: str = ""
    checks: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, script: Path, output: str) -> Outcome:
        """Read a script's output."""
        outcome = cls(script.name)
        for line in output.splitlines():
            if match := CLIENT.match(line):
                outcome.client, outcome.version = match["name"], match["version"]
            elif match := LINE.match(line):
                outcome.checks.setdefault(match["verdict"], []).append(match["check"])
        return outcome

    @property
    def row(self) -> str:
        """A row of the table."""
        lists = (", ".join(self.checks.get(name, ())) for name in ("works", "small", "fails"))
        return f"| {self.client} | {self.version} | " + " | ".join(lists) + " |"


def scripts_of(names: Sequence[str]) -> list[Path]:
    """The scripts of these clients, or of all."""
    found = sorted([*HERE.glob("with_*.py"), *NODE.glob("with_*.mjs")])
    return [each for each in found if not names or each.stem.removeprefix("with_") in names]


def requirements_of(script: Path) -> list[str]:
    """The packages named in the script's first lines."""
    match = METADATA.search(script.read_text())
    assert match is not None, f"{script.name} names no packages"
    lines = (line.removeprefix("#").removeprefix(" ") for line in match["lines"].splitlines())
    return [str(each) for each in tomllib.loads("\n".join(lines))["dependencies"]]


def python_of(script: Path, environments: Path) -> Path:
    """The interpreter of the script's environment, which is created if necessary."""
    folder = environments / script.stem
    python = folder / "bin" / "python"
    wanted = requirements_of(script)
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text().split() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        stamp.write_text("\n".join(wanted))
    return python


def command_of(script: Path, environments: Path) -> list[str]:
    """The command that runs the script."""
    if script.suffix == ".py":
        return [str(python_of(script, environments)), str(script)]
    if not (NODE / "node_modules").exists():
        subprocess.run(["npm", "install", "--silent"], cwd=NODE, check=True)
    return ["node", str(script)]


def try_client(script: Path, environments: Path, arguments: Sequence[str]) -> Outcome:
    """Run a script to its end; its lines are shown."""
    command = [*command_of(script, environments), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    print(done.stdout, end="", file=sys.stderr)
    if done.returncode and "fails " not in done.stdout:
        print(done.stderr, file=sys.stderr)
        return Outcome(script.name, checks={"fails": ["the script"]})
    return Outcome.of(script, done.stdout)


def main() -> None:
    """Try the named clients, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("client", nargs="*", help="as in with_CLIENT; default: all")
    parser.add_argument("--environments", type=Path, required=True, help="a folder for them")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    arguments = parser.parse_args()
    passed_on = ("--url", arguments.url, "--model", arguments.model)
    outcomes = [
        try_client(script, arguments.environments, passed_on)
        for script in scripts_of(arguments.client)
    ]
    print("| client | version | works | the model is too small | fails |")
    print("| --- | --- | --- | --- | --- |")
    for outcome in outcomes:
        print(outcome.row)
    sys.exit(any("fails" in outcome.checks for outcome in outcomes))


if __name__ == "__main__":
    main()
