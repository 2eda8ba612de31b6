"""Where a command runs: on a named server, on a server of the user, or in its process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.full_app import open_full_app
from support.http import READY, FakeEngine, live, make_app
from triptych.core.client import choice
from triptych.core.client.choice import (
    RemoteModel,
    Wanted,
    add_server_options,
    choose_server,
    connect,
    open_model,
    open_server,
    served_names,
)
from triptych.core.client.connection import Connection, normalized_url
from triptych.core.client.records import ServerRecord, recorded
from triptych.core.errors import ConfigError, EngineDown, InvalidRequest, Unauthorized, UnknownModel
from triptych.core.options.table import add_options

CHAT = Wanted(
    task="chat",
    default="tiny",
    pipeline=f"{__name__}:LocalChat",
    remote="triptych.core.client.choice:RemoteModel",
)
KEY = "secret"


class LocalChat:
    """The pipeline of this process."""

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> str:
        return "here"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live(open_full_app(tmp_path_factory.mktemp("open")).app) as server:
        yield server.url


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a key."""
    app = open_full_app(tmp_path_factory.mktemp("locked"), api_key=(KEY,)).app
    with live(app) as server:
        yield server.url


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TRIPTYCH_SERVER")


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    add_options(parser, sections=("models", "device"))
    return parser.parse_args(argv)


def chosen(*argv: str) -> RemoteModel | None:
    return choose_server(parsed(*argv), CHAT)


def used(*argv: str) -> tuple[str, str]:
    """The model and the server that are used."""
    found = chosen(*argv)
    assert found is not None
    with found:
        return found.name, found.connection.url


def test_without_a_server_the_model_runs_here() -> None:
    assert chosen() is None
    assert open_model(parsed(), CHAT) == "here"
    assert served_names(parsed()) == []


def test_a_server_of_the_user_is_used_and_named(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded(url):
        for argv in ((), ("--model", "tiny"), ("--model", "embedded")):
            assert used(*argv) == ("tiny", url)
        assert (
            capsys.readouterr().err.splitlines()
            == [f"tiny of the server at {url} is used; --no-server forbids it."] * 3
        )
        assert "paint" in served_names(parsed())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--no-server",), ""),
        (("--threads", "2"), ""),
        (("--model", "paint"), "is not used. It has no paint."),
        (("--model", "x=tiny"), "is not used. It has no x=tiny."),
    ],
)
def test_otherwise_the_model_runs_here(
    url: str, argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded(url):
        assert chosen(*argv) is None
        assert choose_server(parsed(), CHAT, only_here="This") is None
    assert said in capsys.readouterr().err


def test_images_need_a_model_that_takes_them(url: str) -> None:
    wanted = Wanted(task="chat", default="", pipeline="", remote="", has_images=True)
    with pytest.raises(UnknownModel):
        choose_server(parsed("--server", url), wanted)


def test_a_server_that_does_not_answer_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    with recorded("http://127.0.0.1:9"):
        assert chosen() is None
    assert "is not used. No connection to the server at http" in (said := capsys.readouterr().err)
    assert "Connection refused" in said


def test_a_server_that_is_not_ready_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loading = FakeEngine(state=replace(READY, is_ready=False, reason="weights load"))
    with live(make_app(tmp_path, loading)) as server, recorded(server.url):
        assert chosen() is None
    assert "status 503: weights load." in capsys.readouterr().err


def test_keys(
    locked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded(locked):
        assert chosen() is None
        assert "needs a key (--server-key)" in capsys.readouterr().err
        monkeypatch.setenv("TRIPTYCH_SERVER_KEY", KEY)
        assert chosen() is None
        assert used("--server", locked)
        monkeypatch.delenv("TRIPTYCH_SERVER_KEY")
        with monkeypatch.context() as patch:
            patch.setenv("TRIPTYCH_API_KEY", KEY)
            assert used()
    assert used("--server", locked, "--server-key", KEY)
    with pytest.raises(Unauthorized):
        chosen("--server", locked)


def sent(address: str) -> str | None:
    """The key that is sent to a server with `--server`."""
    with connect(address, parsed("--server", address)) as connection:
        header = connection._http.headers.get("authorization")
    return header and header.removeprefix("Bearer ")


def test_the_keys_of_ones_own_server_stay_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEY", f"{KEY},other")
    assert sent("http://localhost:8000") == sent("[::1]:8000") == KEY
    assert sent("http://gpu.example") is None


def test_the_key_of_a_server_is_not_sent_to_others_in_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRIPTYCH_SERVER_KEY", KEY)
    monkeypatch.setenv("TRIPTYCH_SERVER", "http://gpu.example:8000")
    for address in ("gpu.example:8000/v1", "https://a.example", "localhost:8000"):
        assert sent(address) == KEY
    assert sent("http://gpu.example:9000") is sent("http://a.example") is None
    with connect("http://gpu.example:8000", parsed()) as connection:
        assert connection._http.headers["authorization"] == f"Bearer {KEY}"


def test_commands_about_a_server_send_the_key_of_its_admin(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEY", KEY)
    monkeypatch.setenv("TRIPTYCH_ADMIN_KEY", "admin")
    for argv in ((), ("--server", url)):
        with recorded(url), open_server(parsed(*argv)) as connection:
            assert connection._http.headers["authorization"] == "Bearer admin"


def test_commands_about_a_server_take_no_choice_and_names_come_from_all(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(make_app(tmp_path / "app", FakeEngine())) as other:
        records = [
            ServerRecord(url=each, host="h", pid=1, started_s=1.0)
            for each in (other.url, "http://127.0.0.1:9", url)
        ]
        monkeypatch.setattr(choice, "running_servers", lambda: records)
        with (
            pytest.raises(ConfigError, match="Several servers of yours run"),
            open_server(parsed()),
        ):
            pass
        assert "paint" in served_names(parsed())


@pytest.mark.parametrize("source", ["variable", "file"])
def test_options_of_all_sources_count(
    url: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(**options: str) -> tuple[str, ...]:
        if source == "file":
            path = tmp_path / "mine.yaml"
            path.write_text("".join(f"{name}: {value}\n" for name, value in options.items()))
            return ("--config-file", str(path))
        for name in ("model", "seed", "threads", "teacache"):
            monkeypatch.delenv(f"TRIPTYCH_{name.upper()}", raising=False)
        for name, value in options.items():
            monkeypatch.setenv(f"TRIPTYCH_{name.upper()}", value)
        return ()

    with recorded(url):
        assert chosen(*given(model="Qwen/X")) is None
        assert used(*given(model="tiny", teacache="true")) == ("tiny", url)
        assert chosen(*given(threads="2")) is None
        seeded = chosen(*given(seed="7"))
        assert seeded is not None
        with seeded:
            assert seeded.seed == 7
    origin = r"threads \(file mine.yaml\)" if source == "file" else "TRIPTYCH_THREADS"
    with pytest.raises(ConfigError, match=f"{origin} needs a model in this process"):
        chosen(*given(threads="2"), "--server", url)


def test_of_several_models_the_first_that_the_server_has_is_used(url: str) -> None:
    assert used("--server", url, "--model", "paint", "--model", "tiny") == ("tiny", url)


def test_a_named_server_is_used_or_the_reason_is_an_error(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert used("--server", f"{url}/v1/") == ("tiny", url)
    monkeypatch.setenv("TRIPTYCH_SERVER", url)
    assert used() == ("tiny", url)
    assert capsys.readouterr().err == ""
    with pytest.raises(UnknownModel, match=r"'paint' here\. Chat models: tiny"):
        chosen("--model", "paint")
    with pytest.raises(ConfigError, match=r"--threads needs .*: leave it or TRIPTYCH_SERVER out"):
        chosen("--threads", "2")
    with pytest.raises(ConfigError, match="This needs a model in this process"):
        choose_server(parsed(), CHAT, only_here="This")
    with pytest.raises(EngineDown, match=r"No connection to the server at .*refused"):
        chosen("--server", "http://127.0.0.1:9")


def test_errors_of_a_server_are_those_of_this_process(url: str) -> None:
    with Connection(url) as connection:
        with pytest.raises(InvalidRequest, match="messages is required"):
            connection.post("/v1/chat/completions", {"model": "tiny", "colour": 1})
        with pytest.raises(InvalidRequest):
            list(connection.events("/v1/chat/completions", {"model": "tiny", "stream": True}))
        with pytest.raises(ConfigError, match="does not answer as a Triptych server"):
            connection.get("/metrics")


def test_fields_that_a_server_ignores_are_logged(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "id_slot": 1}
    with Connection(url) as connection:
        connection.post("/v1/chat/completions", body)
    assert "without effect here: id_slot" in caplog.messages


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("https://a.example/x/", "https://a.example/x"),
        ("http://h/v1", "http://h"),
    ],
)
def test_addresses(given: str, base: str) -> None:
    assert normalized_url(given) == base


@pytest.mark.parametrize(
    "given", ["ftp://a", "http://", "://", "http://h:abc", "http://[::1", "http://h:99999"]
)
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match="give a URL"):
        normalized_url(given)
