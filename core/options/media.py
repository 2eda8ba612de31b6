"""The options of speech, images that are generated and images that are looked at.

Owns three sections of the configuration. The rules of `core.options.config` apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triptych.core.options.declaration import BOUND, COUNT, DURATION, Range, Role, option


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions:
    """Speech that is made while it is listened to."""

    ROLES: ClassVar[tuple[Role, ...]] = ("speech",)

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
    """Images that are generated: which steps run the model. A request may ask for another cache."""

    ROLES: ClassVar[tuple[Role, ...]] = ("image",)

    step_cache: str = option(
        "auto",
        "What lets an image skip steps. `planned`: steps chosen beforehand by `triptych"
        " calibrate`; `auto`: so where the model was calibrated, else no step is skipped.",
        choices=("auto", "off", "planned", "teacache", "first-block", "taylorseer", "magcache"),
    )
    step_cache_min_psnr_db: float = option(
        32.0,
        "Plans skip as many steps as leave nine of ten calibration images at least so close to"
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
        16, "Images that may be generated at once; others wait.", within=COUNT
    )
    max_image_rows: int = option(
        16,
        "Rows in one run of an image model: an image is one, or two with guidance. How many there"
        " are follows what runs were measured to take.",
        within=COUNT,
    )
    image_memory_mb: int = option(
        0,
        "MiB that images in flight may hold between their steps; 0: what memory allows.",
        within=BOUND,
    )
    max_image_pixels: int = option(
        3840 * 2160, "Most pixels of one image, where its model can generate so many.", within=COUNT
    )
    image_store_mb: int = option(
        256,
        "MiB of memory for images that are answered as links; the oldest give way.",
        within=BOUND,
    )
    image_store_ttl_s: float = option(
        3600.0, "How long an image that was answered as a link is kept.", within=DURATION
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
        "Different adapters in one run of the model; of more, images wait for the next run.",
        aliases=("--max-loras-per-batch",),
        within=COUNT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    """Images that are looked at."""

    ROLES: ClassVar[tuple[Role, ...]] = ("vision",)

    max_images: int = option(16, "Images in one chat.", within=BOUND)
    max_image_pixels: int = option(
        2**22,
        "An image with more pixels is scaled down to so many before the model's own processor"
        " has it.",
        within=Range(low=2**16),
    )
    prepared_images_mb: int = option(
        256,
        "MiB of memory for images as their model takes them: one that comes again is neither"
        " decoded nor processed again.",
        within=BOUND,
    )
