"""`triptych bench` against a small server with scripted answers."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.openai_server import FakeServer, serving
from triptych.cli import main
from triptych.modalities.llm.api.bench.client import BenchServer, RequestRecord, measure
from triptych.modalities.llm.api.bench.load import closed_loop, open_loop

_SMALL = ("--num-requests", "6", "--prompt-tokens", "12", "--output-tokens", "5", "--warmup", "1")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as server:
        yield server


def _bench(*argv: str) -> int:
    return main(["bench", *_SMALL, *argv])


def _written(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_measures_and_writes(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, image = tmp_path / "bench.json", tmp_path / "bench.png"
    argv = ("--url", fake.url, "--repeats", "2", "--concurrency", "3")
    assert _bench(*argv, "--output", str(out), "--plot", str(image)) == 0
    assert "output_tokens_per_s" in capsys.readouterr().out
    assert image.read_bytes().startswith(b"\x89PNG")
    (target,) = _written(out)["targets"]
    assert target["model"] == "tiny"
    assert target["errors"] == {}
    assert len(target["repeats"]) == 2
    for repeat in target["repeats"]:
        assert repeat["output_tokens_mean"] == 5
        assert repeat["prompt_tokens_mean"] == 10
        assert repeat["cached_tokens_mean"] == 4
        assert 0 <= repeat["ttft_p50_s"] <= repeat["e2e_p50_s"]
    # One request to negotiate, one to warm up, two repeats of six.
    assert len(fake.requests) == 1 + 1 + 2 * 6
    assert 1 <= fake.peak <= 3


def test_lengths_follow_the_servers_tokenizer(fake: FakeServer) -> None:
    assert _bench("--url", fake.url + "/v1/", "--repeats", "1") == 0
    prompts = [body["messages"][0]["content"].split() for body in fake.requests[1:]]
    assert {len(words) for words in prompts} == {6}


def test_lengths_are_words_without_a_tokenizer(fake: FakeServer) -> None:
    fake.has_tokenize = False
    assert _bench("--url", fake.url, "--endpoint", "completions", "--repeats", "1") == 0
    assert {len(body["prompt"].split()) for body in fake.requests[1:]} == {12}


@pytest.mark.parametrize(
    "refused", [(), ("ignore_eos",), ("stream_options",), ("stream_options", "ignore_eos")]
)
def test_extra_fields_are_sent_only_where_taken(refused: tuple[str, ...], fake: FakeServer) -> None:
    fake.refused_fields = refused
    assert _bench("--url", fake.url, "--repeats", "1") == 0
    for body in fake.requests[-6:]:
        assert {"stream_options", "ignore_eos"} - set(body) == set(refused)


def test_a_server_may_end_without_done(fake: FakeServer) -> None:
    fake.has_done = False
    assert _bench("--url", fake.url, "--repeats", "1") == 0


def test_extra_body_is_added_and_wins(fake: FakeServer) -> None:
    body = '{"temperature": 0.5, "generation_config": "{}"}'
    assert _bench("--url", fake.url, "--repeats", "1", "--extra-body", body) == 0
    assert fake.requests[-1]["temperature"] == 0.5
    assert fake.requests[-1]["generation_config"] == "{}"


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("429", "HTTP 429"),
        ("cut", "cut stream"),
        ("error", "error event"),
        ("malformed", "malformed stream"),
        ("empty", "empty answer"),
    ],
)
def test_errors_are_counted_and_fail_the_command(
    failure: str,
    kind: str,
    fake: FakeServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.fail_every, fake.failure = 4, failure
    out = tmp_path / "bench.json"
    assert _bench("--url", fake.url, "--repeats", "1", "--output", str(out)) == 1
    (target,) = _written(out)["targets"]
    assert f"server 1: 2 x {kind}" in capsys.readouterr().out
    # Requests 4 and 8 of 8; two of the six measured ones.
    assert target["errors"] == {kind: 2}
    assert target["repeats"][0]["num_errors"] == 2


def test_two_servers_take_turns_and_are_compared(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    with serving(FakeServer()) as other:
        urls = ("--url", fake.url, "--url", other.url, "--label", "ours", "--label", "theirs")
        assert _bench(*urls, "--repeats", "2", "--output", str(out)) == 0
        assert fake.requests == other.requests
    assert "theirs / ours" in capsys.readouterr().out
    ratio = _written(out)["ratios"]["theirs / ours"]["output_tokens_per_s"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]


def test_poisson_arrivals(fake: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert _bench("--url", fake.url, "--repeats", "1", "--rate", "500", "--output", str(out)) == 0
    assert _written(out)["workload"]["load"] == "rate 500/s"
    assert _written(out)["targets"][0]["repeats"][0]["num_errors"] == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--url", "http://127.0.0.1:9"), "does not list its models"),
        (("--url", "127.0.0.1:9"), "http://"),
        (("--output", "/absent/bench.json"), "--output /absent/bench.json: no file"),
        (("--plot", "/absent/bench.png"), "--plot /absent/bench.png: no file"),
        (("--warmup", "-1"), "--warmup must be at least 0"),
        (("--timeout-s", "0"), "--timeout-s above 0"),
        (("--rate", "0"), "--rate must be above 0"),
        (("--rate", "1", "--concurrency", "2"), "not allowed with"),
        (("--shared-prefix-tokens", "12"), "less than --prompt-tokens"),
        (("--concurrency", "0"), "expected a whole number above 0"),
        (("--extra-body", "[]"), "expected a JSON object"),
        (("--url", "http://a", "--url", "http://b", "--label", "x"), "its own --label"),
        (("--url", "http://a", "--model", "x", "--model", "y"), "--model once for each"),
    ],
)
def test_wrong_use_is_explained(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _bench(*argv) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_refuses_everything_is_named(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fail_every = 1
    assert _bench("--url", fake.url) == 2
    assert "server 1: a plain request to /v1/chat/completions fails: HTTP 429" in (
        capsys.readouterr().err
    )


def test_plot_without_matplotlib_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert _bench("--plot", "x.png") == 2
    assert "pip install matplotlib" in capsys.readouterr().err


async def test_a_refused_connection_is_an_error_of_the_sample() -> None:
    target = BenchServer(label="gone", base_url="http://127.0.0.1:9", model="tiny")
    async with httpx.AsyncClient() as client:
        sample = await measure(client, target, "x", max_tokens=1)
    assert sample.error == "connection"


async def test_a_timeout_is_an_error_of_the_sample() -> None:
    def wait(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late", request=request)

    target = BenchServer(label="slow", base_url="http://slow", model="tiny")
    async with httpx.AsyncClient(transport=httpx.MockTransport(wait)) as client:
        sample = await measure(client, target, "x", max_tokens=1)
    assert sample.error == "timeout"


class _Recorder:
    """A `send` that counts how many are in flight."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.num_active = self.peak = 0

    async def __call__(self, prompt: str) -> RequestRecord:
        self.prompts.append(prompt)
        self.num_active += 1
        self.peak = max(self.peak, self.num_active)
        await asyncio.sleep(0)
        self.num_active -= 1
        return RequestRecord(sent_s=0.0, num_output_tokens=1, arrivals_s=[0.0])


async def test_closed_loop_keeps_the_concurrency() -> None:
    send = _Recorder()
    run = await closed_loop(send, list("abcdefghij"), concurrency=4)
    assert send.peak == 4
    assert sorted(send.prompts) == list("abcdefghij")
    assert len(run.samples) == 10


async def test_open_loop_sends_each_prompt_once_in_order() -> None:
    send = _Recorder()
    run = await open_loop(send, list("abcdef"), rate=1e6, seed=0)
    assert send.prompts == list("abcdef")
    assert len(run.samples) == 6
