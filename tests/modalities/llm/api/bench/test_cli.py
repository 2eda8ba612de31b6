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
    assert "Output tokens per second" in capsys.readouterr().out
    assert image.read_bytes().startswith(b"\x89PNG")
    (target,) = _written(out)["loads"][0]["targets"]
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


@pytest.mark.parametrize("piece", ["reasoning_content", "reasoning"])
def test_reasoning_counts_as_text(piece: str, fake: FakeServer, tmp_path: Path) -> None:
    fake.piece = piece
    out = tmp_path / "bench.json"
    assert _bench("--url", fake.url, "--repeats", "1", "--output", str(out)) == 0
    (repeat,) = _written(out)["loads"][0]["targets"][0]["repeats"]
    assert repeat["num_errors"] == 0
    assert repeat["output_tokens_mean"] == 5


def test_each_server_gets_its_own_key(fake: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    with serving(FakeServer()) as other, serving(FakeServer()) as open_server:
        urls = [f"--url={each.url}" for each in (fake, other, open_server)]
        keys = ("--api-key", "secret", "--api-key", "other", "--api-key", "")
        assert _bench(*urls, *keys, "--repeats", "1", "--output", str(out)) == 0
        assert fake.keys == {"Bearer secret"}
        assert other.keys == {"Bearer other"}
        assert open_server.keys == {None}
    assert "secret" not in out.read_text()


def test_servers_of_one_host_may_share_a_key(fake: FakeServer) -> None:
    with serving(FakeServer()) as other:
        urls = (f"--url={fake.url}", f"--url={other.url}")
        assert _bench(*urls, "--api-key", "secret", "--repeats", "1") == 0
        assert fake.keys == other.keys == {"Bearer secret"}


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
    (target,) = _written(out)["loads"][0]["targets"]
    assert f"tiny, concurrency 1: 2 x {kind}" in capsys.readouterr().out
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
    ratio = _written(out)["loads"][0]["ratios"]["theirs / ours"]["output_tokens_per_s"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]


def test_poisson_arrivals(fake: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert _bench("--url", fake.url, "--repeats", "1", "--rate", "500", "--output", str(out)) == 0
    (load,) = _written(out)["loads"]
    assert load["load"] == "rate 500/s"
    assert load["targets"][0]["repeats"][0]["num_errors"] == 0


def test_a_sweep_has_a_line_for_each_load(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    argv = ("--concurrency", "1,3", "--repeats", "1", "--goodput", "ttft:9000", "itl:0.0001")
    assert _bench("--url", fake.url, *argv, "--output", str(out)) == 0
    shown = capsys.readouterr().out
    assert all(f"concurrency {count}" in shown for count in (1, 3))
    assert "medians of each load" in shown
    written = _written(out)
    assert [load["load"] for load in written["loads"]] == ["concurrency 1", "concurrency 3"]
    assert written["settings"]["concurrency"] == [1, 3]
    assert "url" not in written["settings"]
    figures = written["loads"][0]["targets"][0]["repeats"][0]
    assert (figures["num_requests"], figures["output_tokens"]) == (6, 30)
    assert figures["goodput_share"] == 0.0  # no gap is that short
    assert figures["total_tokens_per_s"] > figures["output_tokens_per_s"]
    prompts = [str(body.get("messages")) for body in fake.requests[2:]]
    assert len(set(prompts)) == 12


def bench_dataset(url: str, path: Path, *argv: str) -> int:
    few = ("--num-requests", "4", "--repeats", "1", "--warmup", "0")
    return main(["bench", "--url", url, *few, "--dataset", str(path), *argv])


def test_prompts_come_from_json_lines(fake: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "b"}]
    path.write_text(
        json.dumps({"prompt": "a"}) + "\n" + json.dumps({"messages": turns, "max_tokens": 3})
    )
    assert bench_dataset(fake.url, path, "--output-tokens", "7") == 0
    asked = [(body["messages"][0]["content"], body["max_tokens"]) for body in fake.requests[1:]]
    assert sorted(asked) == [("a", 7), ("a", 7), ("b", 3), ("b", 3)]
    assert bench_dataset(fake.url, path, "--endpoint", "completions") == 2


def test_prompts_come_from_sharegpt(fake: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "one two three"}]
    path.write_text(json.dumps([{"id": "x", "conversations": turns}, {"conversations": []}]))
    fake.has_tokenize = False
    assert bench_dataset(fake.url, path) == 0
    asked = [(body["messages"][0]["content"], body["max_tokens"]) for body in fake.requests[1:]]
    assert asked == [("hi there", 3)] * 4


@pytest.mark.parametrize("content", ["", "[]", "{", '{"text": "a"}', "[1]"])
def test_a_dataset_without_prompts_is_refused(
    fake: FakeServer, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows"
    path.write_text(content)
    assert bench_dataset(fake.url, path) == 2
    assert "--dataset rows" in capsys.readouterr().err


def test_servers_of_one_model_are_numbered(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeServer()) as other:
        assert _bench("--url", fake.url, "--url", other.url, "--repeats", "1") == 0
    assert "tiny (2) / tiny (1)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--url", "http://127.0.0.1:9"), "does not list its models"),
        (("--url", "127.0.0.1:9"), "http://"),
        (("--output", "/absent/bench.json"), "--output /absent/bench.json: no file"),
        (("--plot", "/absent/bench.png"), "--plot /absent/bench.png: no file"),
        (("--warmup", "-1"), "--warmup must be at least 0"),
        (("--timeout-s", "0"), "--timeout-s above 0"),
        (("--rate", "0"), "must be above 0"),
        (("--rate", "1,x"), "expected numbers"),
        (("--goodput", "ttft"), "--goodput ttft: write ttft, itl, tpot, e2e"),
        (("--goodput", "speed:5"), "--goodput speed:5"),
        (("--dataset", "absent.jsonl"), "--prompt-tokens is for made-up prompts"),
        (("--rate", "1,2", "--plot", "x.png"), "--plot shows one load"),
        (("--rate", "1", "--concurrency", "2"), "not allowed with"),
        (("--shared-prefix-tokens", "12"), "less than --prompt-tokens"),
        (("--concurrency", "0"), "expected a whole number above 0"),
        (("--extra-body", "[]"), "expected a JSON object"),
        (("--url", "http://a", "--url", "http://b", "--label", "x"), "its own --label"),
        (("--url", "http://a", "--url", "http://b", "--api-key", "x"), "the hosts differ"),
        (("--url", "http://a", "--api-key", "x", "--api-key", "y"), "--api-key once for each"),
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
    assert "tiny: a plain request to /v1/chat/completions fails: HTTP 429" in (
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
