"""Options of other servers: what is refused by name, and what may be said but not changed.

Owns one table, so that no flag of MAX or SGLang is ever accepted and ignored. A *refused* option
ends in an error that names the alternative. A *fixed* option describes what Triptych does
anyway: the values that say so are accepted, every other is refused. A *translated* one means the
same as a flag of ours in other words. What is honoured is declared in `core/config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.core.errors import ConfigError
from triptych.core.once import once


@dataclass(frozen=True, slots=True)
class Fixed:
    """An option whose value is fixed here. Switches accept `true` (`--x`) or `false` (`--no-x`)."""

    flags: tuple[str, ...]
    accepts: tuple[str, ...]
    reason: str

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value on the command line."""
        return self.accepts in (("true",), ("false",))

    def check(self, flag: str, value: Any) -> None:
        """Raise ConfigError unless `value` says what happens anyway."""
        if _spelled(value) not in self.accepts:
            given = flag if self.is_switch else f"{flag} {value}"
            raise ConfigError(f"{given} is not offered: {self.reason}")


def _spelled(value: Any) -> str:
    """A value as the table spells it; YAML's null, true and 1 arrive as objects."""
    return "null" if value is None else str(value).lower()


def _named(names: str) -> tuple[str, ...]:
    return tuple(f"--{name}" for name in names.split())


_ONE_DEVICE = (
    "one engine drives one device; start a server per device (--device gpu:N) behind a balancer."
)
_ADAPTERS = (
    "every adapter of --lora-paths is loaded with its model, for the layers it was made for, and"
    " stays; leave it out."
)
_TIERS = (
    "cached pages live on the device only; keep more of them with --kv-cache-memory-mb"
    " or --device-memory-utilization."
)
_COMPILED = "captured graphs and compilation are not offered yet; leave it out."
_KERNELS = "kernels follow from the device and the model; leave it out."
_SPECULATIVE = "speculative decoding is not offered yet; leave it out, answers stay the same."
PARSERS = "tool and reasoning parsers are not offered yet; parse the answer's text."
GRAMMAR = "structured output is not offered yet; ask for the format in the prompt and check it."
_KNOWN = "what a model does is read off its folder; name it with --model."
_EXPERTS = "mixture-of-experts models are not served natively yet; leave it out."
_SPLIT = (
    "prefill and decode share one engine; bound what prompts may delay with"
    " --max-batch-input-tokens."
)
_SCANNED = "code from model repositories never runs; use a model that --model-impl can run."

STANDING: tuple[Fixed, ...] = (
    Fixed(
        _named(
            "data-parallel-degree data-parallel-size dp-size dp tensor-parallel-size tp-size tp"
            " pipeline-parallel-size pp-size pp ep-size expert-parallel-size ep nnodes"
            " attention-context-parallel-size attn-cp-size moe-data-parallel-size moe-dp-size"
        ),
        ("1",),
        _ONE_DEVICE,
    ),
    Fixed(_named("node-rank"), ("0",), _ONE_DEVICE),
    Fixed(_named("pipeline-role"), ("prefill_and_decode", "prefillanddecode"), _SPLIT),
    Fixed(_named("disaggregation-mode"), ("null",), _SPLIT),
    Fixed(_named("cache-strategy"), ("paged", "model_default"), "the cache is always paged."),
    Fixed(_named("kv-connector"), ("null",), _TIERS),
    Fixed(_named("radix-eviction-policy"), ("lru",), "the least recently used page goes first."),
    Fixed(_named("task"), ("text_generation",), _KNOWN),
    Fixed(_named("max-num-steps"), ("1", "-1"), "every step is scheduled on its own."),
    Fixed(
        _named("num-continuous-decode-steps scheduler-recv-interval"),
        ("1",),
        "every step is scheduled on its own.",
    ),
    Fixed(_named("stream-interval"), ("1",), "each step's text is sent at once."),
    Fixed(_named("tokenizer-mode"), ("auto",), "tokenizers are always the fast ones."),
    Fixed(_named("tokenizer-worker-num"), ("1",), "one API process tokenizes."),
    Fixed(
        _named("load-format"),
        ("auto",),
        "the format is read off the files: safetensors or GGUF, never pickles.",
    ),
    Fixed(
        _named("sampling-defaults"),
        ("model",),
        "defaults are the model's; send others with each request.",
    ),
    Fixed(_named("grammar-backend"), ("none",), GRAMMAR),
    Fixed(_named("gpu-profiling"), ("off",), "use `nsys profile triptych serve ...`."),
    Fixed(_named("moe-a2a-backend elastic-ep-backend"), ("none",), _EXPERTS),
    Fixed(
        _named("enable-penalties enable-min-tokens enable-echo enable-variable-logits"),
        ("true",),
        "it is a field of each request and cannot be switched off.",
    ),
    Fixed(
        _named("enable-overlap-scheduler"), ("true",), "planning always overlaps the running step."
    ),
    Fixed(_named("enable-multimodal"), ("true",), "pictures are taken wherever a model sees."),
    Fixed(
        _named("enable-fp32-lm-head"), ("true",), "the language head always writes float32 logits."
    ),
    Fixed(_named("enable-metrics"), ("true",), "/metrics is always there."),
    Fixed(_named("enable-cache-report"), ("true",), "usage always counts cached tokens."),
    Fixed(_named("enable-nan-detection"), ("true",), "NaN always ends the one job it is in."),
    Fixed(_named("sleep-on-idle"), ("true",), "an idle engine always sleeps."),
    Fixed(
        _named(
            "allow-safetensors-weights-fp32-bf6-bidirectional-cast"
            " allow-safetensors-weights-fp32-bf16-bidirectional-cast"
        ),
        ("true",),
        "weights are always cast to the compute type; name it with --dtype.",
    ),
    Fixed(_named("trust-remote-code"), ("false",), _SCANNED),
    Fixed(
        _named("force-download"),
        ("false",),
        "use `triptych models remove` and `triptych models fetch`.",
    ),
    Fixed(_named("enable-structured-output"), ("false",), GRAMMAR),
    Fixed(_named("enable-kvcache-swapping-to-host"), ("false",), _TIERS),
    Fixed(_named("device-graph-capture debug-verify-replay use-subgraphs"), ("false",), _COMPILED),
    Fixed(
        _named("prefer-module-v3 use-legacy-module"),
        ("false",),
        "there is one implementation of each model; see --model-impl.",
    ),
    Fixed(_named("force"), ("false",), "options are always validated; correct the refused one."),
    Fixed(_named("defer-resolve"), ("false",), "options are always resolved at start."),
    Fixed(_named("execute-empty-batches"), ("false",), "a step always has work."),
    Fixed(_named("ep-use-allreduce"), ("false",), _ONE_DEVICE),
    Fixed(_named("use-relaxed-acceptance-for-thinking"), ("false",), _SPECULATIVE),
    Fixed(_named("profile-serve"), ("false",), "use `py-spy record -- triptych serve ...`."),
)
"""Options that may be given, with the values that name what happens anyway."""

TRANSLATED: Mapping[str, str] = {
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--enable-priority-scheduling": "--schedule-policy=priority",
}
"""Flags that mean the same as one of ours in other words."""

_REFUSED: tuple[tuple[str, str], ...] = (
    (
        _SPECULATIVE,
        "speculative-method num-speculative-tokens rejection-sampling-strategy relaxed-delta"
        " relaxed-topk synthetic-acceptance-rate speculative speculative-algorithm"
        " speculative-draft-model-path speculative-draft-model speculative-draft-model-revision"
        " speculative-draft-load-format speculative-num-steps speculative-eagle-topk"
        " speculative-num-draft-tokens speculative-accept-threshold-single"
        " speculative-accept-threshold-acc speculative-token-map speculative-attention-mode"
        " speculative-draft-attention-backend speculative-moe-runner-backend"
        " speculative-moe-a2a-backend speculative-draft-model-quantization"
        " speculative-ngram-min-match-window-size speculative-ngram-max-match-window-size"
        " speculative-ngram-min-bfs-breadth speculative-ngram-max-bfs-breadth"
        " speculative-ngram-match-type speculative-ngram-branch-length"
        " speculative-ngram-max-trie-depth speculative-ngram-capacity enable-multi-layer-eagle"
        " enable-draft-weights-cpu-backup decrypted-draft-config-file draft-model"
        " draft-allow-safetensors-weights-fp32-bf6-bidirectional-cast draft-chat-template"
        " draft-config-file draft-data-parallel-degree draft-devices draft-enable-echo"
        " draft-force-download draft-huggingface-model-revision draft-huggingface-weight-revision"
        " draft-max-length draft-model-path draft-pool-embeddings draft-quantization-encoding"
        " draft-rope-type draft-section-name draft-served-model-name draft-subfolder"
        " draft-trust-remote-code draft-use-subgraphs draft-vision-config-overrides"
        " draft-weight-path",
    ),
    (
        _ADAPTERS,
        "lora enable-lora-overlap-loading lora-target-modules max-loaded-loras"
        " lora-eviction-policy lora-backend max-lora-chunk-size lora-drain-wait-threshold",
    ),
    (
        _ONE_DEVICE,
        "use-vendor-ccl pp-max-micro-batch-size pp-async-batch-depth load-balance-method"
        " load-watch-interval prefill-round-robin-balance dist-init-addr nccl-init-addr nccl-port"
        " dist-timeout enable-dp-attention enable-dp-lm-head enable-two-batch-overlap"
        " enable-single-batch-overlap tbo-token-distribution-threshold disable-custom-all-reduce"
        " enable-mscclpp enable-symm-mem enable-torch-symm-mem enable-nccl-nvls enable-p2p-check"
        " enable-quant-communications enable-attn-tp-input-scattered enable-dynamic-chunking"
        " enable-metrics-for-all-schedulers enable-prefill-delayer prefill-delayer-max-delay-passes"
        " prefill-delayer-token-usage-low-watermark prefill-delayer-queue-min-ratio"
        " prefill-delayer-max-delay-ms prefill-delayer-forward-passes-buckets"
        " prefill-delayer-wait-seconds-buckets enable-flashinfer-allreduce-fusion"
        " enable-aiter-allreduce-fusion enable-dsa-prefill-context-parallel"
        " enable-nsa-prefill-context-parallel dsa-prefill-cp-mode nsa-prefill-cp-mode"
        " mm-enable-dp-encoder enable-broadcast-mm-inputs-process numa-node",
    ),
    (
        _EXPERTS,
        "moe-runner-backend flashinfer-mxfp4-moe-precision deepep-mode deepep-config"
        " deepep-dispatcher-output-dtype enable-fused-grouped-gemm-combine"
        " ep-num-redundant-experts ep-dispatch-algorithm init-expert-location enable-eplb"
        " eplb-algorithm eplb-rebalance-num-iterations eplb-rebalance-layers-per-chunk"
        " eplb-min-rebalancing-utilization-threshold expert-distribution-recorder-mode"
        " expert-distribution-recorder-buffer-size enable-expert-distribution-metrics"
        " moe-dense-tp-size enable-elastic-expert-backup mooncake-ib-device"
        " enable-deepep-waterfill elastic-ep-rejoin disable-shared-experts-fusion enable-ep-moe"
        " enable-deepep-moe enable-flashinfer-cutlass-moe enable-flashinfer-cutedsl-moe"
        " enable-flashinfer-trtllm-moe enable-triton-kernel-moe enable-flashinfer-mxfp4-moe"
        " disable-flashinfer-cutlass-moe-fp4-allgather enable-return-routed-experts kt-weight-path"
        " kt-method kt-cpuinfer kt-threadpool-count kt-num-gpu-experts"
        " kt-max-deferred-experts-per-token",
    ),
    (
        _TIERS,
        "host-kvcache-swap-space-gb kv-connector-config enable-hierarchical-cache hicache-ratio"
        " hicache-size hicache-write-policy hicache-eviction-policy hicache-io-backend"
        " hicache-mem-layout hicache-storage-backend hicache-storage-prefetch-policy"
        " hicache-storage-backend-extra-config enable-lmcache kv-events-config",
    ),
    (
        "every layer keeps its whole context in pages of one size; leave it out.",
        "hybrid-kvcache-ratio swa-full-tokens-ratio disable-hybrid-swa-memory"
        " disable-chunked-prefix-cache enable-double-sparsity ds-channel-config-path"
        " ds-heavy-channel-num ds-heavy-token-num ds-heavy-channel-type"
        " ds-sparse-decode-threshold hierarchical-sparse-attention-extra-config",
    ),
    (
        "state-space models are not served yet; leave it out.",
        "max-mamba-cache-size mamba-ssm-dtype mamba-full-memory-ratio mamba-scheduler-strategy"
        " mamba-track-interval",
    ),
    (
        "weights stay on the device; with little memory, serve a smaller or GGUF model.",
        "cpu-offload-gb offload-group-size offload-num-in-group offload-prefetch-step offload-mode"
        " enable-memory-saver enable-weights-cpu-backup",
    ),
    (
        _SPLIT,
        "decode-stall-timeout-s disaggregation-transfer-backend disaggregation-bootstrap-port"
        " disaggregation-decode-tp disaggregation-decode-dp disaggregation-prefill-pp"
        " disaggregation-ib-device disaggregation-decode-enable-offload-kvcache"
        " num-reserved-decode-tokens disaggregation-decode-polling-interval enable-pdmux"
        " pdmux-config-path sm-group-num encoder-only language-only encoder-transfer-backend"
        " encoder-urls",
    ),
    (
        _COMPILED,
        "target disable-cuda-graph disable-cuda-graph-padding cuda-graph-bs cuda-graph-max-bs"
        " enable-profile-cuda-graph enable-cudagraph-gc enable-torch-compile"
        " enable-torch-compile-debug-mode torch-compile-max-bs disable-piecewise-cuda-graph"
        " enforce-piecewise-cuda-graph enable-piecewise-cuda-graph piecewise-cuda-graph-tokens"
        " piecewise-cuda-graph-compiler piecewise-cuda-graph-max-tokens",
    ),
    (
        _KERNELS,
        "use-experimental-kernels use-vendor-blas pdl-level attention-backend"
        " prefill-attention-backend decode-attention-backend mm-attention-backend"
        " sampling-backend"
        " dsa-prefill-backend dsa-decode-backend nsa-prefill-backend nsa-decode-backend"
        " nsa-prefill nsa-decode fp8-gemm-backend fp4-gemm-backend disable-flashinfer-autotune"
        " triton-attention-reduce-in-fp32 triton-attention-num-kv-splits"
        " triton-attention-split-tile-size flashinfer-mla-disable-ragged enable-fused-qk-norm-rope",
    ),
    (
        "GGUF types are recognised by themselves; other quantised weights are not offered yet:"
        " serve the model's bfloat16 or GGUF files.",
        "quantization quantization-param-path torchao-config modelopt-quant"
        " modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path"
        " quantize-and-serve rl-quant-profile",
    ),
    (
        GRAMMAR,
        "constrained-json-whitespace-pattern constrained-json-disable-any-whitespace"
        " disable-outlines-disk-cache",
    ),
    (PARSERS, "reasoning-parser tool-call-parser tool-server"),
    (
        "each picture is encoded once and its features are kept; use --max-vision-cache-entries.",
        "keep-mm-feature-on-device enable-mm-global-cache enable-prefix-mm-cache",
    ),
    (
        "the model's own image processor and tower run as they are published; leave it out.",
        "disable-fast-image-processor enable-precise-embedding-interpolation",
    ),
    ("use --max-pictures.", "limit-mm-data-per-request"),
    ("use --max-picture-pixels.", "mm-process-config"),
    ("use --num-decode-children.", "mm-max-concurrent-calls"),
    (
        "use --request-timeout-s, and --media-timeout-s for what is fetched.",
        "mm-per-request-timeout",
    ),
    ("run the tests: they check each model against its reference.", "run-model-test-mode"),
    (_KNOWN, "is-embedding task-arg"),
    ("texts are not scored; embed them and compare.", "multi-item-scoring-delimiter"),
    (
        "diffusion language models are not served; leave it out.",
        "dllm-algorithm dllm-algorithm-config",
    ),
    ("use --max-batch-input-tokens.", "max-prefill-tokens prefill-max-requests"),
    ("use --kv-cache-memory-mb, the size of the cache.", "max-total-tokens"),
    (
        "use --device-memory-utilization, a share of the memory free at start.",
        "mem-fraction-static",
    ),
    (
        "use --kvcache-ce-watermark, the cache use above which no prompt starts.",
        "schedule-conservativeness",
    ),
    (
        "--schedule-policy priority orders the waiting jobs by the request's priority; leave it"
        " out.",
        "schedule-low-priority-values-first priority-scheduling-preemption-threshold"
        " abort-on-priority-when-disabled",
    ),
    ("planning always overlaps the running step; leave it out.", "disable-overlap-schedule"),
    (
        "the API process tokenizes beside the engine; leave it out.",
        "enable-tokenizer-batch-encode disable-tokenizer-batch-decode"
        " enable-dynamic-batch-tokenizer dynamic-batch-tokenizer-batch-size"
        " dynamic-batch-tokenizer-batch-timeout",
    ),
    (
        "streams follow OpenAI's format, one delta per step; leave it out.",
        "stream-output incremental-streaming-output",
    ),
    ("prompts that do not fit are refused with 400; shorten them.", "allow-auto-truncate"),
    ("give one --model for each, as `name=reference`.", "models"),
    (
        "edit config.json in a local copy of the model and serve that.",
        "json-model-override-args vision-config-overrides rope-type decrypted-config-file",
    ),
    (
        "give the folder, hub id or file as --model; for one part of an image model, as"
        " --model-override PART.weight_path=FILE.",
        "weight-path subfolder tokenizer-path huggingface-weight-revision model-checksum"
        " weight-version",
    ),
    ("the YAML file has one set of options, optionally under section names.", "section-name"),
    (_SCANNED, "custom-architectures custom-weight-loader forward-hooks"),
    (
        "weights are always mapped and streamed into place; leave it out.",
        "weight-loader-disable-mmap weight-loader-prefetch-checkpoints"
        " weight-loader-prefetch-num-threads model-loader-extra-config delete-ckpt-after-loading"
        " remote-instance-weight-loader-seed-instance-ip"
        " remote-instance-weight-loader-seed-instance-service-port"
        " remote-instance-weight-loader-send-weights-group-ports"
        " remote-instance-weight-loader-backend"
        " remote-instance-weight-loader-start-seed-via-transfer-engine"
        " checkpoint-engine-wait-weights-before-ready",
    ),
    ("send token ids to /v1/completions; text works beside them.", "skip-tokenizer-init"),
    ("name the device with --device gpu:N.", "base-gpu-id gpu-id-step"),
    (
        "defaults come from the model's generation_config.json; send others with each request.",
        "preferred-sampling-params sampling",
    ),
    (
        "use --chat-template with a file.",
        "hf-chat-template-name completion-template",
    ),
    (
        "fields of a request say how to sample it; no code is taken.",
        "enable-custom-logit-processor",
    ),
    ("hidden states do not leave the engine; ask for logprobs.", "enable-return-hidden-states"),
    (
        "models are not trained here; --enable-deterministic-inference repeats results bit by bit.",
        "rl-on-policy-target",
    ),
    ("run `triptych config`.", "pretty-print-config"),
    ("run `triptych serve` behind a proxy that strips the path.", "fastapi-root-path"),
    ("only HTTP is spoken; use the OpenAI endpoints.", "grpc-mode"),
    (
        "the model is loaded at start; `--load first-use` starts at once.",
        "skip-server-warmup warmups",
    ),
    ("there are no routes for administration; keys are given with --api-key.", "admin-api-key"),
    ("files are not stored; leave it out.", "file-storage-path"),
    ("use --log-format json and a field of your collector.", "log-prefix"),
    ("use --log-level for all of them.", "log-level-http"),
    (
        "each request is logged without content; --log-prompts adds it, --log-format json"
        " structures it.",
        "log-requests log-requests-level log-requests-format log-requests-target"
        " uvicorn-access-log-exclude-prefixes",
    ),
    (
        "use --log-level debug; content is never dumped to disk.",
        "crash-dump-folder show-time-cost decode-log-interval enable-request-time-stats-logging",
    ),
    ("NaN ends the one job it is in; other jobs go on.", "crash-on-nan"),
    (
        "read /metrics: its buckets and labels are fixed.",
        "prometheus-metrics-mode tokenizer-metrics-custom-labels-header"
        " tokenizer-metrics-allowed-custom-labels bucket-time-to-first-token"
        " bucket-inter-token-latency bucket-e2e-request-latency collect-tokens-histogram"
        " prompt-tokens-buckets generation-tokens-buckets gc-warning-threshold-secs"
        " enable-mfu-metrics export-metrics-to-file export-metrics-to-file-dir",
    ),
    (
        "traces are not exported; read /metrics and the log.",
        "enable-trace otlp-traces-endpoint oltp-traces-endpoint",
    ),
    (
        "use --min-stall-budget-s: a stalled engine is dumped and restarted.",
        "soft-watchdog-timeout",
    ),
    (
        "profile and dump from outside, with nsys, py-spy or torch's own tools.",
        "profiling enable-layerwise-nvtx-marker debug-tensor-dump-output-folder"
        " debug-tensor-dump-layers debug-tensor-dump-input-file debug-tensor-dump-inject"
        " msprobe-dump-config custom-sigquit-handler",
    ),
)

_VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {
        "half": "write float16.",
        "float": "write float32.",
        **dict.fromkeys(
            ("q4_k", "q4_0", "q6_k"), "give the GGUF file as --model; its type is recognised."
        ),
        **dict.fromkeys(
            ("float8_e4m3fn", "float4_e2m1fnx2", "gptq"),
            "these weights are not offered yet; use the model's bfloat16 or GGUF files.",
        ),
    },
    "max_batch_input_tokens": {"-1": "write --no-enable-chunked-prefill."},
    "kv_cache_format": {
        "bf16": "write bfloat16.",
        **dict.fromkeys(
            ("float8_e4m3fn", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"),
            "8 and 4 bit caches are not offered yet; use bfloat16.",
        ),
    },
    "prepend_prompt_speech_tokens": {
        "NEVER": "write never.",
        "ONCE": "write once.",
        "ROLLING": "write rolling.",
    },
    "model_impl": {"sglang": "write native.", "vllm": "write native."},
    "schedule_policy": dict.fromkeys(
        ("lpm", "random", "dfs-weight", "lof", "routing-key"),
        "use fcfs, or priority; cached prefixes are found in either order.",
    ),
}
"""Values peers accept for an option of ours that we do not: what to write instead."""


@once
def refused() -> Mapping[str, str]:
    """Reason (with the alternative) of each refused flag, standing ones not among them."""
    return {flag: reason for reason, names in _REFUSED for flag in _named(names)}


@once
def standing() -> Mapping[str, Fixed]:
    """Each standing flag's entry."""
    return {flag: entry for entry in STANDING for flag in entry.flags}


def reason(flag: str) -> str | None:
    """Why `flag` (`--x` or `--no-x`) is refused and what to do instead; None for any other."""
    positive = "--" + flag.removeprefix("--").removeprefix("no-")
    if positive in TRANSLATED:
        return f"write {TRANSLATED[positive]}."
    return refused().get(positive)


def value_reason(name: str, value: str) -> str | None:
    """What to write instead of a peer's `value` for our option `name`."""
    return _VALUES.get(name, {}).get(value)


def is_standing(flag: str, value: Any) -> bool:
    """Whether `flag: value` in a file says what happens anyway; raises ConfigError if not quite."""
    entry = standing().get(flag)
    if entry is not None:
        entry.check(flag, value)
    return entry is not None
