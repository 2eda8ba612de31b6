"""Configurations as objects of Python."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from triptych import AudioGenerationConfig, PipelineConfig
from triptych.core.errors import ConfigError, UnsupportedOption

DOCUMENTED = {
    **dict.fromkeys(("config_file", "max_length", "max_batch_size", "chat_template", "lora")),
    **dict.fromkeys(("max_queue_size_tg", "min_batch_size_tg", "draft_model", "speculative")),
    "pipeline_role": "prefill_and_decode",
    "ep_size": 1,
    "ce_delay_ms": 0.0,
    "enable_prioritize_first_decode": False,
    "enable_chunked_prefill": True,
    "enable_in_flight_batching": False,
    "max_num_steps": -1,
    "max_batch_input_tokens": 8192,
    "pool_embeddings": True,
    "custom_architectures": [],
    "zmq_endpoint_base": "",
    "execute_empty_batches": False,
    "force": False,
    "kvcache_ce_watermark": 0.95,
    "defer_resolve": False,
    "sampling": {},
    "profiling": {},
}
"""Fields of the reference document with its defaults, but for those that are refused."""
REFUSED = {
    "enable_echo": False,
    "use_experimental_kernels": "false",
    "use_vendor_blas": "false",
    "pdl_level": "0",
    "enable_overlap_scheduler": False,
    "use_legacy_module": True,
    "section_name": "a",
    "draft_model": "b",
    "run_model_test_mode": False,
    "prometheus_metrics_mode": "instrument_only",
}


def test_documented_fields_are_taken_or_refused_by_name() -> None:
    config = PipelineConfig(model="embedded", **DOCUMENTED)
    assert config.kvcache_ce_watermark == 0.95
    for name, value in REFUSED.items():
        with pytest.raises(ConfigError, match=name.replace("_", "[_-]")):
            PipelineConfig(**{name: value})


def test_groups_aliases_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("max_length: 256\nmodels:\n  served_model_name: [mine]\n")
    config = PipelineConfig(
        config_file=file,
        model={"model_path": "embedded", "kv_cache": {"kv_cache_page_size": 32}},
        max_model_len=512,
    )
    assert (config.model, config.served_model_name) == (("embedded",), ("mine",))
    assert (config.max_length, config.kv_cache_page_size) == (512, 32)
    assert "max_length=512" in repr(config)
    assert "threads" not in repr(config)


def test_an_audio_configuration_has_the_decoder_s_fields() -> None:
    config = AudioGenerationConfig(
        "mimi",
        audio_decoder_config={"sample_rate": 24000},
        chunk_size=[8, 16],
        buffer=4,
        prepend_prompt_speech_tokens="once",
        max_length=128,
    )
    assert (config.audio_decoder, config.chunk_size, config.buffer) == ("mimi", (8, 16), 4)
    assert config.audio_decoder_config == '{"sample_rate":24000}'
    by_flags = AudioGenerationConfig.from_flags({"buffer": "4"}, max_length=128)
    assert (by_flags.buffer, by_flags.audio_decoder) == (4, "")


def test_methods_of_the_document(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    config = PipelineConfig(
        chat_template=str(template), quantization_encoding="q4_k", api_key="secret"
    )
    config.resolve()
    assert config.retrieve_chat_template() == "{{ messages }}"
    assert config.graph_quantization_encoding == "q4_k"
    assert PipelineConfig().retrieve_chat_template() is None
    with caplog.at_level(logging.INFO):
        config.log_basic_config()
        config.log_pipeline_info()
    assert "quantization_encoding" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(UnsupportedOption):
        config.configure_session(object())


@pytest.mark.parametrize(
    "options", [{"wrong": 1}, {"max_length": -5}, {"max_length": "many"}, {"config_file": "/none"}]
)
def test_wrong_fields_are_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name.replace("_", "[_-]")):
        PipelineConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 16, "kv_cache": {"page_size": 32}}, "page_size is given twice"),
        ({"max_length": 16, "model": {"max_model_len": 32}}, "max_model_len is .*as max_length"),
        ({"speculative_ngram_min_match_window_size": 13}, "size 13 is above .*size 12: lower"),
        (
            {
                "speculative_algorithm": "standalone",
                "draft_model_path": "b",
                "rejection_sampling_strategy": "residual",
            },
            "residual: it keeps .*; write typical-acceptance",
        ),
        ({"speculative_accept_threshold_acc": 0.5}, "effect with --speculative-algorithm only"),
        ({"num_speculative_tokens": 3}, "tokens takes effect with --speculative-algorithm only"),
        ({"rejection_sampling_strategy": "residual"}, "effect with --speculative-algorithm only"),
        (
            {"speculative_algorithm": "mtp", "speculative_ngram_max_match_window_size": 5},
            "max-match-window-size takes effect with --speculative-algorithm ngram only",
        ),
        ({"speculative_algorithm": "ngram", "num_speculative_tokens": 32}, "at most 31"),
        ({"use_relaxed_acceptance_for_thinking": True}, "effect with --speculative-algorithm"),
        (
            {"speculative_algorithm": "ngram", "relaxed_topk": 3},
            "--relaxed-topk takes effect with --use-relaxed-acceptance-for-thinking",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(**options)


def test_a_flag_of_audio_that_is_no_value_is_named() -> None:
    with pytest.raises(ConfigError, match="buffer: invalid YAML"):
        AudioGenerationConfig.from_flags({"buffer": "["})


def test_an_unknown_attribute_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        _ = PipelineConfig().no_such
