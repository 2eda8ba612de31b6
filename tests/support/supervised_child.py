"""A child process for the supervisor: does what its configuration names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from triptych.core.transport.control import Beat, ControlLine, Failed, Phase, Ready, StartFacts


def main() -> None:
    line = ControlLine.open()
    config = json.loads(line.read_config())
    behaviour = config["behaviour"]
    drained = threading.Event()
    if behaviour == "fail":
        line.send(Failed("The model is made of cheese."))
        sys.exit(3)
    if behaviour == "starve":
        time.sleep(60)
    if behaviour == "parent":
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(config["pid_file"]).write_text(f"{grandchild.pid}")
    line.on_drain(drained.set)
    line.send(Phase("think"))
    line.send(Beat(config.get("stall_budget_s", 30.0)))
    line.send(Ready())
    if behaviour == "keep":
        line.send(Phase(f"start {config.get('number', 0)}"))
        line.send(StartFacts({"number": config.get("number", 0) + 1}))
    if behaviour in ("crash", "keep"):
        os._exit(7)
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "hang":
        time.sleep(60)
    while not drained.wait(0.05):
        line.send(Beat(config.get("stall_budget_s", 30.0)))
    if behaviour == "stubborn":
        time.sleep(60)


if __name__ == "__main__":
    main()
