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
_SAMPLER = "use top_p, top_k or min_p."

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
        "mirostat": Refused(_SAMPLER, (0,)),
        "num_ctx": Refused("the context is the model's; the operator lowers it with --max-length."),
        "prompt_logprobs": Refused("use /v1/completions with echo and logprobs."),
        "provider": Refused("nobody but this server answers; leave it out.", ({},)),
        "response_format": Refused(_SCHEMA, ({"type": "text"},)),
        "return_token_ids": Refused("send the text to /tokenize.", (False,)),
        "skip_special_tokens": Refused("special tokens are never shown.", (True,)),
        "structured_outputs": Refused(_SCHEMA),
        "truncate_prompt_tokens": Refused("shorten the prompt; nothing is cut silently."),
        "typical_p": Refused(_SAMPLER, (1.0,)),
        "use_beam_search": Refused("answers are sampled, not searched for.", (False,)),
    }
)

CHAT: Mapping[str, Refused] = MappingProxyType(
    {
        "add_special_tokens": Refused("the chat template writes them.", (False,)),
        "audio": Refused(_TEXT_ONLY),
        "echo": Refused("use /v1/completions.", (False,)),
        "function_call": Refused(_TOOLS, ("none", "auto")),
        "functions": Refused(_TOOLS, ([],)),
        "modalities": Refused(_TEXT_ONLY, (["text"],)),
        "parse_special": Refused(
            "what a message spells is never a special token; use /v1/completions.", (False,)
        ),
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

CHOSEN_AWAY: Mapping[str, str] = MappingProxyType(
    {"tools": "tool_choice", "functions": "function_call"}
)
"""Fields of chat that ask for nothing where another field says "none"."""

MESSAGE: Mapping[str, Refused] = MappingProxyType(
    {
        "annotations": Refused("put what matters into content.", ([],)),
        "audio": Refused(_TEXT_ONLY),
        "function_call": Refused(_TOOLS),
        "refusal": Refused("put it into content."),
        "tool_calls": Refused(_TOOLS, ([],)),
    }
)
