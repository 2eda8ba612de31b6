"""Fields of the OpenAI text API, and common ones of other servers, that are not offered.

Owns their names, the values that ask for nothing (and are let pass), and what to do instead; those
that are ignored, each with the reason; and routes that are not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from triptych.core.http.fields import RefusedField
from triptych.core.http.refused_routes import RefusedRoutes

_TOOLS = "use tools and tool_choice."
_TEXT_ONLY = "text is the only output of this route."
_SAMPLER = "use top_p, top_k or min_p."
_FILL = "ask a chat model to fill the gap, in words."

COMMON: Mapping[str, RefusedField] = MappingProxyType(
    {
        "chat_template": RefusedField("the operator sets it with --chat-template."),
        "length_penalty": RefusedField("answers are sampled, not searched for.", (1.0,)),
        "logits_processors": RefusedField("use logit_bias."),
        "mirostat": RefusedField(_SAMPLER, (0,)),
        "num_ctx": RefusedField(
            "the context is the model's; the operator lowers it with --max-length."
        ),
        "typical_p": RefusedField(_SAMPLER, (1.0,)),
        "use_beam_search": RefusedField("answers are sampled, not searched for.", (False,)),
    }
)

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "id_slot": "requests are placed by the scheduler",
        "include_reasoning": "reasoning has a field of their own, which clients may skip",
        "provider": "this server is the only one that answers",
        "repeat_last_n": "penalties count the whole text",
        "return_progress": "a prompt's progress is not reported",
        "timings_per_token": "times are in /metrics",
    }
)

CHAT: Mapping[str, RefusedField] = MappingProxyType(
    {
        "add_special_tokens": RefusedField("the chat template writes them.", (False,)),
        "audio": RefusedField(_TEXT_ONLY),
        "function_call": RefusedField(_TOOLS, ("none", "auto")),
        "functions": RefusedField(_TOOLS, ([],)),
        "modalities": RefusedField(_TEXT_ONLY, (["text"],)),
        "parse_special": RefusedField(
            "what a message spells is never a special token; use /v1/completions.", (False,)
        ),
        "moderation": RefusedField("moderate before and after the call."),
        "prediction": RefusedField("leave it out; answers are the same without.", ()),
        "prompt_cache_options": RefusedField("equal prompt beginnings are cached by themselves."),
        "truncate_prompt_tokens": RefusedField(
            "leave out messages; a conversation that is cut is none."
        ),
        "verbosity": RefusedField("ask for it in a message.", ("medium",)),
        "web_search_options": RefusedField(
            "search before the call and put the results in a message."
        ),
    }
)

COMPLETION: Mapping[str, RefusedField] = MappingProxyType({"suffix": RefusedField(_FILL, ("",))})

CHOSEN_AWAY: Mapping[str, str] = MappingProxyType({"functions": "function_call"})
"""Fields of chat that ask for nothing where another field says "none"."""

MESSAGE: Mapping[str, RefusedField] = MappingProxyType(
    {
        "annotations": RefusedField("put what matters into content.", ([],)),
        "audio": RefusedField(_TEXT_ONLY),
        "function_call": RefusedField(_TOOLS),
        "refusal": RefusedField("put it into content."),
    }
)

ROUTES: RefusedRoutes = MappingProxyType(
    {
        "/completion": ("POST", "post to /v1/completions."),
        "/embedding": ("POST", "post to /v1/embeddings."),
        "/infill": ("POST", _FILL),
        "/lora-adapters": ("GET", "serve a merged model with --model."),
        "/props": ("GET", "see /v1/models, and /tokenizer_info for the chat template."),
        "/slots": ("GET", "see /readyz, /metrics and /v1/engine/events."),
        "/v1/moderations": ("POST", "nothing is moderated here."),
    }
)
"""Routes of llama.cpp and OpenAI."""
