"""A conversation on a terminal: its input lines, its commands, its messages.

Owns the commands, such as `/help`. Knows neither where the model runs nor how images are read: a
chat model answers messages, and `open_chat` opens it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from rich.console import Console
from rich.markup import escape

from triptych.core.errors import ConfigError, TriptychError
from triptych.core.process.cli_io import report_write_errors, show

Message: TypeAlias = Mapping[str, Any]


class StreamsChat(Protocol):
    """A chat model of this process or of a server."""

    def stream(self, conversation: Any, **options: Any) -> Iterator[str]:
        """Answer a conversation piece by piece."""


OpenChat = Callable[[argparse.Namespace], AbstractContextManager[StreamsChat]]
QUOTES = '"""'
"""Begins and ends a message of several lines."""


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError("JSON has finite numbers only")
    return number


_SETTINGS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "temperature": _finite,
        "top_p": _finite,
        "max_tokens": int,
        "seed": int,
        "stop": str,
        "adapter": str,
    }
)


def user_message(text: str, images: Sequence[str] = ()) -> Message:
    """Build a user's message with its images."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, str]] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class ChatSession:
    """One conversation with the model that `open_chat` opens for `args`.

    `options` are the call options at its start; `/set` changes them.
    """

    def __init__(
        self, open_chat: OpenChat, args: argparse.Namespace, options: Mapping[str, Any]
    ) -> None:
        self._open_chat = open_chat
        self._args = args
        self._options = dict(options)
        self._system: str = args.system or ""
        self._messages: list[Message] = []
        self._images: list[str] = list(args.image)
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._stack = ExitStack()
        self._chat: StreamsChat | None = None

    def run(self) -> None:
        """Read messages and commands, and answer, until `/bye` or the end of the input."""
        with self._stack:
            self._chat = self._stack.enter_context(self._open_chat(self._args))
            self._note("/help lists the commands, /bye or Ctrl-D leaves.")
            for line in read_messages(self._console):
                command = _find_command(line)
                if command is None:
                    self._ask(line)
                    continue
                if command is _BYE:
                    return
                try:
                    command.run(self, line.partition(" ")[2].strip())
                except TriptychError as error:
                    self._complain(error.message)

    def _ask(self, text: str) -> None:
        """Answer a message; an error leaves the conversation as it was."""
        if self._chat is None:
            return self._complain("No model is open: /model NAME opens one.")
        messages = [*self._messages, user_message(text, self._images)]
        pieces: list[str] = []
        self._images = []  # one that cannot be read must not spoil the next message, too
        try:
            with suppress(KeyboardInterrupt):  # ends the answer, not the conversation
                for piece in self._chat.stream([*self._opening(), *messages], **self._options):
                    pieces.append(piece)
                    show(piece)
        except TriptychError as error:
            return self._complain(f"{error.message} /clear starts over.")
        show("\n")
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return None

    def _opening(self) -> list[Message]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _note(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/]")

    def _complain(self, text: str) -> None:
        self._console.print(f"[red]{escape(text)}[/]")

    def refuse(self, word: str) -> None:
        """Report a command that does not exist."""
        self._complain(f"There is no command {word}: /help lists them.")

    # -- the commands ----------------------------------------------------------------------------

    def help(self, text: str) -> None:
        """List the commands."""
        width = max(len(command.usage) for command in COMMANDS)
        for command in COMMANDS:
            self._note(f"{command.usage:{width}}  {command.summary}")
        self._note(f"{QUOTES:{width}}  Begin and end a message of several lines")
        self._note(f"{'Ctrl-C':{width}}  End an answer, or drop the line that is typed")

    def clear(self, text: str) -> None:
        """Forget the messages; the system prompt and the settings stay."""
        self._messages, self._images = [], []
        self._note("The conversation is cleared.")

    def system(self, text: str) -> None:
        """Set the system prompt, or show it."""
        self._system = text.strip('"') or self._system
        self._note(f"System prompt: {self._system or 'none'}")

    def set(self, text: str) -> None:
        """Change a setting, in this form or in Ollama's (`/set parameter NAME VALUE`)."""
        name, _, value = text.removeprefix("parameter ").strip().partition(" ")
        if name == "system":
            return self.system(value)
        if not name:
            return self.show("")
        if name not in _SETTINGS:
            raise ConfigError(f"There is no setting {name}; there are {', '.join(_SETTINGS)}.")
        try:
            self._options[name] = _SETTINGS[name](value.strip())
        except ValueError as error:
            raise ConfigError(f"{name} needs a number, as in /set temperature 0.7.") from error
        return self._note(f"{name} is {value}.")

    def show(self, text: str) -> None:
        """Show the model, the system prompt, the settings and the length of the conversation."""
        self._note(f"Model: {', '.join(getattr(self._args, 'model', ())) or 'default'}")
        self.system("")
        for name in _SETTINGS:
            self._note(f"{name}: {self._options.get(name, 'default')}")
        self._note(f"Messages: {len(self._messages)}")

    def model(self, text: str) -> None:
        """Continue with another model; if it cannot be opened, with the present one.

        If that is gone as well, the conversation waits for a third one.
        """
        if not text:
            return self.show("")
        others = argparse.Namespace(**{**vars(self._args), "model": [text]})
        self._chat = None
        self._stack.close()  # memory may not hold both
        try:
            self._chat = self._stack.enter_context(self._open_chat(others))
        except TriptychError as error:
            self._complain(error.message)
            self._chat = self._stack.enter_context(self._open_chat(self._args))
            return None
        self._args = others
        return self._note(f"{text} continues the conversation.")

    def image(self, text: str) -> None:
        """Add an image to the next message."""
        if not text:
            raise ConfigError("Name a file, as in /image cat.png.")
        self._images.append(text)
        self._note("The image is sent with the next message.")

    def save(self, text: str) -> None:
        """Write the conversation as JSON, in the form of a request's `messages`."""
        if not text:
            raise ConfigError("Name a file, as in /save chat.json.")
        content = json.dumps([*self._opening(), *self._messages], ensure_ascii=False, indent=2)
        with report_write_errors(text):
            Path(text).expanduser().write_text(content + "\n", encoding="utf-8")
        self._note(f"The conversation is in {text}.")

    def load(self, text: str) -> None:
        """Continue a conversation that `/save` wrote."""
        try:
            messages = json.loads(Path(text).expanduser().read_text(encoding="utf-8"))
            opening = [each for each in messages if each["role"] == "system"]
            self._system = str(opening[0]["content"]) if opening else ""
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{text or 'No file'} holds no saved conversation.") from error
        self._messages = [each for each in messages if each["role"] != "system"]
        self._note(f"{len(self._messages)} messages are loaded.")


class SlashCommand(NamedTuple):
    """A command of a conversation; `names` are its spellings."""

    names: tuple[str, ...]
    usage: str
    summary: str
    run: Callable[[ChatSession, str], None]


_BYE = SlashCommand(("/bye", "/exit", "/quit"), "/bye", "Leave", lambda session, text: None)
COMMANDS = (
    SlashCommand(("/help", "/?"), "/help", "List the commands", ChatSession.help),
    SlashCommand(("/clear", "/reset"), "/clear", "Forget the conversation", ChatSession.clear),
    SlashCommand(("/system",), "/system [TEXT]", "Set the system prompt", ChatSession.system),
    SlashCommand(
        ("/set",), "/set NAME VALUE", f"Change a setting: {', '.join(_SETTINGS)}", ChatSession.set
    ),
    SlashCommand(("/show",), "/show", "Show the model and the settings", ChatSession.show),
    SlashCommand(("/model",), "/model NAME", "Continue with another model", ChatSession.model),
    SlashCommand(
        ("/image",), "/image FILE", "Send an image with the next message", ChatSession.image
    ),
    SlashCommand(("/save",), "/save FILE", "Write the conversation as JSON", ChatSession.save),
    SlashCommand(("/load",), "/load FILE", "Continue a saved conversation", ChatSession.load),
    _BYE,
)
_WORD = re.compile(r"/[a-z?]+")


def _find_command(line: str) -> SlashCommand | None:
    """Return the command of a line; `None` for a message, which may begin with a path."""
    word = line.partition(" ")[0]
    known = next((each for each in COMMANDS if word in each.names), None)
    if known is None and _WORD.fullmatch(word) and not Path(word).exists():
        return SlashCommand((), "", "", lambda session, text: session.refuse(word))
    return known


def read_messages(console: Console) -> Iterator[str]:
    """Yield the messages and commands that are typed, until the end of the input."""
    with suppress(ImportError):  # where there is none, lines have no arrow keys and no history
        import readline  # noqa: F401 - `input` uses it once it is loaded
    while True:
        try:
            message = _read_message()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim]/bye or Ctrl-D leaves.[/]")
            continue
        if message:
            yield message


def _read_message() -> str:
    """Read a line, or the lines between quotes."""
    line = input("you> ").strip()
    if not line.startswith(QUOTES):
        return line
    lines = [line.removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(input("...> "))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip()
