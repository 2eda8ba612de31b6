# /// script
# dependencies = ["openai[realtime]==3.57.0"]
# ///
"""OpenAI's Python package: chat, tools, structured output, the Responses and Realtime APIs."""

from __future__ import annotations

import json
from typing import Any

from checks import Server, run_checks, said
from openai import OpenAI
from tasks import (
    INSTRUCTIONS,
    MAX_TOKENS,
    PERSON_TEXT,
    PRICE_FUNCTION,
    PRICE_QUESTION,
    QUESTION,
    Person,
    look_up_price,
)

OPTIONS: Any = {"temperature": 0, "max_tokens": MAX_TOKENS}
RESPONSE_OPTIONS: Any = {"temperature": 0, "max_output_tokens": MAX_TOKENS}
FUNCTION: Any = {**PRICE_FUNCTION, "strict": True}


def client_of(server: Server) -> OpenAI:
    """A client for the server."""
    return OpenAI(base_url=server.v1, api_key=server.key)


def chat(server: Server) -> str:
    """Ask for one answer."""
    reply = client_of(server).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": QUESTION}],
        **OPTIONS,
    )
    return said(reply.choices[0].message.content, "Paris")


def stream(server: Server) -> str:
    """An answer as it is written, through the helper of the package."""
    with client_of(server).chat.completions.stream(
        model=server.model,
        messages=[{"role": "user", "content": QUESTION}],
        **OPTIONS,
        stream_options={"include_usage": True},
    ) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert final.choices[0].message.content == text
    assert final.usage is not None
    return said(text, "Paris")


def tools(server: Server) -> str:
    """A call that is required, its result, and an answer."""
    client = client_of(server)
    asked: dict[str, Any] = {"model": server.model, **OPTIONS}
    asked["tools"] = [{"type": "function", "function": FUNCTION}]
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": PRICE_QUESTION},
    ]
    reply = client.chat.completions.create(messages=messages, tool_choice="required", **asked)
    message = reply.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        content = look_up_price(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    answer = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
    return said(answer.choices[0].message.content, "24.9")


def streamed_tools(server: Server) -> str:
    """A call as its arguments are written."""
    with client_of(server).chat.completions.stream(
        model=server.model,
        messages=[{"role": "user", "content": PRICE_QUESTION}],
        tools=[{"type": "function", "function": FUNCTION}],
        tool_choice="required",
        **OPTIONS,
    ) as events:
        names = {event.type for event in events}
        (choice,) = events.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in names
    (call,) = choice.message.tool_calls or ()
    return said(json.loads(call.function.arguments)["item"], "lamp")


def parse(server: Server) -> str:
    """An answer of a type."""
    reply = client_of(server).chat.completions.parse(
        model=server.model,
        messages=[{"role": "user", "content": PERSON_TEXT}],
        response_format=Person,
        **OPTIONS,
    )
    return said(repr(reply.choices[0].message.parsed), "age=36")


def json_object(server: Server) -> str:
    """Any JSON object."""
    reply = client_of(server).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": PERSON_TEXT}],
        response_format={"type": "json_object"},
        **OPTIONS,
    )
    return said(json.dumps(json.loads(reply.choices[0].message.content or "")), "36")


def responses(server: Server) -> str:
    """The Responses API, and a second turn that names the first."""
    client = client_of(server)
    first = client.responses.create(model=server.model, input=QUESTION, **RESPONSE_OPTIONS)
    said(first.output_text, "Paris")
    second = client.responses.create(
        model=server.model,
        input="In which country is that city?",
        previous_response_id=first.id,
        **RESPONSE_OPTIONS,
    )
    return said(second.output_text, "France")


def responses_stream(server: Server) -> str:
    """Its typed events."""
    with client_of(server).responses.stream(
        model=server.model, input=QUESTION, **RESPONSE_OPTIONS
    ) as events:
        text = "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        assert events.get_final_response().output_text == text
    return said(text, "Paris")


def responses_tools(server: Server) -> str:
    """A call and its result."""
    client = client_of(server)
    asked: dict[str, Any] = {
        "model": server.model,
        "temperature": 0,
        "max_output_tokens": MAX_TOKENS,
    }
    asked["tools"] = [{"type": "function", **FUNCTION}]
    first = client.responses.create(
        instructions=INSTRUCTIONS, input=PRICE_QUESTION, tool_choice="required", **asked
    )
    results: list[Any] = [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": look_up_price(**json.loads(item.arguments)),
        }
        for item in first.output
        if item.type == "function_call"
    ]
    answer = client.responses.create(
        instructions=INSTRUCTIONS,
        input=results,
        previous_response_id=first.id,
        tool_choice="none",
        **asked,
    )
    return said(answer.output_text, "24.9")


def responses_parse(server: Server) -> str:
    """An answer of a type."""
    reply = client_of(server).responses.parse(
        model=server.model,
        input=PERSON_TEXT,
        text_format=Person,
        **RESPONSE_OPTIONS,
    )
    return said(repr(reply.output_parsed), "age=36")


def realtime(server: Server) -> str:
    """A spoken answer. The server needs a speech model, too."""
    transcript, num_bytes = "", 0
    content: Any = [{"type": "input_text", "text": QUESTION}]
    with client_of(server).realtime.connect(model=server.model) as talk:
        talk.session.update(session={"type": "realtime", "max_output_tokens": MAX_TOKENS})
        item: Any = {"type": "message", "role": "user", "content": content}
        talk.conversation.item.create(item=item)
        talk.response.create()
        for event in talk:
            if event.type == "response.output_audio.delta":
                num_bytes += len(event.delta)
            elif event.type == "response.output_audio_transcript.done":
                transcript = event.transcript
            elif event.type in ("response.done", "error"):
                break
    assert num_bytes, "there is no sound"
    return said(transcript, "Paris")


def main() -> None:
    """Try each function."""
    run_checks(
        "openai",
        *(chat, stream, tools, streamed_tools, parse, json_object),
        *(responses, responses_stream, responses_tools, responses_parse, realtime),
    )


if __name__ == "__main__":
    main()
