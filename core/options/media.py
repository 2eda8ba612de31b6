"""The options of speech, of image generation and of vision.

Owns three sections of the configuration. The rules of `core.options.config` apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triptych.core.options.declaration import BOUND, COUNT, DURATION, Range, Role, option


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions:
    """Streaming speech synthesis."""

    ROLES: ClassVar[tuple[Role, ...]] = ("speech",)

    audio_decoder: str = option(
        "", "Local folder of a codec for a speech-token model; empty: the model's own codec."
    )
    audio_decoder_weights: str = option(
        "", "Safetensors file that replaces the weights in the codec's folder."
    )
    audio_decoder_config: str = option(
        "", "JSON file with fields to override in the codec's configuration."
    )
    chunk_size: tuple[int, ...] = option(
        (),
        "Codec frames per decoded chunk: one number, or one per chunk in turn, the last of which"
        " repeats. Default: the first chunk is as small as possible, and later ones grow with the"
        " listener's buffer.",
        within=COUNT,
    )
    buffer: int = option(
        0,
        "Codec frames before a chunk that are decoded again with it as context. Streaming"
        " decoders need none.",
        within=BOUND,
    )
    block_causal: bool = option(
        False, "Context frames that are decoded again do not attend to the chunk after them."
    )
    prepend_prompt_speech_tokens: str = option(
        "never",
        "Give the audio decoder the voice's reference clip before the first chunk (once); with"
        " `rolling`, a windowed decoder also gets it before later chunks, until its context is"
        " full.",
        choices=("never", "once", "rolling"),
    )
    prepend_prompt_speech_tokens_causal: bool = option(
        False, "Frames of the reference clip do not attend to the chunk after them."
    )
    max_speech_characters: int = option(
        4096,
        "Maximum characters of the text in one speech request over HTTP; OpenAI's limit by"
        " default.",
        within=COUNT,
    )
    max_streams: int = option(
        32, "Maximum number of voices that speak at once; further requests wait.", within=COUNT
    )
    target_first_audio_s: float = option(
        0.3, "Deadline of a stream's first audio after its request.", within=DURATION
    )
    max_lead_s: float = option(
        0.0,
        "Maximum seconds that synthesis runs ahead of playback; 0: as far as the device has time"
        " for.",
        within=BOUND,
    )
    ce_delay_ms: float = option(
        0.0, "Longest time a new prompt waits for others to share its step.", within=BOUND
    )
    enable_prioritize_first_decode: bool = option(
        False,
        "Produce the first audio of a newly admitted request before the next prompt is admitted.",
    )
    max_queue_size_tg: int = option(
        0,
        "Maximum number of speech-token rows that run at once; 0: --max-batch-size.",
        within=BOUND,
    )
    min_batch_size_tg: int = option(
        0,
        "While fewer speech-token rows run, waiting prompts go first, unless a listener's buffer"
        " would run dry.",
        within=BOUND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Image generation. A request may choose another step cache."""

    ROLES: ClassVar[tuple[Role, ...]] = ("image",)

    step_cache: str = option(
        "auto",
        "Method that skips denoising steps. `planned`: the steps chosen by `triptych calibrate`;"
        " `auto`: `planned` if the model was calibrated, else `off`.",
        choices=("auto", "off", "planned", "teacache", "first-block", "taylorseer", "magcache"),
    )
    step_cache_min_psnr_db: float = option(
        32.0,
        "Quality limit of a plan: nine of ten calibration images stay at least this close to"
        " their uncached version.",
        within=BOUND,
    )
    teacache: bool = option(False, "Same as --step-cache teacache.")
    teacache_rel_l1_thresh: float = option(
        0.0,
        "TeaCache recomputes when the accumulated estimated change reaches this; 0: a threshold"
        " that suits the model's coefficients.",
        within=BOUND,
    )
    teacache_coefficients: tuple[float, ...] = option(
        (),
        "TeaCache's polynomial, highest power first, as in --teacache-coefficients=-450,280,3.2."
        " Default: the calibrated or the published coefficients.",
        within=Range(low=-1e6, high=1e6),
    )
    first_block_caching: bool = option(
        False,
        "Same as --step-cache first-block. With --taylorseer, skipped steps are extrapolated to"
        " order --taylorseer-max-order.",
    )
    residual_threshold: float = option(
        0.05,
        "First-block caching recomputes when the first block's residual has changed by more than"
        " this.",
        within=BOUND,
    )
    taylorseer: bool = option(False, "Same as --step-cache taylorseer.")
    taylorseer_cache_interval: int = option(5, "TaylorSeer computes every Nth step.", within=COUNT)
    taylorseer_max_order: int = option(
        1, "Order of TaylorSeer's extrapolation.", within=Range(low=0, high=3)
    )
    taylorseer_warmup_steps: int = option(
        9, "First steps that TaylorSeer always computes.", within=COUNT
    )
    max_images_in_flight: int = option(
        16, "Maximum number of images generated at once; further ones wait.", within=COUNT
    )
    max_image_rows: int = option(
        16,
        "Maximum rows in one run of an image model: one per image, two with guidance. The actual"
        " number follows measured run times.",
        within=COUNT,
    )
    image_memory_mb: int = option(
        0,
        "MiB that images in flight may hold between steps; 0: what memory allows.",
        within=BOUND,
    )
    max_image_pixels: int = option(
        3840 * 2160,
        "Maximum pixels of a generated image, if its model supports that size.",
        within=COUNT,
    )
    image_store_mb: int = option(
        256,
        "MiB of memory for images that are returned as links; the oldest are evicted.",
        within=BOUND,
    )
    image_store_ttl_s: float = option(
        3600.0, "How long an image returned as a link is kept.", within=DURATION
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    """Images that vision models take."""

    ROLES: ClassVar[tuple[Role, ...]] = ("vision",)

    max_images: int = option(16, "Maximum number of images in one chat.", within=BOUND)
    max_input_image_pixels: int = option(
        2**22,
        "Larger images are scaled down to this many pixels before the model's own preprocessing.",
        within=Range(low=2**16),
    )
    prepared_images_mb: int = option(
        256,
        "MiB of memory for preprocessed images, so that a repeated image is not decoded and"
        " processed again.",
        within=BOUND,
    )
