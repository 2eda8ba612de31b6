# /// script
# dependencies = ["langchain==1.4.7", "langchain-openai==1.7.3", "openai-agents==0.24.0"]
# ///
"""Transcripts of five questions to an agent with two tools, through LangChain and OpenAI's SDK.

    triptych serve --model qwen2.5-coder-0.5b
    uv run samples/clients/agent_transcripts.py --output docs/agents.md

Replaces the text after the mark in the file. The exit status is 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import with_openai_agents as openai_agents
from agents import (
    MessageOutputItem,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    set_tracing_disabled,
)
from checks import Server
from langchain.messages import AIMessage, ToolMessage
from tasks import QUESTIONS
from with_langchain import calling_agent

MARK = "<!-- made by samples/clients/agent_transcripts.py -->\n"


def with_langchain(server: Server, question: str) -> Iterator[str]:
    """The steps of LangChain's agent, line by line; the last line is its answer."""
    asked = {"messages": [{"role": "user", "content": question}]}
    for message in calling_agent(server).invoke(asked)["messages"]:
        if isinstance(message, AIMessage):
            for call in message.tool_calls:
                yield called(call["name"], json.dumps(call["args"]))
            if message.text:
                yield message.text
        elif isinstance(message, ToolMessage):
            yield returned(message.text)


def with_openai_agents(server: Server, question: str) -> Iterator[str]:
    """The same with OpenAI's SDK, on chat completions."""
    for item in Runner.run_sync(openai_agents.calling_agent(server), question).new_items:
        if isinstance(item, ToolCallItem):
            yield called(item.raw_item.name, item.raw_item.arguments)
        elif isinstance(item, ToolCallOutputItem):
            yield returned(str(item.output))
        elif isinstance(item, MessageOutputItem):
            yield "".join(part.text for part in item.raw_item.content)


def called(name: str, arguments: str) -> str:
    """A line for a call."""
    return f"`{name}({arguments})`"


def returned(text: str) -> str:
    """A line for its result."""
    return f"→ `{text}`"


FRAMEWORKS: dict[str, Callable[[Server, str], Iterator[str]]] = {
    "langchain": with_langchain,
    "openai-agents": with_openai_agents,
}


def transcripts(server: Server) -> Iterator[tuple[str, bool]]:
    """Lines of Markdown, and whether all answers are right."""
    for package, ask in FRAMEWORKS.items():
        yield f"\n### {package} {version(package)}\n", True
        for question, expected in QUESTIONS.items():
            lines = list(ask(server, question))
            is_right = len(lines) > 1 and expected in lines[-1].replace(",", "")
            verdict = "" if is_right else f" (wrong: {expected} was expected)"
            yield f"**{question}**\n\n" + "".join(f"- {one_line(line)}\n" for line in lines), True
            yield verdict, is_right


def one_line(text: str) -> str:
    """Text of several lines as one."""
    return " ".join(text.split())


def main() -> None:
    """Ask all questions, and write the transcripts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--output", type=Path, help="a file with the mark; default: print")
    arguments = parser.parse_args()
    set_tracing_disabled(True)
    lines = list(transcripts(Server(arguments.url, arguments.model, "none")))
    text = "\n".join(line for line, _ in lines if line)
    if arguments.output:
        before = arguments.output.read_text().partition(MARK)[0]
        arguments.output.write_text(before + MARK + text)
    else:
        print(text)
    sys.exit(not all(is_well for _, is_well in lines))


if __name__ == "__main__":
    main()
