"""What users of other servers send is honoured, ignored by name, or refused with advice.

The names are those of vLLM 0.33.0's requests and routes, of the server of llama.cpp in
llama-cpp-python 0.3.36, of SGLang's requests in November 2026, of Ollama's package for Python
0.6.3, and of the documentation of Ollama and OpenRouter. Routes for developers of a server and
fields that only they set are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from triptych.core.errors import UnsupportedOption
from triptych.core.http.fields import RefusedField, Strict
from triptych.modalities.embedding.api import protocol as vectors
from triptych.modalities.embedding.api import score_routes
from triptych.modalities.embedding.api.ollama import EmbedBody
from triptych.modalities.embedding.api.protocol import EmbeddingsRequest
from triptych.modalities.embedding.api.score_routes import RerankRequest
from triptych.modalities.llm.api import unsupported as of_chat
from triptych.modalities.llm.api.ollama import unsupported as of_ollama
from triptych.modalities.llm.api.ollama.protocol import (
    GenerateRequest,
    OllamaChatRequest,
    OllamaOptions,
)
from triptych.modalities.llm.api.protocol import ChatRequest, CompletionRequest
from triptych.modalities.llm.api.responses import unsupported as of_responses
from triptych.modalities.llm.api.responses.protocol import ResponseRequest

OPENAPI = json.loads((Path(__file__).parent / "openapi.json").read_text("utf-8"))
Table = Mapping[str, RefusedField]

SAMPLING = """
frequency_penalty ignore_eos include_stop_str_in_output logit_bias min_p presence_penalty priority
repetition_penalty seed skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream
structured_outputs temperature top_k top_p user model
cache_salt ec_transfer_params kv_transfer_params mm_payload request_id return_mm_kwargs session_id
vllm_xargs watermarking
"""
VLLM_TEXT = f"""{SAMPLING}
allowed_token_ids bad_words echo length_penalty logprob_token_ids logprobs max_tokens min_tokens n
prompt_logprobs repetition_detection response_format return_token_ids return_token_offsets
return_tokens_as_token_ids return_weight_versions routed_experts_prompt_start stream_interval
stream_options truncate_prompt_tokens truncation_side add_special_tokens thinking_token_budget
use_beam_search
"""
LLAMA_CPP = """
adaptive_decay adaptive_target backend_sampling cache_prompt dry_allowed_length dry_base
dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range
frequency_penalty generation_prompt grammar id_slot ignore_eos json_schema logit_bias logprobs lora
max_tokens min_keep min_p mirostat mirostat_eta mirostat_tau n n_cache_reuse n_cmpl n_discard
n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs presence_penalty
reasoning_budget_message reasoning_budget_tokens reasoning_control reasoning_format repeat_last_n
repeat_penalty response_fields return_progress return_tokens samplers seed sse_ping_interval stop
stream stream_options t_max_predict_ms temperature timings_per_token top_k top_n_sigma top_p
typical_p verbose xtc_probability xtc_threshold
"""
SGLANG = """
bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor
custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos
images_config logit_bias logprobs lora_path max_tokens min_p min_tokens model n ngram_corpus_id
no_stop_trim presence_penalty priority regex repetition_penalty response_format
return_cached_tokens_details return_hidden_states return_routed_experts return_token_ids rid
routed_dp_rank routed_experts_start_len seed session_id session_params skip_special_tokens stop
stop_regex stop_token_ids stream stream_options temperature top_k top_p user
"""
SGLANG_CHAT = """
chat_template_kwargs continue_final_message input_ids max_completion_tokens max_dynamic_patch
messages min_dynamic_patch parallel_tool_calls reasoning reasoning_effort return_meta_info
return_prompt_token_ids separate_reasoning stream_reasoning task tool_choice tools top_logprobs
use_audio_in_video
"""
OPENROUTER = "include_reasoning models plugins provider route top_a transforms usage"
OLLAMA = "format keep_alive logprobs model options shift stream think top_logprobs truncate"
OLLAMA_OPTIONS = """
draft_num_predict embedding_only f16_kv frequency_penalty logits_all low_vram main_gpu min_p
mirostat mirostat_eta mirostat_tau num_batch num_ctx num_gpu num_keep num_predict num_thread numa
penalize_newline presence_penalty repeat_last_n repeat_penalty seed stop temperature tfs_z top_k
top_p typical_p use_mlock use_mmap vocab_only
"""
VLLM_VECTORS = """
add_special_tokens cache_salt mm_processor_kwargs model padding priority request_id
truncate_prompt_tokens truncation_side user use_activation
"""
THEIRS: Mapping[type[Strict], str] = {
    ChatRequest: f"""{VLLM_TEXT} {LLAMA_CPP} {SGLANG} {SGLANG_CHAT} {OPENROUTER}
        add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
        include_reasoning max_completion_tokens media_io_kwargs messages mm_processor_kwargs
        parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs""",
    CompletionRequest: f"""{VLLM_TEXT} {LLAMA_CPP} {SGLANG} {OPENROUTER}
        best_of echo json_schema prompt prompt_embeds suffix""",
    ResponseRequest: f"""{SAMPLING}
        background chat_template_kwargs enable_response_messages include include_reasoning input
        instructions max_output_tokens max_tool_calls media_io_kwargs metadata mm_processor_kwargs
        parallel_tool_calls previous_input_messages previous_response_id prompt prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store
        text tool_choice tools top_logprobs truncation""",
    EmbeddingsRequest: f"""{VLLM_VECTORS}
        add_generation_prompt chat_template chat_template_kwargs continue_final_message dimensions
        embd_normalize embed_dtype encoding_format endianness input media_io_kwargs messages""",
    RerankRequest: f"""{VLLM_VECTORS}
        chat_template_kwargs documents instruction max_tokens_per_doc max_tokens_per_query query
        top_n""",
    OllamaOptions: OLLAMA_OPTIONS,
    OllamaChatRequest: f"{OLLAMA} messages tools",
    GenerateRequest: f"""{OLLAMA}
        context height images prompt raw steps suffix system template width""",
    EmbedBody: "dimensions input keep_alive model options truncate",
}
REFUSED: Mapping[type[Strict], Table] = {
    ChatRequest: of_chat.COMMON | of_chat.CHAT,
    CompletionRequest: of_chat.COMMON | of_chat.COMPLETION,
    ResponseRequest: of_responses.REQUEST,
    EmbeddingsRequest: vectors.OF_VECTORS,
    RerankRequest: score_routes.REFUSED,
    OllamaOptions: of_ollama.OPTIONS,
    GenerateRequest: of_ollama.GENERATE,
}
LEAST: Mapping[type[Strict], dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "m", "prompt": "hi"},
    ResponseRequest: {"model": "m", "input": "hi"},
    EmbeddingsRequest: {"model": "m", "input": "hi"},
    RerankRequest: {"model": "m", "query": "a", "documents": ["b"]},
    OllamaOptions: {},
    OllamaChatRequest: {"model": "m"},
    GenerateRequest: {"model": "m"},
    EmbedBody: {"model": "m", "input": "a"},
}
ROUTES = """
/apply-template /classify /cohere/v2/chat /completion /detokenize /embedding /health
/inference/v1/generate /infill /invocations /load /lora-adapters /metrics /models/load
/models/unload /ping /pooling /predict /props /rerank /reranking /reset_prefix_cache /score
/server_info /sleep /slots /tokenize /tokenizer_info /v1/audio/transcriptions
/v1/audio/translations /v1/chat/completions /v1/chat/completions/batch
/v1/chat/completions/control /v1/chat/completions/input_tokens /v1/chat/completions/render
/v1/completions /v1/completions/render /v1/embeddings /v1/health /v1/load_lora_adapter
/v1/messages /v1/messages/count_tokens /v1/messages/render /v1/models /v1/rerank /v1/reranking
/v1/responses /v1/responses/input_tokens /v1/responses/{response_id}
/v1/responses/{response_id}/cancel /v1/score /v1/unload_lora_adapter /v2/embed /v2/rerank /version
/wake_up
"""


@pytest.mark.parametrize("request_type", THEIRS, ids=lambda each: each.__name__)
def test_every_field_of_theirs_is_known(request_type: type[Strict]) -> None:
    unknown = set()
    for name in THEIRS[request_type].split():
        try:
            request_type.model_validate({**LEAST[request_type], name: object()})
        except ValidationError as error:
            found = error.errors(include_url=False)
            unknown |= {name for each in found if each["type"] == "extra_forbidden"}
    assert unknown == set()


@pytest.mark.parametrize(
    ("request_type", "name", "value"),
    [
        pytest.param(request_type, name, value, id=f"{request_type.__name__}-{name}-{value}")
        for request_type, table in REFUSED.items()
        for name, entry in table.items()
        for value in (None, *entry.neutral, "something")
    ],
)
def test_what_asks_for_nothing_passes_and_the_rest_is_refused_with_advice(
    request_type: type[Strict], name: str, value: Any
) -> None:
    least = LEAST[request_type]
    entry = REFUSED[request_type][name]
    if value is None or value in entry.neutral:
        plain = request_type.model_validate(least)
        assert request_type.model_validate({**least, name: value}) == plain
        return
    with pytest.raises(ValidationError) as caught:
        request_type.model_validate({**least, name: value})
    error = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, UnsupportedOption)
    assert (error.param, error.message) == (name, f"{name} is not offered: {entry.instead}")


@pytest.mark.parametrize("path", ROUTES.split())
def test_every_route_of_theirs_is_served_or_says_what_to_do(path: str) -> None:
    served = {*OPENAPI["paths"], *of_chat.ROUTES, "/invocations"}
    assert {path, f"/v1{path}"} & served, "where `/v1` may be left out"


def test_a_refused_route_names_routes_that_are_served() -> None:
    for path, (_, instead) in of_chat.ROUTES.items():
        assert path not in OPENAPI["paths"]
        named = re.findall(r"(?<!\S)/[a-z0-9/_-]+", instead)
        assert set(named) - {"/invocations"} <= OPENAPI["paths"].keys(), path
