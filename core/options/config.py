"""Every option, declared once: its type, default, flags and help.

Owns the configuration. The command line, the YAML file, the environment (`TRIPTYCH_<NAME>`) and
`docs/options.md` are all made from these dataclasses; options of other servers that are not
offered are refused by name from the table in `core/options/refused.toml`. Where `roles` are named,
models of other kinds do not read the option, and `core/options/relevance.py` says so. Knows nothing
of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triptych.core.block_formats import BLOCK_ENCODINGS
from triptych.core.options.declaration import (
    ANSWERS,
    BOUND,
    COUNT,
    DURATION,
    SHARE,
    TEXT,
    TOKENS,
    Range,
    Role,
    option,
)
from triptych.core.options.media import ImageOptions, SpeechOptions, VisionOptions
from triptych.core.options.pipeline import PipelineOptions
from triptych.core.options.replicas import ReplicaOptions
from triptych.core.options.server import ServerOptions
from triptych.core.options.store import StoreOptions

__all__ = (
    "CacheOptions",
    "Config",
    "DebugOptions",
    "DeviceOptions",
    "ImageOptions",
    "ModelOptions",
    "PipelineOptions",
    "ReplicaOptions",
    "ScheduleOptions",
    "ServerOptions",
    "SpeechOptions",
    "StoreOptions",
    "VisionOptions",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which models, and how their weights are read."""

    model: tuple[str, ...] = option(
        (),
        "A hub id, a local folder, a GGUF file or a registry package; repeat for several models."
        " `name=reference` gives it a name of its own. With none, the embedded model is served.",
        aliases=("--model-path",),
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "The name(s) clients use for the model(s), in the order of `--model`; repeat for several."
        " Of a lone model, those after the first are other names; of several, `ALIAS=NAME` are.",
    )
    model_impl: str = option(
        "auto",
        "Which implementation runs a model: our decoder, transformers' through our paged cache,"
        " or whichever fits.",
        choices=("auto", "native", "transformers"),
        roles=TEXT,
    )
    dtype: str = option(
        "auto",
        "Weights and activations. `auto` keeps the checkpoint's own type where the device runs it.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization_encoding: str = option(
        "auto",
        "How weights are held. `auto`: as they are stored, but GGUF files of less than 256 MiB are"
        " taken out of their blocks."
        " float32, bfloat16 and float16 are those of `--dtype`, and take blocks apart. q8_0 to q4_0"
        " are GGUF's types: a file's own, or made of plain weights at load; an image model's"
        " autoencoder stays plain. The others are for checkpoints that are.",
        choices=(
            *("auto", "float32", "bfloat16", "float16"),
            *(*BLOCK_ENCODINGS, "float8_e4m3fn", "float4_e2m1fnx2", "gptq"),
        ),
    )
    model_override: tuple[str, ...] = option(
        (),
        "One field of one part of an image model, as PART.FIELD=VALUE; repeat for several. PART is"
        " its name in model_index.json; FIELD is `path` (a folder or hub id instead of the part's"
        " own), `weight_path` (a safetensors or GGUF file instead of its weights) or"
        " `quantization_encoding` (how to hold it: float32, bfloat16, float16, q8_0, q6_k, q4_k,"
        " q4_1, q4_0, or float8_e4m3fn for a file that is).",
        roles=("image",),
    )
    revision: str = option(
        "", "Branch, tag or commit of a hub model.", aliases=("--huggingface-model-revision",)
    )
    max_length: int = option(
        0,
        "Context length in tokens; 0 takes the model's own.",
        aliases=("--context-length",),
        within=BOUND,
        roles=TOKENS,
    )
    chat_template: str = option(
        "", "A file with a chat template instead of the model's own.", roles=("chat", "vision")
    )
    tool_call_parser: str = option(
        "auto",
        "Format in which a model writes calls of tools; auto goes by its chat template.",
        roles=("chat", "vision"),
    )
    reasoning_parser: str = option(
        "auto",
        "Format in which a model marks its reasoning, which answers return apart from their text:"
        " auto follows the chat template, none leaves reasoning in the text.",
        roles=("chat", "vision"),
    )
    reasoning_budget: int = option(
        -1,
        "Most reasoning tokens where a request has no `thinking_budget`; -1: any number.",
        within=Range(low=-1),
        roles=("chat", "vision"),
    )
    pool_embeddings: bool = option(
        True,
        "One vector per text from embedding models; without, one per token.",
        roles=("embedding",),
    )
    load: str = option(
        "startup", "Load models at start, or on first use.", choices=("startup", "first-use")
    )
    idle_unload_s: float = option(
        0.0, "Unload a model after so many idle seconds; 0 only when memory is short.", within=BOUND
    )
    cache_dir: str = option(
        "",
        "Where converted and downloaded weights are kept; empty: the user's cache folder.",
        aliases=("--download-dir",),
    )
    offline: bool = option(False, "Use only what is already in the cache.")
    bundle: str = option(
        "auto",
        "A bundle of `triptych warm-cache` to start from (there: the folder to write it to). auto:"
        " the one in the cache folder for these models, if any; none: start without.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Which device, and how much of its memory."""

    device: str = option(
        "auto",
        "cpu, gpu, gpu:N; auto and default take the first GPU, or the CPU where there is none.",
        aliases=("--devices",),
    )
    device_memory_utilization: float = option(
        0.9,
        "Share of the memory free at the server's start that weights and caches together may take"
        " (the KV cache gets free x share - weights). An engine that is started again has as much.",
        within=SHARE,
    )
    tensor_parallel_size: int = option(
        1,
        "Devices that a model is divided over, this many ranks in processes of their own: GPUs from"
        " the one that --device names on, or those of `--device gpu:0,1`; on a CPU they share its"
        " cores. For models on our own decoder.",
        aliases=("--tp", "--tp-size"),
        within=COUNT,
        roles=TEXT,
    )
    enable_expert_parallel: bool = option(
        False,
        "Of a mixture of experts that is divided, give each rank whole experts, instead of a part"
        " of each.",
        roles=TEXT,
    )
    cfg_parallel_size: int = option(
        1,
        "Ranks that share an image model's guidance branches: 2 run the guided and the unguided"
        " half of a step at once, and images without guidance in turns. Each holds the model.",
        within=Range(low=1, high=2),
        roles=("image",),
    )
    ulysses_degree: int = option(
        1,
        "Ranks that share the tokens of each run of an image model, and exchange heads for tokens"
        " in attention. Each holds the model. For FLUX's kind; with --cfg-parallel-size as many"
        " ranks as both multiplied.",
        aliases=("--usp", "--sp-degree"),
        within=COUNT,
        roles=("image",),
    )
    threads: int = option(
        0, "CPU threads of the engine; 0: one per core, within a CPU quota.", within=BOUND
    )
    cpu_kernels: str = option(
        "auto",
        "What computes a step on a CPU: our C kernels, compiled on first use and kept in the cache"
        " folder, or torch alone. `auto` takes torch where there is no C compiler.",
        choices=("auto", "native", "torch"),
        devices="cpu",
    )
    cpu_isa: str = option(
        "auto",
        "Instruction level of the CPU kernels; auto is the highest that the processor, the compiler"
        " and the system have.",
        choices=("auto", "amx", "avx512_bf16", "avx512", "avx2", "portable"),
        devices="cpu",
    )
    device_graph_capture: bool | None = option(
        None,
        "Capture steps once and replay them: tokens, frames of audio, denoising. `auto`: on a GPU."
        " On a CPU, where a step is one call anyway, replaying gains nothing; it is for tests.",
    )
    device_graph_rows: tuple[int, ...] = option(
        (),
        "Batch sizes that steps of tokens are captured for; smaller batches are filled up. Empty:"
        " powers of two and the sizes halfway between them.",
        aliases=("--cuda-graph-bs",),
        within=COUNT,
        roles=TOKENS,
    )
    device_graph_max_rows: int = option(
        0,
        "The largest batch that steps of tokens are captured for; 0: --max-batch-size.",
        aliases=("--cuda-graph-max-bs",),
        within=BOUND,
        roles=TOKENS,
    )
    device_graph_padding: bool = option(
        True,
        "Fill batches up to a captured size; without, only those of just that size are replayed.",
        roles=TOKENS,
    )
    enable_deterministic_inference: bool = option(
        False,
        "Start only where what a token gets cannot depend on what else is in its batch: with our"
        " own decoder and kernels, where on a CPU that holds anyway and a GPU's products are made"
        " in fixed tiles. Refused with --cpu-kernels torch, for models that transformers runs, and"
        " on a GPU for all but text models.",
    )
    seed: int = option(
        -1,
        "Seed of requests that bring none; -1 picks a new one for each.",
        aliases=("--random-seed",),
        within=Range(low=-1),
    )

    @property
    def num_image_ranks(self) -> int:
        """Ranks of an image model."""
        return self.cfg_parallel_size * self.ulysses_degree

    @property
    def num_devices(self) -> int:
        """The most devices that a model is on."""
        return max(self.tensor_parallel_size, self.num_image_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The paged key-value cache."""

    ROLES: ClassVar[tuple[Role, ...]] = TOKENS

    kv_cache_page_size: int = option(
        32, "Tokens per page.", aliases=("--page-size",), within=Range(low=1, is_power_of_two=True)
    )
    kv_cache_format: str = option(
        "auto",
        "Type of cached keys and values; `auto` follows the weights' compute type."
        " float8_e4m3fn and int8, with a scale for each token and head, take half of bfloat16's"
        " memory.",
        aliases=("--kv-cache-dtype",),
        choices=("auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8"),
    )
    kv_cache_memory_mb: int = option(
        0,
        "Upper bound of the cache of each model in MiB; 0: what memory and batch limits allow.",
        within=BOUND,
    )
    enable_prefix_caching: bool = option(True, "Reuse the pages of equal prompt beginnings.")
    max_vision_cache_entries: int = option(
        256,
        "Images whose features are kept for prompts to come; 0: only while they are in use.",
        within=BOUND,
        roles=("vision",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """Continuous batching and fairness."""

    max_batch_size: int = option(
        32,
        "Rows that may run at once.",
        aliases=("--max-running-requests",),
        within=COUNT,
        roles=TOKENS,
    )
    max_batch_input_tokens: int = option(
        1024,
        "Tokens that may pass through the model in one step; rows being answered are at most half"
        " as many.",
        aliases=("--chunked-prefill-size", "--prefill-chunk-size"),
        within=COUNT,
        roles=TOKENS,
    )
    max_batch_total_tokens: int = option(
        0,
        "Bound on the sum of the context lengths (rounded up to the page) of all rows in a step"
        " with prompts; 0: none.",
        within=BOUND,
        roles=TOKENS,
    )
    enable_chunked_prefill: bool = option(True, "Split prompts over steps.", roles=TOKENS)
    max_prompt_share: float = option(
        0.5,
        "Share of a step's input tokens that prompts may take while others are being answered.",
        within=SHARE,
        roles=ANSWERS,
    )
    max_step_s: float = option(
        0.06,
        "While other models have work, chunks of prompts and batches of images are cut so that a"
        " step takes about so long: what is urgent there waits for it. 0: by number alone.",
        within=BOUND,
    )
    target_first_token_s: float = option(
        1.0,
        "A prompt is due this long after it arrived, when several models compete.",
        within=DURATION,
        roles=("chat", "vision", "embedding"),  # speech is due when its listener needs it
    )
    target_inter_token_s: float = option(
        0.1,
        "A token is due this long after the one before it, when several models compete.",
        within=DURATION,
        roles=("chat", "vision"),
    )
    enable_in_flight_batching: bool = option(
        True,
        "Decode rows and prompt chunks share steps; off: prompts drain first.",
        aliases=("--enable-mixed-chunk",),
        roles=TOKENS,
    )
    kvcache_ce_watermark: float = option(
        0.95,
        "A prompt starts only while cache use stays below this share, or nothing else runs.",
        within=SHARE,
        roles=TOKENS,
    )
    max_preemptions: int = option(
        3,
        "After so many preemptions a job is protected: it restarts with all the cache it may need.",
        within=BOUND,
        roles=TOKENS,
    )
    max_queue_size: int = option(
        512,
        "Jobs that may wait; more are refused with 503. One of several API keys may have three"
        " times what it leaves free; beyond that it gets a 429.",
        aliases=("--max-queued-requests",),
        within=COUNT,
    )
    max_queue_tokens: int = option(
        0,
        "Tokens (prompt and requested output) that may be admitted at once; 0: no bound.",
        within=BOUND,
    )
    max_jobs_per_key: int = option(
        0, "Jobs one API key may have admitted at once; more get 429. 0: no bound.", within=BOUND
    )
    max_tokens_per_key: int = option(
        0, "Tokens one API key may have admitted at once; more get 429. 0: no bound.", within=BOUND
    )
    schedule_policy: str = option(
        "fcfs",
        "Order of waiting jobs: as they came, or those of the highest priority first.",
        choices=("fcfs", "priority"),
        roles=TOKENS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugOptions:
    """For tests and chaos drills."""

    sim_failure: float = option(
        0.0, "Percent of steps that fail on purpose.", within=Range(low=0, high=100)
    )
    debug_verify_replay: bool = option(
        False,
        "Run each captured step eagerly, too, before it is replayed; a result that differs in one"
        " bit fails the step. Several times slower.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The resolved configuration of one process tree."""

    models: ModelOptions = ModelOptions()
    device: DeviceOptions = DeviceOptions()
    cache: CacheOptions = CacheOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    speech: SpeechOptions = SpeechOptions()
    images: ImageOptions = ImageOptions()
    vision: VisionOptions = VisionOptions()
    server: ServerOptions = ServerOptions()
    store: StoreOptions = StoreOptions()
    replicas: ReplicaOptions = ReplicaOptions()
    pipeline: PipelineOptions = PipelineOptions()
    debug: DebugOptions = DebugOptions()
