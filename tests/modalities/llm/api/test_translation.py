"""What other APIs than OpenAI's share."""

from __future__ import annotations

import pytest
from fastapi.exceptions import RequestValidationError

from triptych.core.errors import InvalidRequest, UnknownModel
from triptych.core.http.errors import to_public
from triptych.modalities.llm.api.anthropic.conversation import chat_names
from triptych.modalities.llm.api.anthropic.protocol import MessagesRequest
from triptych.modalities.llm.api.generation import chat_request
from triptych.modalities.llm.api.ollama.conversation import CHAT_NAMES, GENERATE_NAMES
from triptych.modalities.llm.api.translation import parse_arguments, rename_errors

ASKED = [{"role": "user", "content": "hi"}]
ANTHROPIC = chat_names(
    MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": ASKED})
)


@pytest.mark.parametrize(
    ("names", "error", "message", "param"),
    [
        (ANTHROPIC, InvalidRequest("continue_final_message needs text.", param="messages"),
         "messages needs text.", "messages"),
        (ANTHROPIC, InvalidRequest("No.", param="tools[3].function.parameters.x"),
         "No.", "tools[3].input_schema"),
        (ANTHROPIC, InvalidRequest("No.", param="response_format.json_schema"),
         "No.", "output_config.format"),
        (ANTHROPIC, InvalidRequest("my_messages, tools.", param="tools"),
         "my_messages, tools.", "tools"),
        (CHAT_NAMES, InvalidRequest("messages[3].content ends.", param="messages[3].content"),
         "messages ends.", "messages"),
        (CHAT_NAMES, InvalidRequest("No.", param="reasoning_effort"), "No.", "think"),
        (GENERATE_NAMES, InvalidRequest("No.", param="messages"), "No.", "prompt"),
    ],
)  # fmt: skip
def test_errors_name_what_the_caller_sent(
    names: dict[str, str], error: InvalidRequest, message: str, param: str
) -> None:
    with pytest.raises(InvalidRequest) as found, rename_errors(names):
        raise error
    assert (found.value.message, found.value.param) == (message, param)


def test_errors_of_chat_bodies_are_renamed() -> None:
    call = {"id": "a", "function": {"name": "b", "arguments": "x" * (4 * 2**20 + 1)}}
    turn = {"role": "assistant", "tool_calls": [call]}
    with pytest.raises(InvalidRequest, match=r"^messages: ") as error, rename_errors(ANTHROPIC):
        chat_request({"model": "m", "messages": [*ASKED, turn]})
    assert error.value.param == "messages"
    assert isinstance(error.value.__cause__, RequestValidationError)
    assert to_public(error.value) is error.value


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(UnknownModel), rename_errors(ANTHROPIC):
        raise UnknownModel.among(["a"], "b")


@pytest.mark.parametrize(
    ("text", "found"), [("", {}), ('{"a": 1, "b": [2', {"a": 1, "b": [2]}), ("[1]", {})]
)
def test_arguments_that_broke_off(text: str, found: dict[str, object]) -> None:
    assert parse_arguments(text) == found
