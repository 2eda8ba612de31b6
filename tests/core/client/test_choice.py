"""Where a command runs: on a named server, on a server of the user, or in its process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.full_app import open_full_app
from support.http import live
from triptych.core.client.choice import (
    RemoteModel,
    Wanted,
    add_server_options,
    choose_server,
    connect,
    open_model,
    served_names,
)
from triptych.core.client.connection import Connection, normalized_url
from triptych.core.client.records import recorded
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
        (("--model", "paint"), "has no paint; it is not used"),
        (("--model", "x=tiny"), "has no x=tiny; it is not used"),
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
    assert "is not ready; it is not used" in capsys.readouterr().err


def test_keys(
    locked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded(locked):
        assert chosen() is None
        assert "needs a key (--server-key)" in capsys.readouterr().err
        for variable in ("TRIPTYCH_SERVER_KEY", "TRIPTYCH_API_KEY"):
            with monkeypatch.context() as patch:
                patch.setenv(variable, KEY)
                assert used()
    assert used("--server", locked, "--server-key", KEY)
    with pytest.raises(Unauthorized):
        chosen("--server", locked)


def test_the_keys_of_ones_own_server_stay_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEY", f"{KEY},other")

    def sent(address: str) -> str | None:
        with connect(address, parsed()) as connection:
            return connection._http.headers.get("authorization")

    assert sent("http://localhost:8000") == sent("[::1]:8000") == f"Bearer {KEY}"
    assert sent("http://gpu.example") is None
    monkeypatch.setenv("TRIPTYCH_SERVER_KEY", "given")
    assert sent("http://gpu.example") == "Bearer given"


def test_a_named_server_is_used_or_the_reason_is_an_error(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert used("--server", f"{url}/v1/") == ("tiny", url)
    monkeypatch.setenv("TRIPTYCH_SERVER", url)
    assert used() == ("tiny", url)
    assert capsys.readouterr().err == ""
    with pytest.raises(UnknownModel, match=r"'paint' here\. Chat models: tiny"):
        chosen("--model", "paint")
    with pytest.raises(ConfigError, match="--threads needs a model in this process"):
        chosen("--threads", "2")
    with pytest.raises(ConfigError, match="This needs a model in this process"):
        choose_server(parsed(), CHAT, only_here="This")
    with pytest.raises(EngineDown, match="There is no server at"):
        chosen("--server", "http://127.0.0.1:9")


def test_errors_of_a_server_are_those_of_this_process(url: str) -> None:
    with Connection(url) as connection:
        with pytest.raises(InvalidRequest, match="messages is required"):
            connection.post("/v1/chat/completions", {"model": "tiny", "colour": 1})
        with pytest.raises(InvalidRequest):
            list(connection.events("/v1/chat/completions", {"model": "tiny", "stream": True}))
        with pytest.raises(ConfigError, match="does not answer as a Triptych server"):
            connection.get("/metrics")


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


@pytest.mark.parametrize("given", ["ftp://a", "http://", "://"])
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match="give a URL"):
        normalized_url(given)
