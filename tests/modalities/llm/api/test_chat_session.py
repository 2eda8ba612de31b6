"""The commands of a conversation, and messages of several lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from triptych.core.errors import ConfigError, EngineDown
from triptych.modalities.llm.api.chat_session import COMMANDS, ChatSession


class Echo:
    """Remembers what it is asked, and answers "ok"."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Any], dict[str, Any]]] = []
        self.models: list[Sequence[str]] = []

    def stream(self, conversation: Any, **options: Any) -> Iterator[str]:
        self.asked.append((list(conversation), options))
        if conversation[-1]["content"] == "boom":
            raise EngineDown("It is gone.")
        yield "ok"

    @contextmanager
    def open(self, args: argparse.Namespace) -> Iterator[Echo]:
        if args.model == ["missing"]:
            raise ConfigError("There is none.")
        if args.model == ["once"] and args.model in self.models:
            raise EngineDown("It is gone.")
        self.models.append(args.model)
        yield self


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def converse(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(*lines: str | BaseException) -> None:
        typed = iter([*lines, EOFError()])

        def read(prompt: str) -> str:
            line = next(typed)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        args = argparse.Namespace(model=["first"], system="", image=[])
        ChatSession(echo.open, args, {"max_tokens": 5}).run()

    return run


def asked(echo: Echo) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages, _ in echo.asked]


def test_help_lists_all_commands(
    converse: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    converse("/help")
    shown = capsys.readouterr().err
    assert all(command.usage in shown for command in COMMANDS)
    assert '"""' in shown


@pytest.mark.parametrize("leave", ["/bye", "/exit", "/quit"])
def test_leaving(converse: Callable[..., None], echo: Echo, leave: str) -> None:
    converse(leave, "never")
    assert echo.asked == []


def test_messages_of_several_lines(converse: Callable[..., None], echo: Echo) -> None:
    converse('"""one', "two", 'three"""', '"""four"""', '"""', "five", '"""')
    assert asked(echo)[-1] == ["one\ntwo\nthree", "ok", "four", "ok", "five"]


def test_control_c_drops_the_line_and_not_the_chat(
    converse: Callable[..., None], echo: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(KeyboardInterrupt(), "hello")
    assert asked(echo) == [["hello"]]
    assert "/bye or Ctrl-D leaves" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["/clear", "/reset"])
def test_clear_forgets_messages_and_keeps_the_system_prompt(
    converse: Callable[..., None], echo: Echo, word: str
) -> None:
    converse("/system be brief", "one", word, "two")
    assert asked(echo) == [["be brief", "one"], ["be brief", "two"]]


def test_settings(
    converse: Callable[..., None], echo: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    converse("/set temperature 0.5", "/set parameter seed 7", '/set system "hm"', "a", "/show")
    assert echo.asked[0][1] == {"max_tokens": 5, "temperature": 0.5, "seed": 7}
    assert asked(echo)[0][0] == "hm"
    shown = capsys.readouterr().err
    assert all(line in shown for line in ("Model: first", "temperature: 0.5", "Messages: 2"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set heat 5", "There is no setting heat"),
        ("/set temperature hot", "temperature needs a number"),
        ("/set temperature nan", "temperature needs a number"),
        ("/set top_p -inf", "top_p needs a number"),
        ("/heip", "There is no command /heip: /help lists them"),
        ("/image", "Name a file"),
        ("/save", "Name a file"),
        ("/load nowhere.json", "nowhere.json holds no saved conversation"),
        ("/model missing", "There is none."),
        ("boom", "It is gone. /clear starts over."),
    ],
)
def test_a_mistake_ends_nothing(
    converse: Callable[..., None],
    echo: Echo,
    capsys: pytest.CaptureFixture[str],
    line: str,
    said: str,
) -> None:
    converse(line, "hello")
    assert said in capsys.readouterr().err
    assert asked(echo)[-1] == ["hello"]


def test_a_message_may_begin_with_a_path(converse: Callable[..., None], echo: Echo) -> None:
    converse("/etc/hosts is what?", "/tmp is what?")
    assert asked(echo)[-1] == ["/etc/hosts is what?", "ok", "/tmp is what?"]


def test_another_model_continues(converse: Callable[..., None], echo: Echo) -> None:
    converse("one", "/model second", "two", "/model missing", "three")
    assert echo.models == [["first"], ["second"], ["second"]]
    assert asked(echo)[-1] == ["one", "ok", "two", "ok", "three"]


def test_a_conversation_outlives_its_model(
    converse: Callable[..., None], echo: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    converse("/model once", "one", "/model missing", "lost", "/model second", "two")
    shown = capsys.readouterr().err
    for said in ("There is none.", "It is gone.", "No model is open: /model NAME opens one."):
        assert shown.count(said) == 1
    assert asked(echo) == [["one"], ["one", "ok", "two"]]


def test_a_conversation_is_saved_and_loaded(
    converse: Callable[..., None], echo: Echo, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    converse("/system be brief", "one", f"/save {path}", "/clear", f"/load {path}", "two")
    assert [each["role"] for each in json.loads(path.read_text())] == [
        "system",
        "user",
        "assistant",
    ]
    assert asked(echo)[-1] == ["be brief", "one", "ok", "two"]


def test_an_image_goes_with_the_next_message_alone(
    converse: Callable[..., None], echo: Echo
) -> None:
    converse("/image cat.png", "look", "and now?")
    first, second = (messages[-1]["content"] for messages, _ in echo.asked)
    assert [part["type"] for part in first] == ["image", "text"]
    assert second == "and now?"
