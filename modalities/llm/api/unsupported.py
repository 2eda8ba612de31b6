"""Fields of the OpenAI text API and of other servers' that are not offered.

Owns their names, the neutral values (which are accepted) and the alternatives; the ignored fields,
each with the reason; and routes that are not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from triptych.core.http.fields import RefusedField, RefusedValue
from triptych.core.http.refused_routes import RefusedRoutes

_TOOLS = "use tools and tool_choice."
_SAMPLER = "use top_p, top_k or min_p."
_REPEATS = "use repetition_penalty, frequency_penalty or presence_penalty."
_ELSEWHERE = "leave it out; the operator sets --pipeline-role."
_PIXELS = "leave it out; the model's files define how images are read."
_DRY = "it belongs to dry_multiplier, which is off"
_CHOSEN = "leave it out; the router chooses a replica."
_CACHES = "send another API key: each has its own cache."
_EXPERTS = "leave it out; experts are not reported."
_NAMED = "send the name of an adapter as model, or as lora_path."
_OWN_ID = "the header X-Request-Id sets the id of a request"
_DRAFTED = "drafts of tokens leave an answer as it is"
_ONE_MODEL = "send model; no other model answers."

COMMON: Mapping[str, RefusedField] = MappingProxyType(
    {
        "adaptive_target": RefusedField(_SAMPLER, (-1,)),
        "allowed_token_ids": RefusedField(
            "use structured_outputs, or logit_bias for single tokens.", ([],)
        ),
        "backend_sampling": RefusedField("leave it out; the device samples.", (False,)),
        "bad_words": RefusedField("lower their tokens by logit_bias.", ([],)),
        "bootstrap_host": RefusedField(_ELSEWHERE),
        "bootstrap_port": RefusedField(_ELSEWHERE),
        "bootstrap_room": RefusedField(_ELSEWHERE),
        "cache_salt": RefusedField(_CACHES),
        "chat_template": RefusedField("the operator sets it with --chat-template."),
        "custom_logit_processor": RefusedField("use logit_bias."),
        "custom_params": RefusedField("they belong to custom_logit_processor.", ({},)),
        "data_parallel_rank": RefusedField(_CHOSEN),
        "disagg_prefill_dp_rank": RefusedField(_CHOSEN),
        "dry_multiplier": RefusedField(_REPEATS, (0,)),
        "dynatemp_range": RefusedField("use temperature.", (0,)),
        "ec_transfer_params": RefusedField(_ELSEWHERE, ({},)),
        "extra_key": RefusedField(_CACHES),
        "generation_prompt": RefusedField("use continue_final_message.", ("",)),
        "images_config": RefusedField(_PIXELS, ({},)),
        "kv_transfer_params": RefusedField(_ELSEWHERE, ({},)),
        "length_penalty": RefusedField("answers are sampled, not searched for.", (1.0,)),
        "logits_processors": RefusedField("use logit_bias."),
        "logprob_token_ids": RefusedField("ask for more alternatives per token.", ([],)),
        "lora": RefusedField(_NAMED, ([],)),
        "media_io_kwargs": RefusedField(_PIXELS, ({},)),
        "min_keep": RefusedField(_SAMPLER, (0,)),
        "mirostat": RefusedField(_SAMPLER, (0,)),
        "mm_payload": RefusedField(_PIXELS),
        "mm_processor_kwargs": RefusedField(_PIXELS, ({},)),
        "models": RefusedField(_ONE_MODEL, ([],)),
        "n_cmpl": RefusedField("send n.", (1,)),
        "n_indent": RefusedField("use structured_outputs with a grammar.", (0,)),
        "n_predict": RefusedField("send max_tokens.", (-1,)),
        "n_probs": RefusedField("send logprobs.", (0,)),
        "no_stop_trim": RefusedField("send include_stop_str_in_output.", (False,)),
        "num_ctx": RefusedField(
            "the context is the model's; the operator lowers it with --max-length."
        ),
        "parse_tool_calls": RefusedField("send tool_choice 'none'.", (True,)),
        "plugins": RefusedField("run them in the client.", ([],)),
        "post_sampling_probs": RefusedField("read logprobs, which are the model's own.", (False,)),
        "reasoning_budget_message": RefusedField("send thinking_budget."),
        "reasoning_budget_tokens": RefusedField("send thinking_budget.", (-1,)),
        "reasoning_control": RefusedField("send thinking_budget.", (False,)),
        "reasoning_format": RefusedField("reasoning has its own field.", ("auto", "deepseek")),
        "repetition_detection": RefusedField(_REPEATS),
        "response_fields": RefusedField("read the fields that you need.", ([],)),
        "return_cached_tokens_details": RefusedField("see cached_tokens in usage.", (False,)),
        "return_hidden_states": RefusedField("post to /v1/embeddings.", (False,)),
        "return_mm_kwargs": RefusedField(_PIXELS, (False,)),
        "return_prompt_text": RefusedField("post to /apply-template.", (False,)),
        "return_routed_experts": RefusedField(_EXPERTS, (False,)),
        "return_token_offsets": RefusedField("post to /tokenize with return_token_strs.", (False,)),
        "return_tokens": RefusedField("send return_token_ids.", (False,)),
        "return_weight_versions": RefusedField("see /v1/models.", (False,)),
        "route": RefusedField(_ONE_MODEL),
        "routed_dp_rank": RefusedField(_CHOSEN),
        "routed_experts_prompt_start": RefusedField(_EXPERTS),
        "routed_experts_start_len": RefusedField(_EXPERTS, (0,)),
        "samplers": RefusedField("set each by its own field; their order is fixed.", ([],)),
        "session_params": RefusedField("send the whole conversation.", ({},)),
        "stop_regex": RefusedField("use stop, or structured_outputs.regex.", ("", [])),
        "stream_interval": RefusedField("join chunks in the client.", (1,)),
        "t_max_predict_ms": RefusedField("send max_tokens.", (0, -1)),
        "top_a": RefusedField(_SAMPLER, (0,)),
        "top_n_sigma": RefusedField(_SAMPLER, (-1, 0)),
        "transforms": RefusedField("shorten the prompt; nothing is cut silently.", ([],)),
        "typical_p": RefusedField(_SAMPLER, (1.0,)),
        "use_beam_search": RefusedField("answers are sampled, not searched for.", (False,)),
        "verbose": RefusedField("post to /apply-template to see a prompt.", (False,)),
        "vllm_xargs": RefusedField("leave it out; it is for plugins of vLLM.", ({},)),
        "watermarking": RefusedField("mark answers after the call.", (False,)),
        "xtc_probability": RefusedField(_SAMPLER, (0,)),
    }
)
"""Fields of OpenAI, vLLM, SGLang, llama.cpp and OpenRouter in chat, completions and responses."""

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "adaptive_decay": "it belongs to adaptive_target, which is off",
        "custom_labels": "a label, which no answer depends on",
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
        "ngram_corpus_id": _DRAFTED,
        "provider": "this server is the only provider",
        "repeat_last_n": "penalties apply to the whole text",
        "request_id": _OWN_ID,
        "return_progress": "a prompt's progress is not reported",
        "rid": _OWN_ID,
        "session_id": "a label, which no answer depends on",
        "spaces_between_special_tokens": "the tokens define the spaces of a text",
        "sse_ping_interval": "the operator sets --heartbeat-s",
        "timings_per_token": "times are in /metrics",
        "xtc_threshold": "it belongs to xtc_probability, which is off",
    }
)

REFUSED_VALUES: Mapping[str, RefusedValue] = MappingProxyType(
    {
        "include_reasoning": RefusedValue(
            False, "leave it out, and skip the reasoning, which has its own field."
        ),
        "repeat_last_n": RefusedValue(0, "send repetition_penalty 1 and no other penalty."),
    }
)
"""Values of ignored fields that would change an answer."""

_KEPT = "a label that clients store with a message"
IGNORED_IN_MESSAGE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("created_at", "createdAt", "id", "metadata", "timestamp"), _KEPT)
)
"""Fields of messages in chat, also in Ollama's."""

CHAT: Mapping[str, RefusedField] = MappingProxyType(
    {
        "add_special_tokens": RefusedField("the chat template writes them.", (False,)),
        "documents": RefusedField("put their texts into a message.", ([],)),
        "function_call": RefusedField(_TOOLS, ("none", "auto")),
        "functions": RefusedField(_TOOLS, ([],)),
        "input_ids": RefusedField("post token ids to /v1/completions.", ([],)),
        "max_dynamic_patch": RefusedField(_PIXELS),
        "min_dynamic_patch": RefusedField(_PIXELS),
        "moderation": RefusedField("moderate before and after the call."),
        "parse_special": RefusedField(
            "messages never contain special tokens; use /v1/completions.", (False,)
        ),
        "prediction": RefusedField("leave it out; answers are the same without it.", ()),
        "prompt_cache_options": RefusedField("equal prompt beginnings are cached automatically."),
        "reasoning": RefusedField(
            "send reasoning_effort, enable_thinking or thinking_budget.", ({},)
        ),
        "return_meta_info": RefusedField("see usage and finish_reason.", (False,)),
        "return_prompt_token_ids": RefusedField("send return_token_ids.", (False,)),
        "separate_reasoning": RefusedField("reasoning has its own field.", (True,)),
        "stream_reasoning": RefusedField("reasoning is streamed like the answer.", (True,)),
        "task": RefusedField("describe it in a message."),
        "truncate_prompt_tokens": RefusedField("leave out messages; conversations are not cut."),
        "truncation_side": RefusedField("it belongs to truncate_prompt_tokens.", ("left", "right")),
        "use_audio_in_video": RefusedField("no video is read here.", (False,)),
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
        "thinking_token_budget": RefusedField(_THINKS),
    }
)

CHOSEN_AWAY: Mapping[str, str] = MappingProxyType({"functions": "function_call"})
"""Fields of chat that are without effect if another field is "none"."""

MESSAGE: Mapping[str, RefusedField] = MappingProxyType(
    {
        "annotations": RefusedField("put their text into content.", ([],)),
        "function_call": RefusedField(_TOOLS),
        "refusal": RefusedField("put it into content."),
    }
)

_CHAT_ROUTE = "post to /v1/chat/completions."
ROUTES: RefusedRoutes = MappingProxyType(
    {
        "/classify": ("POST", "ask a chat model, with structured_outputs.choice."),
        "/cohere/v2/chat": ("POST", _CHAT_ROUTE),
        "/completion": ("POST", "post to /v1/completions."),
        "/embedding": ("POST", "post to /v1/embeddings."),
        "/inference/v1/generate": (
            "POST",
            "post token ids to /v1/completions, with return_token_ids.",
        ),
        "/load": ("GET", "see /metrics."),
        "/lora-adapters": ("GET", "see /v1/models."),
        "/pooling": ("POST", "post to /v1/embeddings, /v1/rerank or /v1/score."),
        "/predict": ("POST", "post to /v1/chat/completions or /invocations."),
        "/props": ("GET", "see /v1/models, and /tokenizer_info for the chat template."),
        "/server_info": ("GET", "see /version, /v1/models and /metrics."),
        "/slots": ("GET", "see /readyz, /metrics and /v1/engine/events."),
        "/v1/chat/completions/batch": ("POST", "send a request per conversation, or /v1/batches."),
        "/v1/chat/completions/control": (
            "POST",
            "send thinking_budget, or close the connection.",
        ),
        "/v1/chat/completions/render": ("POST", "post to /apply-template or /tokenize."),
        "/v1/completions/render": ("POST", "post to /tokenize."),
        "/v1/messages/render": ("POST", "post to /apply-template."),
        "/v1/moderations": ("POST", "nothing is moderated here."),
        "/v2/chat": ("POST", _CHAT_ROUTE),
    }
)
"""Routes of llama.cpp, vLLM, Cohere and OpenAI."""
