"""Fields of the OpenAI text API, and those of vLLM and llama.cpp, that are not offered.

Owns their names, the neutral values (which are accepted) and the alternatives; the ignored fields,
each with the reason; and routes that are not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from triptych.core.http.fields import RefusedField
from triptych.core.http.refused_routes import RefusedRoutes

_TOOLS = "use tools and tool_choice."
_TEXT_ONLY = "text is the only output of this route."
_SAMPLER = "use top_p, top_k or min_p."
_FILL = "ask a chat model to fill the gap."
_REPEATS = "use repetition_penalty, frequency_penalty or presence_penalty."
_ELSEWHERE = "leave it out; the operator sets --pipeline-role."
_PIXELS = "leave it out; the model's files define how images are read."
_DRY = "it belongs to dry_multiplier, which is off"

COMMON: Mapping[str, RefusedField] = MappingProxyType(
    {
        "adaptive_target": RefusedField(_SAMPLER, (-1,)),
        "allowed_token_ids": RefusedField(
            "use structured_outputs, or logit_bias for single tokens.", ([],)
        ),
        "backend_sampling": RefusedField("leave it out; the device samples.", (False,)),
        "bad_words": RefusedField("lower their tokens by logit_bias.", ([],)),
        "cache_salt": RefusedField("send another API key: each has its own cache."),
        "chat_template": RefusedField("the operator sets it with --chat-template."),
        "dry_multiplier": RefusedField(_REPEATS, (0,)),
        "dynatemp_range": RefusedField("use temperature.", (0,)),
        "ec_transfer_params": RefusedField(_ELSEWHERE, ({},)),
        "generation_prompt": RefusedField("use continue_final_message.", ("",)),
        "kv_transfer_params": RefusedField(_ELSEWHERE, ({},)),
        "length_penalty": RefusedField("answers are sampled, not searched for.", (1.0,)),
        "logits_processors": RefusedField("use logit_bias."),
        "logprob_token_ids": RefusedField("ask for more alternatives per token.", ([],)),
        "lora": RefusedField("serve a merged model with --model.", ([],)),
        "media_io_kwargs": RefusedField(_PIXELS, ({},)),
        "min_keep": RefusedField(_SAMPLER, (0,)),
        "mirostat": RefusedField(_SAMPLER, (0,)),
        "mm_payload": RefusedField(_PIXELS),
        "mm_processor_kwargs": RefusedField(_PIXELS, ({},)),
        "n_cmpl": RefusedField("send n.", (1,)),
        "n_indent": RefusedField("use structured_outputs with a grammar.", (0,)),
        "n_predict": RefusedField("send max_tokens.", (-1,)),
        "n_probs": RefusedField("send logprobs.", (0,)),
        "num_ctx": RefusedField(
            "the context is the model's; the operator lowers it with --max-length."
        ),
        "parse_tool_calls": RefusedField("send tool_choice 'none'.", (True,)),
        "post_sampling_probs": RefusedField("read logprobs, which are the model's own.", (False,)),
        "reasoning_budget_message": RefusedField("send thinking_budget."),
        "reasoning_budget_tokens": RefusedField("send thinking_budget.", (-1,)),
        "reasoning_control": RefusedField("send thinking_budget.", (False,)),
        "reasoning_format": RefusedField("reasoning has its own field.", ("auto", "deepseek")),
        "repetition_detection": RefusedField(_REPEATS),
        "response_fields": RefusedField("read the fields that you need.", ([],)),
        "return_mm_kwargs": RefusedField(_PIXELS, (False,)),
        "return_prompt_text": RefusedField("post to /apply-template.", (False,)),
        "return_token_offsets": RefusedField("post to /tokenize with return_token_strs.", (False,)),
        "return_tokens": RefusedField("send return_token_ids.", (False,)),
        "return_weight_versions": RefusedField("see /v1/models.", (False,)),
        "routed_experts_prompt_start": RefusedField("leave it out; experts are not reported."),
        "samplers": RefusedField("set each by its own field; their order is fixed.", ([],)),
        "stream_interval": RefusedField("join chunks in the client.", (1,)),
        "t_max_predict_ms": RefusedField("send max_tokens.", (0, -1)),
        "top_n_sigma": RefusedField(_SAMPLER, (-1, 0)),
        "typical_p": RefusedField(_SAMPLER, (1.0,)),
        "use_beam_search": RefusedField("answers are sampled, not searched for.", (False,)),
        "verbose": RefusedField("post to /apply-template to see a prompt.", (False,)),
        "vllm_xargs": RefusedField("leave it out; it is for plugins of vLLM.", ({},)),
        "watermarking": RefusedField("mark answers after the call.", (False,)),
        "xtc_probability": RefusedField(_SAMPLER, (0,)),
    }
)
"""Fields of OpenAI, vLLM and llama.cpp in chat, completions and responses."""

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "adaptive_decay": "it belongs to adaptive_target, which is off",
        "dry_allowed_length": _DRY,
        "dry_base": _DRY,
        "dry_penalty_last_n": _DRY,
        "dry_sequence_breakers": _DRY,
        "dynatemp_exponent": "it belongs to dynatemp_range, which is off",
        "id_slot": "requests are placed by the scheduler",
        "include_reasoning": "reasoning has its own field, which clients may skip",
        "n_cache_reuse": "equal beginnings of prompts are cached automatically",
        "n_discard": "no part of a prompt is dropped",
        "n_keep": "no part of a prompt is dropped",
        "provider": "this server is the only provider",
        "repeat_last_n": "penalties apply to the whole text",
        "request_id": "the header X-Request-Id sets the id of a request",
        "return_progress": "a prompt's progress is not reported",
        "session_id": "a label, which no answer depends on",
        "spaces_between_special_tokens": "the tokens define the spaces of a text",
        "sse_ping_interval": "the operator sets --heartbeat-s",
        "timings_per_token": "times are in /metrics",
        "xtc_threshold": "it belongs to xtc_probability, which is off",
    }
)

CHAT: Mapping[str, RefusedField] = MappingProxyType(
    {
        "add_special_tokens": RefusedField("the chat template writes them.", (False,)),
        "audio": RefusedField(_TEXT_ONLY),
        "documents": RefusedField("put their texts into a message.", ([],)),
        "function_call": RefusedField(_TOOLS, ("none", "auto")),
        "functions": RefusedField(_TOOLS, ([],)),
        "modalities": RefusedField(_TEXT_ONLY, (["text"],)),
        "parse_special": RefusedField(
            "messages never contain special tokens; use /v1/completions.", (False,)
        ),
        "moderation": RefusedField("moderate before and after the call."),
        "prediction": RefusedField("leave it out; answers are the same without it.", ()),
        "prompt_cache_options": RefusedField("equal prompt beginnings are cached automatically."),
        "truncate_prompt_tokens": RefusedField("leave out messages; conversations are not cut."),
        "truncation_side": RefusedField("it belongs to truncate_prompt_tokens.", ("left", "right")),
        "verbosity": RefusedField("ask for it in a message.", ("medium",)),
        "web_search_options": RefusedField(
            "search before the call and put the results in a message."
        ),
    }
)

_THINKS = "post to /v1/chat/completions, where reasoning has an end."
COMPLETION: Mapping[str, RefusedField] = MappingProxyType(
    {
        "prompt_embeds": RefusedField("send a text or token ids.", ([],)),
        "suffix": RefusedField(_FILL, ("",)),
        "thinking_token_budget": RefusedField(_THINKS),
    }
)

CHOSEN_AWAY: Mapping[str, str] = MappingProxyType({"functions": "function_call"})
"""Fields of chat that are without effect if another field is "none"."""

MESSAGE: Mapping[str, RefusedField] = MappingProxyType(
    {
        "annotations": RefusedField("put their text into content.", ([],)),
        "audio": RefusedField(_TEXT_ONLY),
        "function_call": RefusedField(_TOOLS),
        "refusal": RefusedField("put it into content."),
    }
)

_CHAT_ROUTE = "post to /v1/chat/completions."
_MERGED = "serve a merged model with --model."
_LOADED = "send it a request; the operator sets the served models with --model."
ROUTES: RefusedRoutes = MappingProxyType(
    {
        "/classify": ("POST", "ask a chat model, with structured_outputs.choice."),
        "/cohere/v2/chat": ("POST", _CHAT_ROUTE),
        "/completion": ("POST", "post to /v1/completions."),
        "/embedding": ("POST", "post to /v1/embeddings."),
        "/infill": ("POST", _FILL),
        "/inference/v1/generate": (
            "POST",
            "post token ids to /v1/completions, with return_token_ids.",
        ),
        "/load": ("GET", "see /metrics."),
        "/lora-adapters": ("GET", _MERGED),
        "/pooling": ("POST", "post to /v1/embeddings, /v1/rerank or /v1/score."),
        "/predict": ("POST", "post to /v1/chat/completions or /invocations."),
        "/props": ("GET", "see /v1/models, and /tokenizer_info for the chat template."),
        "/reset_prefix_cache": ("POST", "leave it out; old pages are evicted."),
        "/server_info": ("GET", "see /version, /v1/models and /metrics."),
        "/sleep": ("POST", "the operator sets --idle-unload-s."),
        "/slots": ("GET", "see /readyz, /metrics and /v1/engine/events."),
        "/v1/chat/completions/batch": ("POST", "send a request per conversation, or /v1/batches."),
        "/v1/chat/completions/control": (
            "POST",
            "send thinking_budget, or close the connection.",
        ),
        "/v1/chat/completions/render": ("POST", "post to /apply-template or /tokenize."),
        "/v1/completions/render": ("POST", "post to /tokenize."),
        "/v1/load_lora_adapter": ("POST", _MERGED),
        "/v1/messages/render": ("POST", "post to /apply-template."),
        "/v1/models/load": ("POST", _LOADED),
        "/v1/models/unload": ("POST", "the operator sets --idle-unload-s."),
        "/v1/moderations": ("POST", "nothing is moderated here."),
        "/v1/unload_lora_adapter": ("POST", _MERGED),
        "/v2/chat": ("POST", _CHAT_ROUTE),
        "/wake_up": ("POST", _LOADED),
    }
)
"""Routes of llama.cpp, vLLM, Cohere and OpenAI."""
