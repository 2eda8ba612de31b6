"""`triptych serve --replicas 2` on Ray, asked by the `openai` package, killed and upgraded.

The other modules of this folder run through the ingress, too:

    LIVE_SERVER_OPTIONS="--replicas 2 --threads 1" pytest tests/live/test_chat.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import psutil
import pytest

from support.engine_events import following, next_of
from support.serve_process import Server, eventually

pytest.importorskip("ray", reason="needs `pip install '.[ray]'`")

MODEL = "smollm2-135m-instruct"
OPTIONS = ("--model", MODEL, "--replicas", "2", "--threads", "1", "--max-length", "8192")
DRAIN_S = 5
LONG = "It was a dark and stormy night. " * 40

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("live") / "log"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_TMPDIR", "/tmp/ray_live")  # Ray's sockets allow no long paths
        options = (*OPTIONS, "--drain-timeout-s", str(DRAIN_S))
        with Server(*options, engine="real", log=log) as running:
            eventually(lambda: is_complete(running), timeout_s=300)
            yield running
            running.signal()
            assert running.wait_exit(120) == 0


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as connection:
        yield connection


def is_complete(server: Server) -> bool:
    assert server.process.poll() is None, server.output
    health = server.health()
    return bool(health.get("is_ready")) and health["num_replicas"] == 2


def engines(server: Server) -> list[psutil.Process]:
    found = []
    for child in server.children():
        try:
            found += [child] if "ServeReplica:triptych:engine" in " ".join(child.cmdline()) else []
        except psutil.Error:
            continue
    return found


def ask(client: openai.OpenAI, text: str, **more: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, **more
    )  # type: ignore[call-overload,no-any-return]


def test_a_request_is_explained_by_the_one_id_of_its_response(
    server: Server, client: openai.OpenAI
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=8,
    )
    (request_id,) = answer.headers.get_list("x-request-id")
    found = server.client.get(f"/v1/engine/explain/{request_id}").json()
    (job,) = found["jobs"]
    assert (job["state"], len(job["replicas"])) == ("finished", 1)
    assert [stage["stage"] for stage in job["stages"]] == ["prefill", "decode"]
    assert sum(job["seconds"].values()) == pytest.approx(job["length_s"], abs=1e-4)


def test_one_address_for_all(server: Server, client: openai.OpenAI) -> None:
    assert len(engines(server)) == 2
    assert [card.id for card in client.models.list().data] == [MODEL]
    assert ask(client, "What is the capital of France?").choices[0].message.content
    metrics = server.client.get("/metrics").text
    assert "triptych_replicas_ready 2.0" in metrics
    lines = [line for line in metrics.splitlines() if line.startswith("triptych_kv_pages{")]
    assert len({line.split('replica="')[1] for line in lines}) == 2


def test_streams_pass_and_a_prefix_finds_its_replica(client: openai.OpenAI) -> None:
    def cached(number: int) -> int:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"{LONG}{number}"}],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = next(chunk.usage for chunk in stream if chunk.usage)
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    found = [cached(number) for number in range(4)]
    assert min(found[1:]) >= 256, "each went where the first one was"


def test_events_report_every_step_of_an_answer(server: Server, client: openai.OpenAI) -> None:
    with following(f"http://127.0.0.1:{server.port}") as events:
        next_of(events, "started")
        ask(client, "Count to ten.", extra_body={"ignore_eos": True})
        rows = {"prefill": 0, "decode": 0}
        while sum(rows.values()) < 8:
            for step in next_of(events, "steps")["steps"]:
                rows[step["kind"]] += step["num_rows"]
    assert rows == {"prefill": 1, "decode": 7}


def test_what_is_kept_is_kept_by_the_ingress(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    file = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
    assert client.files.content(file.id).content == b"{}\n"


def test_errors_are_typed(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.code == "model_not_found"
    headers = {"content-type": "application/json"}
    broken = server.client.post("/v1/chat/completions", content=b"{", headers=headers)
    assert broken.status_code == 400


def test_an_upgrade_keeps_answering(server: Server, client: openai.OpenAI) -> None:
    before = {each.pid for each in engines(server)}
    argv = [sys.executable, "-m", "triptych", "serve", "--port", str(server.port), *OPTIONS]
    argv += ["--drain-timeout-s", str(DRAIN_S), "--max-batch-size", "4"]
    argv += ["--ray-address", "auto"]  # no other cluster may run here
    environ = os.environ | {"RAY_TMPDIR": "/tmp/ray_live"}
    long = server.stream(model=MODEL, max_tokens=8000)
    upgrading = subprocess.Popen(argv, env=environ)
    try:
        while upgrading.poll() is None:
            assert ask(client, "Count to three.").choices
    finally:
        assert upgrading.wait(120) == 0
    assert "error" in json.loads(long.rest()[-1]), "what takes too long ends with an error"
    eventually(lambda: not before & {each.pid for each in engines(server)}, timeout_s=60)
    assert ask(client, "Count to three.").choices


def test_a_replica_that_is_killed_is_replaced(server: Server, client: openai.OpenAI) -> None:
    eventually(lambda: is_complete(server), timeout_s=60)
    victim = engines(server)[0]
    os.kill(victim.pid, signal.SIGKILL)
    for number in range(8):
        assert ask(client, f"Hello {number}.").choices, "what had not begun goes to the other"
    eventually(lambda: len(engines(server)) == 2 and is_complete(server), timeout_s=120)
