"""Fields of the OpenAI text API, and common ones of other servers, that are not offered.

Owns their names, the values that ask for nothing (and are let pass), and what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from triptych.core.http.fields import Refused

_TOOLS = "describe the tools in a message and read the calls from the answer's text."
_SCHEMA = "ask for the format in a message and check the answer; free text is what comes."
_TEXT_ONLY = "text is the only output of this route."

COMMON: Mapping[str, Refused] = MappingProxyType(
    {
        "chat_template": Refused("the operator sets it with --chat-template."),
        "guided_choice": Refused(_SCHEMA),
        "guided_grammar": Refused(_SCHEMA),
        "guided_json": Refused(_SCHEMA),
        "guided_regex": Refused(_SCHEMA),
        "include_stop_str_in_output": Refused("a stop string is never shown.", (False,)),
        "length_penalty": Refused("answers are sampled, not searched for.", (1.0,)),
        "logits_processors": Refused("use logit_bias."),
        "response_format": Refused(_SCHEMA, ({"type": "text"},)),
        "skip_special_tokens": Refused("special tokens are never shown.", (True,)),
        "structured_outputs": Refused(_SCHEMA),
        "truncate_prompt_tokens": Refused("shorten the prompt; nothing is cut silently."),
        "use_beam_search": Refused("answers are sampled, not searched for.", (False,)),
    }
)

CHAT: Mapping[str, Refused] = MappingProxyType(
    {
        "audio": Refused(_TEXT_ONLY),
        "continue_final_message": Refused(
            "send the rendered conversation to /v1/completions.", (False,)
        ),
        "echo": Refused("use /v1/completions.", (False,)),
        "function_call": Refused(_TOOLS, ("none", "auto")),
        "functions": Refused(_TOOLS, ([],)),
        "modalities": Refused(_TEXT_ONLY, (["text"],)),
        "moderation": Refused("moderate before and after the call."),
        "prediction": Refused("leave it out; answers are the same without.", ()),
        "prompt_cache_options": Refused("equal prompt beginnings are cached by themselves."),
        "reasoning_effort": Refused("pass it in chat_template_kwargs, if the model has it."),
        "tool_choice": Refused(_TOOLS, ("none", "auto")),
        "tools": Refused(_TOOLS, ([],)),
        "verbosity": Refused("ask for it in a message.", ("medium",)),
        "web_search_options": Refused("search before the call and put the results in a message."),
    }
)

COMPLETION: Mapping[str, Refused] = MappingProxyType(
    {"suffix": Refused("ask a chat model to fill the gap, in words.", ("",))}
)

MESSAGE: Mapping[str, Refused] = MappingProxyType(
    {
        "annotations": Refused("put what matters into content.", ([],)),
        "audio": Refused(_TEXT_ONLY),
        "function_call": Refused(_TOOLS),
        "refusal": Refused("put it into content."),
        "tool_calls": Refused(_TOOLS, ([],)),
    }
)
