"""`triptych serve` as a process tree, with a fake engine unless the real one is asked for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
from safetensors.numpy import save_file

from support.text_models import write_text_folder
from triptych import cli, serve

TESTS = Path(__file__).parents[1]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def write_model(folder: Path) -> Path:
    """A folder that resolves and names an architecture; its weights are missing."""
    write_text_folder(folder, **LLAMA)
    save_file({"weight": np.zeros((1,), np.float32)}, folder / "model.safetensors")
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait until `condition` holds, and return what it returned."""
    give_up_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up_s, "waited in vain"
        time.sleep(0.02)
    return found


class Server:
    """A running `triptych serve`, with the options of `$LIVE_SERVER_OPTIONS` beside its own."""

    def __init__(self, *arguments: str, log: Path, port: int = 0, engine: str = "fake") -> None:
        self.port = port or free_port()
        self.log = log
        self._log_file = log.open("wb")
        argv = [sys.executable, "-m", __name__, engine, "--port", str(self.port), *arguments]
        argv += os.environ.get("LIVE_SERVER_OPTIONS", "").split()
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]  # what is tested here
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(argv, stderr=self._log_file, stdout=self._log_file, env=env)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.signal()  # twice: at once, but leaving nothing behind
            self.signal(signal.SIGINT)
        self.process.wait(60)
        self._log_file.close()
        print(self.output)  # shown where a test fails

    @property
    def output(self) -> str:
        return self.log.read_text()

    def openai(self) -> openai.OpenAI:
        """A client of it that tries once. To be closed."""
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def health(self) -> dict[str, Any]:
        """What `/readyz` says; an empty dict while there is no answer, or a proxy's own."""
        try:
            return dict(self.client.get("/readyz").json())
        except (httpx.TransportError, ValueError):
            return {}

    def wait_ready(self, num_restarts: int = 0) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.output
            health = self.health()
            return health.get("status") == "ok" and health["num_restarts"] == num_restarts

        eventually(is_ready, timeout_s=300.0)  # the first start fetches models

    def wait_exit(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def child(self, name: str) -> psutil.Process:
        """The child whose command line holds `name`."""
        return next(child for child in self.children() if name in " ".join(child.cmdline()))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def halves(self) -> list[psutil.Process]:
        """The API process and the engine process, as far as they are this server's."""
        return psutil.Process(self.process.pid).children()

    def body(self, prompt: str = "hello", max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        return {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **more,
        }

    def chat(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=self.body(**body))

    def stream(self, **body: Any) -> Stream:
        return Stream(self, self.body(stream=True, **body))


class Stream:
    """A streaming request that has begun: its first token is there."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self._context = server.client.stream("POST", "/v1/chat/completions", json=body)
        response = self._context.__enter__()
        assert response.status_code == 200
        self._lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(self._lines)
        next(self._lines)

    def rest(self) -> list[str]:
        """What is still to come, to the end."""
        events = [line.removeprefix("data: ") for line in self._lines]
        self._context.__exit__(None, None, None)
        return events


def main() -> None:
    """Run the real command with the programs named by the first argument."""
    engine, *arguments = sys.argv[1:]
    if engine == "fake":
        program = (sys.executable, "-m", "support.fake_engine_process")
        serve.serve = partial(serve.serve, programs=serve.Programs(engine=program))
    sys.exit(cli.main(["serve", *arguments]))


if __name__ == "__main__":
    main()
