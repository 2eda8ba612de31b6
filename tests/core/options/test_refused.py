"""Every flag of the servers we learned from is honoured or refused by name."""

import argparse
import json
import re
from pathlib import Path

import pytest

from triptych.cli import COMMANDS
from triptych.core.errors import ConfigError
from triptych.core.options import refused
from triptych.core.options.declaration import ROLES
from triptych.core.options.table import add_options, declared, parse, resolve

MAX_FLAGS = """
allow-safetensors-weights-fp32-bf6-bidirectional-cast audio-decoder audio-decoder-config
audio-decoder-weights block-causal buffer cache-strategy ce-delay-ms chat-template chunk-size
chunked-prefill-size config-file custom-architectures data-parallel-degree debug-verify-replay
decode-stall-timeout-s defer-resolve device-graph-capture device-memory-utilization devices
dist-init-addr dp draft-allow-safetensors-weights-fp32-bf6-bidirectional-cast
draft-chat-template draft-config-file draft-data-parallel-degree draft-devices draft-enable-echo
draft-force-download draft-huggingface-model-revision draft-huggingface-weight-revision
draft-max-length draft-model draft-model-path draft-pool-embeddings draft-quantization-encoding
draft-rope-type draft-section-name draft-served-model-name draft-subfolder
draft-trust-remote-code draft-use-subgraphs draft-vision-config-overrides draft-weight-path
enable-chunked-prefill enable-deterministic-inference enable-echo enable-in-flight-batching
enable-kvcache-swapping-to-host enable-lora enable-min-tokens enable-overlap-scheduler
enable-penalties enable-prefix-caching enable-prioritize-first-decode enable-structured-output
enable-variable-logits ep-size ep-use-allreduce execute-empty-batches first-block-caching force
force-download gpu-profiling headless host-kvcache-swap-space-gb huggingface-model-revision
huggingface-weight-revision kv-cache-dtype kv-cache-format kv-cache-page-size kv-connector
kv-connector-config kvcache-ce-watermark log-prefix lora lora-paths max-batch-input-tokens
max-batch-size max-batch-total-tokens max-length max-lora-rank max-num-loras max-num-steps
max-queue-size-tg max-vision-cache-entries mem-fraction-static min-batch-size-tg model
model-override model-path models nnodes node-rank num-speculative-tokens pdl-level pipeline-role
pool-embeddings port prefer-module-v3 prepend-prompt-speech-tokens
prepend-prompt-speech-tokens-causal pretty-print-config profile-serve profiling
prometheus-metrics-mode quantization quantization-encoding reasoning-parser
rejection-sampling-strategy relaxed-delta relaxed-topk rope-type run-model-test-mode sampling
section-name served-model-name sim-failure speculative speculative-method subfolder
synthetic-acceptance-rate target task task-arg taylorseer taylorseer-cache-interval
taylorseer-max-order taylorseer-warmup-steps teacache teacache-coefficients
teacache-rel-l1-thresh torchao-config tp trust-remote-code use-experimental-kernels
use-legacy-module use-relaxed-acceptance-for-thinking use-subgraphs use-vendor-blas
use-vendor-ccl vision-config-overrides weight-path zmq-endpoint-base
"""

SGLANG_FLAGS = """
admin-api-key allow-auto-truncate api-key base-gpu-id collect-tokens-histogram
constrained-json-disable-any-whitespace constrained-json-whitespace-pattern context-length
cpu-offload-gb crash-dump-folder crash-on-nan cuda-graph-bs custom-weight-loader
debug-tensor-dump-inject debug-tensor-dump-input-file debug-tensor-dump-output-folder
decode-attention-backend decode-log-interval delete-ckpt-after-loading device
disable-chunked-prefix-cache disable-cuda-graph disable-fast-image-processor
disable-hybrid-swa-memory disable-outlines-disk-cache disable-overlap-schedule
disable-radix-cache dist-timeout download-dir dp-size dtype elastic-ep-backend
enable-custom-logit-processor enable-dp-attention enable-dp-lm-head
enable-dynamic-batch-tokenizer enable-fp32-lm-head enable-hierarchical-cache enable-lmcache
enable-metrics enable-mixed-chunk enable-multimodal enable-nan-detection
enable-priority-scheduling enable-request-time-stats-logging enable-return-hidden-states
enable-tokenizer-batch-encode enable-torch-compile enable-trace oltp-traces-endpoint
flashinfer-mla-disable-ragged gc-warning-threshold-secs generation-tokens-buckets gpu-id-step
grammar-backend
hicache-io-backend hicache-mem-layout hicache-ratio hicache-size hicache-storage-backend
hicache-storage-prefetch-policy hicache-write-policy host hybrid-kvcache-ratio is-embedding
json-model-override-args keep-mm-feature-on-device kv-events-config load-balance-method
load-format load-watch-interval log-level log-requests lora-backend lora-eviction-policy
mamba-full-memory-ratio mamba-ssm-dtype max-loaded-loras max-lora-chunk-size max-loras-per-batch
max-mamba-cache-size max-prefill-tokens max-queued-requests max-running-requests
max-total-tokens mm-attention-backend model-impl model-loader-extra-config mooncake-ib-device
multi-item-scoring-delimiter nccl-port num-continuous-decode-steps numa-node page-size
pp-max-micro-batch-size pp-size preferred-sampling-params prefill-round-robin-balance
priority-scheduling-preemption-threshold quantization-param-path radix-eviction-policy
random-seed revision sampling-backend schedule-conservativeness
schedule-low-priority-values-first schedule-policy scheduler-recv-interval show-time-cost
skip-server-warmup skip-tokenizer-init sleep-on-idle sm-group-num
speculative-accept-threshold-acc speculative-accept-threshold-single speculative-algorithm
speculative-attention-mode speculative-eagle-topk speculative-moe-runner-backend
speculative-ngram-branch-length speculative-ngram-capacity speculative-ngram-match-type
speculative-ngram-max-bfs-breadth speculative-ngram-min-bfs-breadth speculative-num-draft-tokens
speculative-num-steps speculative-token-map stream-interval stream-output swa-full-tokens-ratio
tokenizer-mode tokenizer-path tokenizer-worker-num torch-compile-max-bs tp-size warmups
watchdog-timeout weight-loader-disable-mmap
"""


def _parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="triptych serve", allow_abbrev=False)
    add_options(parser)
    return parse(parser, argv)


def _declared_flags() -> set[str]:
    flags = {flag for option in declared().values() for flag in option.flags}
    return flags | {"--config-file", "--config"}


@pytest.mark.parametrize("name", sorted({*MAX_FLAGS.split(), *SGLANG_FLAGS.split()}))
def test_flag_of_a_peer_is_honoured_or_refused(name: str) -> None:
    flag = f"--{name}"
    if flag in {*_declared_flags(), *refused.FIXED_BY_FLAG, *refused.TRANSLATED}:
        return
    with pytest.raises(ConfigError, match=f"^{flag} is not offered: .+"):
        _parse(flag, "x")


def test_no_flag_is_in_two_tables() -> None:
    tables = (_declared_flags(), refused.REFUSED, refused.FIXED_BY_FLAG, refused.TRANSLATED)
    flags = [flag for table in tables for flag in table]
    assert len(flags) == len(set(flags))


def test_refusals_are_one_line_that_says_what_to_do() -> None:
    reasons = [*refused.REFUSED.values(), *(entry.reason for entry in refused.FIXED)]
    for reason in reasons:
        assert reason.endswith("."), reason
        assert len(reason) < 140, reason


REASONS = {
    *refused.REFUSED.values(),
    *(entry.reason for entry in refused.FIXED),
    *refused.TRANSLATED.values(),
}
ROUTES = json.loads(
    (Path(__file__).parents[2] / "contract" / "openapi.json").read_text(encoding="utf-8")
)["paths"]


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_what_a_reason_points_to_is_there(reason: str) -> None:
    flags = {flag.replace("--no-", "--") for flag in re.findall(r"--[a-z][a-z-]+", reason)}
    assert flags <= _declared_flags()
    assert set(re.findall(r"`triptych ([a-z-]+)", reason)) <= {each.name for each in COMMANDS}
    assert set(re.findall(r"/(?:v1/)?[a-z/]{5,}", reason)) <= {*ROUTES, "/metrics"}


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_no_reason_denies_what_is_served(reason: str) -> None:
    """Each kind of model there is has a loader, routes and a row in the table of options."""
    denied = re.search(r"(?:only (.*) (?:is|are) |(.*) models? (?:is|are) not )served", reason)
    denied_words = (denied.group(1) or denied.group(2)).lower() if denied else ""
    assert denied is None or denied.group(1) is None, "nothing is all that is served"
    served = {*ROLES, "image", "vision", "audio", "embedding", "multimodal", "text"}
    assert not served & set(re.findall(r"[a-z]+", denied_words))


@pytest.mark.parametrize(
    "argv",
    [
        ("--enable-multimodal",),
        ("--enable-fp32-lm-head",),
        ("--pipeline-role", "prefill_and_decode"),
        ("--data-parallel-degree", "1"),
        ("--cache-strategy=paged",),
        ("--enable-penalties",),
        ("--no-trust-remote-code",),
        ("--max-num-steps", "-1"),
    ],
)
def test_standing_option_is_accepted_where_it_changes_nothing(argv: tuple[str, ...]) -> None:
    assert resolve(_parse(*argv), environ={}) == resolve(environ={})


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--disaggregation-mode", "prefill"), "--disaggregation-mode prefill"),
        (("--pp-size", "2"), "--pp-size 2"),
        (("--trust-remote-code",), "--trust-remote-code"),
        (("--no-enable-penalties",), "--no-enable-penalties"),
        (("--no-enable-multi-layer-eagle",), "--no-enable-multi-layer-eagle"),
    ],
)
def test_standing_option_is_refused_where_it_would_change_something(
    argv: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{named} is not offered: "):
        _parse(*argv)


def test_translated_flags_say_the_same_in_our_words() -> None:
    config = resolve(_parse("--disable-radix-cache"), environ={})
    assert not config.cache.enable_prefix_caching
    assert config.device.device_graph_capture is None
    config = resolve(_parse("--disable-cuda-graph", "--disable-cuda-graph-padding"), environ={})
    assert config.device.device_graph_capture is False
    assert not config.device.device_graph_padding
    config = resolve(_parse("--cuda-graph-bs", "1,2,8", "--cuda-graph-max-bs", "4"), environ={})
    assert config.device.device_graph_rows == (1, 2, 8)
    assert config.device.device_graph_max_rows == 4


def test_the_key_of_administrators_has_sglangs_name() -> None:
    config = resolve(_parse("--admin-api-key", "k"), environ={})
    assert config.server.admin_key == ("k",)


def test_flags_of_others_with_our_meaning_are_read() -> None:
    flags = "-a mine -v --sleep-idle-seconds 60 --sse-ping-interval 5 --max-num-queued-reqs 3"
    config = resolve(_parse(*flags.split(), "--disable-log-requests"), environ={})
    assert config.models.served_model_name == ("mine",)
    assert (config.models.idle_unload_s, config.server.heartbeat_s) == (60, 5)
    assert (config.server.log_level, config.server.log_requests) == ("debug", False)
    assert config.schedule.max_queue_size == 3


def test_a_reason_is_about_the_flag() -> None:
    with pytest.raises(ConfigError, match="given with --lora-paths"):
        _parse("--lora", "x")


def test_translated_flags_parse() -> None:
    for ours in refused.TRANSLATED.values():
        _parse(ours)


@pytest.mark.parametrize(
    ("flag", "value", "alternative"),
    [
        ("--dtype", "half", "write float16"),
        ("--kv-cache-dtype", "fp8_e5m2", "use int8 or float8_e4m3fn"),
        ("--kv-cache-dtype", "fp8_e4m3", "write float8_e4m3fn"),
        ("--chunked-prefill-size", "-1", "at least 0, got -1.* write --no-enable-chunked-prefill"),
        ("--schedule-policy", "dfs-weight", "write lpm"),
        ("--attention-backend", "FLASHINFER", "leave it out"),
        ("--attention-backend", "TRITON_ATTN", "write triton"),
        ("--attention-backend", "fa3", "write flash"),
        ("--schedule-policy", "alphabetical", "use one of fcfs, lpm, priority"),
    ],
)
def test_value_of_a_peer_is_refused_with_the_alternative(
    flag: str, value: str, alternative: str
) -> None:
    with pytest.raises(ConfigError, match=alternative):
        resolve(_parse(flag, value), environ={})
