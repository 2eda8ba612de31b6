"""Every option, declared once: its type, default, flags and help.

Owns the configuration. The command line, the YAML file, the environment (`TRIPTYCH_<NAME>`) and
`docs/options.md` are generated from these dataclasses. Unsupported options of other servers are
refused by name (`core/options/refused.toml`). An option with `roles` is read by models of these
kinds only; `core/options/relevance.py` reports its use with others. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.block_formats import BLOCK_ENCODINGS
from triptych.core.options.adapters import AdapterOptions
from triptych.core.options.cache import CacheOptions
from triptych.core.options.declaration import (
    BOUND,
    COUNT,
    DURATION,
    GENERATIVE,
    SHARE,
    TEXT,
    TOKENS,
    Range,
    option,
)
from triptych.core.options.media import ImageOptions, SpeechOptions, VisionOptions
from triptych.core.options.pipeline import PipelineOptions
from triptych.core.options.replicas import ReplicaOptions
from triptych.core.options.server import ServerOptions
from triptych.core.options.speculation import SpeculationOptions
from triptych.core.options.store import StoreOptions

__all__ = (
    "AdapterOptions",
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

LONGEST_PREFIX = "lpm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The models, and how their weights are loaded."""

    model: tuple[str, ...] = option(
        (),
        "A hub id, local folder, GGUF file or registry package; repeat for several models."
        " `name=reference` sets the name it is served under. Default: the embedded model.",
        aliases=("--model-path", "-m"),
        is_common=True,
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "Name that clients use for a model; repeat in the order of `--model`. With one model,"
        " further names are aliases; with several, write an alias as `ALIAS=NAME`.",
        aliases=("--alias", "-a"),
        is_common=True,
    )
    model_impl: str = option(
        "auto",
        "Implementation that runs a model: `native`, Triptych's own decoder; `transformers`, on"
        " the paged cache; `auto`: native for the architectures it knows.",
        choices=("auto", "native", "transformers"),
        roles=TEXT,
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations. `auto` keeps the checkpoint's type if the device"
        " supports it.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization_encoding: str = option(
        "auto",
        "Format of the weights in memory. `auto` keeps the stored format, except that GGUF files"
        " under 256 MiB are dequantized. float32, bfloat16 and float16 dequantize. q8_0 to mxfp4"
        " read GGUF blocks or quantize at load, and float8_e4m3fn quantizes image models at load on"
        " a GPU that multiplies it. The others need a checkpoint in that format.",
        choices=(
            *("auto", "float32", "bfloat16", "float16"),
            *(*BLOCK_ENCODINGS, "float8_e4m3fn", "float4_e2m1fnx2", "gptq"),
        ),
    )
    model_override: tuple[str, ...] = option(
        (),
        "One field of one component of an image model, as PART.FIELD=VALUE; repeat for several."
        " PART is its name in model_index.json; FIELD is `path`, `weight_path` or"
        " `quantization_encoding` (see docs/images.md).",
        roles=("image",),
    )
    revision: str = option(
        "", "Branch, tag or commit of a hub model.", aliases=("--huggingface-model-revision",)
    )
    max_length: int = option(
        0,
        "Context length in tokens; 0: the model's own.",
        aliases=("--context-length", "--max-model-len", "--ctx-size", "-c"),
        within=BOUND,
        roles=TOKENS,
        is_common=True,
    )
    chat_template: str = option(
        "",
        "File with a chat template that replaces the model's own.",
        aliases=("--chat-template-file",),
        roles=("chat", "vision"),
    )
    default_chat_template_kwargs: str = option(
        "",
        "Values for chat templates, as a JSON object: those that a request does not set in"
        " `chat_template_kwargs` or by a field of its own.",
        aliases=("--chat-template-kwargs",),
        roles=("chat", "vision"),
    )
    tool_call_parser: str = option(
        "auto",
        "Format in which the model writes tool calls. `auto` follows the chat template.",
        roles=("chat", "vision"),
    )
    reasoning_parser: str = option(
        "auto",
        "Format in which the model marks its reasoning, which is returned separately from the"
        " answer. `auto` follows the chat template; `none` leaves reasoning in the text.",
        roles=("chat", "vision"),
    )
    reasoning_budget: int = option(
        -1,
        "Maximum reasoning tokens for requests without `thinking_budget`; -1: no limit.",
        within=Range(low=-1),
        roles=("chat", "vision"),
    )
    pool_embeddings: bool = option(
        True,
        "Embedding models return one vector per text; off: one per token.",
        roles=("embedding",),
    )
    load: str = option(
        "startup", "Load models at start or on first use.", choices=("startup", "first-use")
    )
    idle_unload_s: float = option(
        0.0,
        "Unload a model after this many idle seconds; 0: only when memory is short.",
        aliases=("--sleep-idle-seconds",),
        within=BOUND,
    )
    cache_dir: str = option(
        "",
        "Folder for downloaded and converted weights; empty: the user's cache folder.",
        aliases=("--download-dir",),
    )
    hf_token: str = option(
        "",
        "Access token for gated and private models of the hub; empty: that of `HF_TOKEN` or of `hf"
        " auth login`. A command line is visible to other users: prefer the environment.",
        aliases=("-hft",),
    )
    offline: bool = option(False, "Use only files that are already in the cache.")
    bundle: str = option(
        "auto",
        "A bundle of `triptych warm-cache` to start from (for that command: the folder to write)."
        " `auto`: the bundle for these models in the cache folder, if any; `none`: no bundle.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """The devices, their memory and kernels."""

    device: str = option(
        "auto",
        "`cpu`, `gpu` or `gpu:N`; `auto` and `default` take the first GPU, or the CPU if there is"
        " none.",
        aliases=("--devices",),
        is_common=True,
    )
    device_memory_utilization: float = option(
        0.9,
        "Share of the memory free at server start that weights and caches may use together (KV"
        " cache = free x share - weights). A restarted engine gets the same amount.",
        aliases=("--gpu-memory-utilization",),
        within=SHARE,
        is_common=True,
    )
    tensor_parallel_size: int = option(
        1,
        "Number of devices a model is split over, one process per rank. On GPUs: those from"
        " --device on, or a list such as `--device gpu:0,1`. On a CPU the ranks share its cores."
        " Needs the native decoder.",
        aliases=("--tp", "--tp-size", "-tp"),
        within=COUNT,
        roles=TEXT,
        is_common=True,
    )
    enable_expert_parallel: bool = option(
        False,
        "With --tensor-parallel-size, give each rank whole experts of a mixture-of-experts model"
        " instead of a slice of each.",
        roles=TEXT,
    )
    cfg_parallel_size: int = option(
        1,
        "Ranks that share the guidance branches of an image model: with 2, the conditional and"
        " unconditional halves of a step run in parallel, and images without guidance alternate."
        " Each rank holds the model.",
        within=Range(low=1, high=2),
        roles=("image",),
    )
    ulysses_degree: int = option(
        1,
        "Ranks that share the tokens of an image model (Ulysses sequence parallelism). Each rank"
        " holds the model. For FLUX-like models; multiplies with --cfg-parallel-size.",
        aliases=("--usp", "--sp-degree"),
        within=COUNT,
        roles=("image",),
    )
    threads: int = option(
        0,
        "CPU threads of the engine; 0: one per core, within the CPU quota.",
        aliases=("-t",),
        within=BOUND,
    )
    cpu_kernels: str = option(
        "auto",
        "CPU kernels: `native` compiles C kernels on first use and caches them; `torch` uses"
        " torch alone. `auto`: native if there is a C compiler.",
        choices=("auto", "native", "torch"),
        devices="cpu",
    )
    cpu_isa: str = option(
        "auto",
        "Instruction set of the CPU kernels. `auto`: the highest that processor, compiler and"
        " operating system support.",
        choices=("auto", "amx", "avx512_bf16", "avx512", "avx2", "portable"),
        devices="cpu",
    )
    cpu_offload_gb: float = option(
        0.0,
        "GiB of a text model's last layers that stay in host memory, copied in each step; 0: none.",
        devices="gpu",
        within=BOUND,
        roles=("chat", "embedding"),
    )
    share_weights: bool | None = option(
        None,
        "Keep weights of text and vision models, packed for the native CPU kernels, in files of the"
        " cache folder: later starts pack none, and processes that map a file share one copy."
        " `auto`: mapped where huge pages hold files, so that steps are as fast.",
        devices="cpu",
        roles=TEXT,
    )
    shared_weights_gb: float = option(
        0.0,
        "GiB of disk for these files, of which those unused for longest give way; 0: 50, or a"
        " quarter of the free space if that is less.",
        devices="cpu",
        within=BOUND,
        roles=TEXT,
    )
    device_graph_capture: bool | None = option(
        None,
        "Capture steps (tokens, audio frames, denoising) once and replay them. `auto`: on GPUs."
        " On a CPU there is nothing to gain; it is for tests.",
    )
    device_graph_rows: tuple[int, ...] = option(
        (),
        "Batch sizes to capture token steps for; smaller batches are padded. Default: powers of"
        " two and the sizes halfway between them.",
        aliases=("--cuda-graph-bs", "--cuda-graph-bs-decode"),
        within=COUNT,
        roles=TOKENS,
    )
    device_graph_max_rows: int = option(
        0,
        "Largest batch to capture token steps for; 0: --max-batch-size.",
        aliases=(
            "--cuda-graph-max-bs",
            "--cuda-graph-max-bs-decode",
            "--max-cudagraph-capture-size",
        ),
        within=BOUND,
        roles=TOKENS,
    )
    device_graph_padding: bool = option(
        True,
        "Pad batches to a captured size; off: only batches of exactly a captured size are"
        " replayed.",
        roles=TOKENS,
    )
    device_graph_prompts: bool = option(
        False,
        "Also capture steps with up to 1,024 prompt tokens, if launching them takes most of their"
        " time. For text models on the native decoder, on one device.",
        devices="gpu",
        roles=("chat", "embedding"),
    )
    attention_backend: str = option(
        "auto",
        "Kernels of attention: `triton`, ours, hold every model; `flash` is torch's"
        " FlashAttention for prompts of native bfloat16 and float16 models, on CUDA devices of"
        " compute capability 8.0 or more, and not with --enable-deterministic-inference. `auto`:"
        " triton.",
        choices=("auto", "triton", "flash"),
        devices="gpu",
        roles=("chat", "embedding"),
    )
    enable_deterministic_inference: bool = option(
        False,
        "Start only if a token's result cannot depend on the rest of its batch. Requires the"
        " native decoder and kernels; on a GPU, text models only (docs/deterministic.md).",
    )
    seed: int = option(
        -1,
        "Seed for requests without one; -1: a new random seed for each.",
        aliases=("--random-seed", "-s"),
        within=Range(low=-1),
    )

    @property
    def num_image_ranks(self) -> int:
        """The number of ranks of an image model."""
        return self.cfg_parallel_size * self.ulysses_degree

    @property
    def num_devices(self) -> int:
        """The most devices that any one model uses."""
        return max(self.tensor_parallel_size, self.num_image_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """Continuous batching and fairness."""

    max_batch_size: int = option(
        0,
        "Maximum number of rows that run at once; 0: 32 on a CPU, 32 to 256 on a GPU by the memory"
        " that weights leave.",
        aliases=("--max-running-requests", "--max-num-seqs", "--parallel", "-np"),
        within=BOUND,
        roles=TOKENS,
        is_common=True,
    )
    max_batch_input_tokens: int = option(
        0,
        "Maximum tokens that pass through the model in one step; decoding rows take at most half"
        " of them; 0: 1,024 on a CPU, 1,024 to 8,192 on a GPU by the memory that weights leave.",
        aliases=("--chunked-prefill-size", "--prefill-chunk-size", "--max-num-batched-tokens"),
        within=BOUND,
        roles=TOKENS,
    )
    max_batch_total_tokens: int = option(
        0,
        "Limit on the sum of context lengths (rounded up to the page size) of all rows in a step"
        " that contains prompts; 0: no limit.",
        within=BOUND,
        roles=TOKENS,
    )
    enable_chunked_prefill: bool = option(True, "Split prompts over several steps.", roles=TOKENS)
    max_prompt_share: float = option(
        0.5,
        "Share of a step's input tokens that prompts may take while other rows decode.",
        within=SHARE,
        roles=GENERATIVE,
    )
    long_prefill_token_threshold: int = option(
        0,
        "Maximum tokens of one prompt in a step, also while no other prompt waits; 0: half of the"
        " step while prompts with less work wait, else all of it.",
        within=BOUND,
        roles=TOKENS,
    )
    max_num_partial_prefills: int = option(
        0,
        "Prompts that may be partly computed at once; others begin only if they fit into the rest"
        " of a step. 0: no limit.",
        within=BOUND,
        roles=TOKENS,
    )
    max_step_s: float = option(
        0.06,
        "While other models or clients have work, prompt chunks and image batches are cut so that"
        " a step takes about this long; 0: no time limit at all.",
        within=BOUND,
    )
    target_first_token_s: float = option(
        1.0,
        "Deadline of a prompt after its arrival, used when several models compete. A step with"
        " prompts takes about a quarter of it.",
        within=DURATION,
        roles=("chat", "vision", "embedding"),  # speech has playback deadlines
    )
    target_inter_token_s: float = option(
        0.1,
        "Deadline of a token after the previous one, used when several models compete.",
        within=DURATION,
        roles=("chat", "vision"),
    )
    enable_in_flight_batching: bool = option(
        True,
        "Mix decode rows and prompt chunks in one step; off: prompts run first.",
        aliases=("--enable-mixed-chunk",),
        roles=TOKENS,
    )
    kvcache_ce_watermark: float = option(
        0.95,
        "Start a prompt only while cache use stays below this share, or if nothing else runs.",
        within=SHARE,
        roles=TOKENS,
    )
    max_preemptions: int = option(
        3,
        "After this many preemptions a job is protected: it restarts with all the cache it may"
        " need.",
        within=BOUND,
        roles=TOKENS,
    )
    max_queue_size: int = option(
        512,
        "Jobs that may wait; more are refused with 503. With several API keys, one key may hold"
        " three times what it leaves free and gets 429 beyond that.",
        aliases=("--max-queued-requests", "--max-num-queued-reqs"),
        within=COUNT,
    )
    max_queue_tokens: int = option(
        0,
        "Tokens (prompt plus requested output) admitted at once; 0: no limit.",
        aliases=("--max-num-queued-tokens",),
        within=BOUND,
    )
    max_jobs_per_key: int = option(
        0,
        "Jobs that one API key may have admitted at once; more get 429. 0: no limit.",
        within=BOUND,
    )
    max_tokens_per_key: int = option(
        0,
        "Tokens that one API key may have admitted at once; more get 429. 0: no limit.",
        within=BOUND,
    )
    schedule_policy: str = option(
        "fcfs",
        "Order of a client's waiting jobs: first come, first served; `lpm`, longest prefix match"
        " first, among the first 128 that wait; or `priority`, lowest `priority` value first, which"
        " also goes before other clients.",
        aliases=("--scheduling-policy",),
        choices=("fcfs", LONGEST_PREFIX, "priority"),
        roles=TOKENS,
    )
    schedule_low_priority_values_first: bool = option(
        True,
        "With --schedule-policy priority, lower values run first, as in vLLM; off: higher ones, as"
        " in SGLang.",
        roles=TOKENS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugOptions:
    """Switches for tests and fault drills."""

    sim_failure: float = option(
        0.0, "Percentage of steps that fail on purpose.", within=Range(low=0, high=100)
    )
    debug_verify_replay: bool = option(
        False,
        "Also run each captured step eagerly before its replay, and fail the step if the results"
        " differ in any bit. Several times slower.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The resolved configuration of one process tree."""

    models: ModelOptions = ModelOptions()
    device: DeviceOptions = DeviceOptions()
    cache: CacheOptions = CacheOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    speculation: SpeculationOptions = SpeculationOptions()
    speech: SpeechOptions = SpeechOptions()
    images: ImageOptions = ImageOptions()
    adapters: AdapterOptions = AdapterOptions()
    vision: VisionOptions = VisionOptions()
    server: ServerOptions = ServerOptions()
    store: StoreOptions = StoreOptions()
    replicas: ReplicaOptions = ReplicaOptions()
    pipeline: PipelineOptions = PipelineOptions()
    debug: DebugOptions = DebugOptions()
