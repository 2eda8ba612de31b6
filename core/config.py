"""Every option, declared once: its type, default, flags and help.

Owns the configuration. The command line, the YAML file, the environment (`TRIPTYCH_<NAME>`) and
`docs/options.md` are all made from these dataclasses; options of other servers that are not
offered are refused by name from the table in `core/refused.py`. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.option import BOUND, COUNT, DURATION, SHARE, Range, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which models, and how their weights are read."""

    model: tuple[str, ...] = option(
        (),
        "A hub id, a local folder, a GGUF file or a registry package; repeat for several models."
        " `name=reference` gives it a name of its own. With none, the embedded model is served.",
        flags=("--model-path",),
    )
    served_model_name: tuple[str, ...] = option(
        (), "The name(s) clients use for the model(s), in the order of `--model`."
    )
    model_impl: str = option(
        "auto",
        "Which implementation runs a model: our decoder, transformers' through our paged cache,"
        " or whichever fits.",
        choices=("auto", "native", "transformers"),
    )
    dtype: str = option(
        "auto",
        "Weights and activations. `auto` keeps the checkpoint's own type where the device runs it.",
        flags=("--quantization-encoding",),
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    model_override: tuple[str, ...] = option(
        (),
        "One field of one part of an image model, as PART.FIELD=VALUE; repeat for several. PART is"
        " its name in model_index.json; FIELD is `path` (a folder or hub id instead of the part's"
        " own), `weight_path` (a safetensors or GGUF file instead of its weights) or"
        " `quantization_encoding` (float32, bfloat16 or float16, to hold it in).",
    )
    revision: str = option(
        "", "Branch, tag or commit of a hub model.", flags=("--huggingface-model-revision",)
    )
    max_length: int = option(
        0,
        "Context length in tokens; 0 takes the model's own.",
        flags=("--context-length",),
        within=BOUND,
    )
    chat_template: str = option("", "A file with a chat template instead of the model's own.")
    pool_embeddings: bool = option(
        True, "One vector per text from embedding models; without, one per token."
    )
    load: str = option(
        "startup", "Load models at start, or on first use.", choices=("startup", "first-use")
    )
    idle_unload_s: float = option(
        0.0,
        "Unload a model after so many idle seconds; 0 only when memory is short.",
        within=BOUND,
    )
    cache_dir: str = option(
        "",
        "Where converted and downloaded weights are kept; empty: the user's cache folder.",
        flags=("--download-dir",),
    )
    offline: bool = option(False, "Use only what is already in the cache.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Which device, and how much of its memory."""

    device: str = option("auto", "auto, cpu, gpu or gpu:N.", flags=("--devices",))
    device_memory_utilization: float = option(
        0.9,
        "Share of the memory free at start that weights and caches together may take"
        " (the KV cache gets free x share - weights).",
        within=SHARE,
    )
    threads: int = option(0, "CPU threads of the engine; 0: one per core.", within=BOUND)
    cpu_kernels: str = option(
        "auto",
        "What computes a step on a CPU: our C kernels, compiled on first use and kept in the cache"
        " folder, or torch alone. `auto` takes torch where there is no C compiler.",
        choices=("auto", "native", "torch"),
        devices="cpu",
    )
    cpu_isa: str = option(
        "auto",
        "Highest instruction level of the CPU kernels; auto is the highest that this processor and"
        " compiler have.",
        choices=("auto", "amx", "avx512_bf16", "avx512", "avx2", "portable"),
        devices="cpu",
    )
    seed: int = option(
        -1,
        "Seed of requests that bring none; -1 draws a new one for each.",
        flags=("--random-seed",),
        within=Range(low=-1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The paged key-value cache."""

    kv_cache_page_size: int = option(
        32, "Tokens per page.", flags=("--page-size",), within=Range(low=1, is_power_of_two=True)
    )
    kv_cache_format: str = option(
        "auto",
        "Type of cached keys and values; `auto` follows the weights' compute type.",
        flags=("--kv-cache-dtype",),
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_memory_mb: int = option(
        0,
        "Upper bound of the cache of each model in MiB; 0: what memory and batch limits allow.",
        within=BOUND,
    )
    enable_prefix_caching: bool = option(True, "Reuse the pages of equal prompt beginnings.")
    max_vision_cache_entries: int = option(
        256,
        "Pictures whose features are kept for prompts to come; 0: only while they are in use.",
        within=BOUND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """Continuous batching and fairness."""

    max_batch_size: int = option(
        32, "Rows that may run at once.", flags=("--max-running-requests",), within=COUNT
    )
    max_batch_input_tokens: int = option(
        1024,
        "Tokens that may pass through the model in one step; rows being answered are at most half"
        " as many.",
        flags=("--chunked-prefill-size", "--prefill-chunk-size"),
        within=COUNT,
    )
    max_batch_total_tokens: int = option(
        0,
        "Bound on the sum of the context lengths (rounded up to the page) of all rows in a step"
        " with prompts; 0: none.",
        within=BOUND,
    )
    enable_chunked_prefill: bool = option(True, "Split prompts over steps.")
    max_prompt_share: float = option(
        0.5,
        "Share of a step's input tokens that prompts may take while others are being answered.",
        within=SHARE,
    )
    max_step_s: float = option(
        0.06,
        "While other models have work, chunks of prompts and batches of pictures are cut so that a"
        " step takes about so long: what is urgent there waits for it. 0: by number alone.",
        within=BOUND,
    )
    target_first_token_s: float = option(
        1.0,
        "A prompt is due this long after it arrived, when several models compete.",
        within=DURATION,
    )
    target_inter_token_s: float = option(
        0.1,
        "A token is due this long after the one before it, when several models compete.",
        within=DURATION,
    )
    enable_in_flight_batching: bool = option(
        True,
        "Decode rows and prompt chunks share steps; off: prompts drain first.",
        flags=("--enable-mixed-chunk",),
    )
    kvcache_ce_watermark: float = option(
        0.95,
        "A prompt starts only while cache use stays below this share, or nothing else runs.",
        within=SHARE,
    )
    max_preemptions: int = option(
        3,
        "After so many preemptions a job is protected: it restarts with all the cache it may need.",
        within=BOUND,
    )
    max_queue_size: int = option(
        512,
        "Jobs that may wait; more are refused with 503.",
        flags=("--max-queued-requests",),
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
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions:
    """Speech that is made while it is listened to."""

    audio_decoder: str = option(
        "", "The local folder of a codec for a speech-token model; empty: the model's own codec."
    )
    audio_decoder_weights: str = option(
        "", "A safetensors file with the codec's weights instead of its folder's."
    )
    audio_decoder_config: str = option(
        "", "A JSON file with fields to set in the codec's configuration."
    )
    chunk_size: tuple[int, ...] = option(
        (),
        "Codec frames decoded at a time: one number, or one for each chunk in turn, of which the"
        " last repeats. Without it a stream's first chunk is as small as can be, and later ones"
        " grow as far as its listener's buffer allows.",
        within=COUNT,
    )
    buffer: int = option(
        0,
        "Codec frames before a chunk that are decoded again with it, for their context alone;"
        " decoders that keep their state need none.",
        within=BOUND,
    )
    block_causal: bool = option(
        False, "Frames decoded again for their context do not see the chunk that follows them."
    )
    prepend_prompt_speech_tokens: str = option(
        "never",
        "Let the audio decoder hear the voice's own clip before its first chunk (once), and a"
        " windowed decoder before later ones too, while its context is not full (rolling).",
        choices=("never", "once", "rolling"),
    )
    prepend_prompt_speech_tokens_causal: bool = option(
        False, "Frames of the voice's clip do not see the chunk that follows them."
    )
    max_speech_characters: int = option(
        4096, "Longest text of one request over HTTP to speak, as OpenAI's.", within=COUNT
    )
    max_streams: int = option(32, "Voices that may speak at once; others wait.", within=COUNT)
    target_first_audio_s: float = option(
        0.3, "The first audio of a stream is due this long after its request.", within=DURATION
    )
    max_lead_s: float = option(
        0.0,
        "Speech is made no further ahead of its listener than this; 0: as far as the device has"
        " time for.",
        within=BOUND,
    )
    ce_delay_ms: float = option(
        0.0, "How long a first prompt may wait for others to share its step.", within=BOUND
    )
    enable_prioritize_first_decode: bool = option(
        False, "Who was just let in gets its first audio before the next prompt is let in."
    )
    max_queue_size_tg: int = option(
        0, "Speech-token rows that may run at once; 0: as --max-batch-size.", within=BOUND
    )
    min_batch_size_tg: int = option(
        0,
        "While fewer speech-token rows run, waiting prompts go before them, as far as no listener"
        " has to wait for it.",
        within=BOUND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Pictures that are drawn: which steps run the model. A request may ask for another cache."""

    step_cache: str = option(
        "auto",
        "What lets a picture skip steps. `planned`: steps chosen beforehand by `triptych"
        " calibrate`; `auto`: so where the model was calibrated, else no step is skipped.",
        choices=("auto", "off", "planned", "teacache", "first-block", "taylorseer", "magcache"),
    )
    step_cache_min_psnr_db: float = option(
        32.0,
        "Plans skip as many steps as leave nine of ten calibration pictures at least so close to"
        " their uncached selves.",
        within=BOUND,
    )
    teacache: bool = option(False, "The same as --step-cache teacache.")
    teacache_rel_l1_thresh: float = option(
        0.0,
        "TeaCache computes once the estimated change adds up to this; 0: what suits the model's"
        " coefficients.",
        within=BOUND,
    )
    teacache_coefficients: tuple[float, ...] = option(
        (),
        "TeaCache's polynomial, highest power first, as in --teacache-coefficients=-450,280,3.2."
        " Without it: the calibrated or the published one.",
        within=Range(low=-1e6, high=1e6),
    )
    first_block_caching: bool = option(
        False,
        "The same as --step-cache first-block. With --taylorseer, what is skipped is extrapolated"
        " with --taylorseer-max-order.",
    )
    residual_threshold: float = option(
        0.05,
        "First-block caching computes once the first block's residual moved by more than this.",
        within=BOUND,
    )
    taylorseer: bool = option(False, "The same as --step-cache taylorseer.")
    taylorseer_cache_interval: int = option(
        5, "TaylorSeer computes every so many steps.", within=COUNT
    )
    taylorseer_max_order: int = option(
        1, "Degree of TaylorSeer's extrapolation.", within=Range(low=0, high=3)
    )
    taylorseer_warmup_steps: int = option(9, "First steps that TaylorSeer computes.", within=COUNT)
    max_images_in_flight: int = option(
        16, "Pictures that may be drawn at once; others wait.", within=COUNT
    )
    max_image_rows: int = option(
        16,
        "Rows in one run of an image model: a picture is one, or two with guidance. How many there"
        " are follows what runs were measured to take.",
        within=COUNT,
    )
    image_memory_mb: int = option(
        0,
        "MiB that pictures in flight may hold between their steps; 0: what memory allows.",
        within=BOUND,
    )
    max_image_pixels: int = option(
        3840 * 2160, "Most pixels of one picture, where its model can draw so many.", within=COUNT
    )
    image_store_mb: int = option(
        256,
        "MiB of memory for pictures that are answered as links; the oldest give way.",
        within=BOUND,
    )
    image_store_ttl_s: float = option(
        3600.0, "How long a picture that was answered as a link is kept.", within=DURATION
    )
    enable_lora: bool = option(
        True, "Take requests for adapters of --lora-paths; off: none is loaded, all are refused."
    )
    lora_paths: tuple[str, ...] = option(
        (),
        "A LoRA for the image model that requests may ask for: a safetensors file, a folder or a"
        " hub id; repeat for several. `name=place` gives it a name of its own.",
    )
    max_lora_rank: int = option(
        0, "Highest rank of an adapter that is taken; 0: any.", within=BOUND
    )
    max_num_loras: int = option(
        8,
        "Different adapters in one run of the model; of more, pictures wait for the next run.",
        flags=("--max-loras-per-batch",),
        within=COUNT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    """Pictures that are looked at."""

    max_pictures: int = option(16, "Pictures in one chat.", within=BOUND)
    max_picture_pixels: int = option(
        2**22,
        "A picture with more pixels is scaled down to so many before the model's own processor"
        " has it.",
        within=Range(low=2**16),
    )
    prepared_pictures_mb: int = option(
        256,
        "MiB of memory for pictures as their model takes them: one that comes again is neither"
        " decoded nor processed again.",
        within=BOUND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The HTTP server and its processes."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on.", within=Range(low=0, high=65535))
    api_key: tuple[str, ...] = option((), "Accepted API key; repeat for several.")
    api_key_file: str = option("", "File with one accepted API key per line.")
    cors_origin: tuple[str, ...] = option((), "Origin allowed to call from a browser.")
    max_request_bytes: int = option(
        4 * 2**20, "Largest request body, files in it not counted.", within=COUNT
    )
    max_picture_request_bytes: int = option(
        64 * 2**20,
        "Largest body of a chat with the pictures in it, as data URLs (4/3 of a file's size).",
        within=COUNT,
    )
    max_upload_bytes: int = option(
        26 * 2**20, "Largest form with a file in it, such as sound to transcribe.", within=COUNT
    )
    num_decode_children: int = option(
        2,
        "Limited processes (25 MiB each, started when needed) that decode uploaded files.",
        within=COUNT,
    )
    max_voices_per_key: int = option(
        32, "Voices that one API key may make from recordings.", within=BOUND
    )
    max_voices: int = option(
        1024, "Voices made from recordings that are kept in all.", within=BOUND
    )
    media_domains: tuple[str, ...] = option(
        (),
        "A host that pictures may be fetched from when a request names their URL; `*.` in front:"
        " all below it, `*`: any. Repeat for several. With none, nothing is fetched.",
        flags=("--allowed-media-domains",),
    )
    media_timeout_s: float = option(
        5.0, "Longest time that fetching one picture may take.", within=DURATION
    )
    public_url: str = option(
        "",
        "Address under which clients reach this server, for links to pictures; empty: the one that"
        " a request came to.",
    )
    request_timeout_s: float = option(600.0, "Longest time one request may take.", within=DURATION)
    stream_timeout_s: float = option(
        30.0, "How long a client may stop reading its stream.", within=DURATION
    )
    heartbeat_s: float = option(
        15.0, "A comment is sent after so many silent seconds of a stream.", within=DURATION
    )
    drain_timeout_s: float = option(
        30.0, "How long SIGTERM waits for requests in flight.", within=BOUND
    )
    share_prefix_across_keys: bool = option(
        False, "Let different API keys reuse each other's cached prompts (a timing side channel)."
    )
    zmq_endpoint_base: str = option(
        "", "Folder for the engine's sockets; empty: a private temporary one."
    )
    headless: bool = option(False, "Run the engine without an API process.")
    external_engine: bool = option(
        False, "Run the API without an engine of its own (see headless)."
    )
    log_level: str = option(
        "info", "Least serious log lines shown.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "Log lines as text or JSON.", choices=("text", "json"))
    log_prompts: bool = option(False, "Write prompts and answers to the log.")
    min_stall_budget_s: float = option(
        10.0,
        "A loop without progress for longer than this (and 20 slow steps) is restarted.",
        flags=("--watchdog-timeout",),
        within=DURATION,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugOptions:
    """For tests and chaos drills."""

    sim_failure: float = option(
        0.0, "Percent of steps that fail on purpose.", within=Range(low=0, high=100)
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
    debug: DebugOptions = DebugOptions()
