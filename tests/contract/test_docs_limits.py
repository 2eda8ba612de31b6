"""Limits in docs that constants of the code decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from triptych.core import limits
from triptych.core.http.batches.gate import PATIENCE_S
from triptych.core.media.audio.intake import TRANSCRIPTION_LIMITS, VOICE_LIMITS
from triptych.core.media.images import ImageLimits
from triptych.core.runtime.layers.attention import KvLayout, KvShape, LatentShape
from triptych.core.runtime.layers.key_index import KeyIndexConfig
from triptych.core.store.space import RESERVE_BYTES
from triptych.modalities.asr.api.service import MIN_SECONDS
from triptych.modalities.diffusion.api.service import MAX_PROMPT_CHARS
from triptych.modalities.llm.api.responses.archive import MAX_PAGE_BYTES
from triptych.modalities.vlm.engine.loader import STEP_PATCHES

DOCS = Path(__file__).parents[2] / "docs"
MIB = 2**20
DAY_S = 86_400
IMAGE = ImageLimits()

SENTENCES = [
    ("batches.md", f"or after {PATIENCE_S:g} s."),
    ("batches.md", f"At most {limits.MAX_ACTIVE_BATCHES} batches of one API key"),
    ("batches.md", f"(an hour to {limits.MAX_FILE_LIFETIME_S // DAY_S} days)"),
    ("http.md", f"arrive within {limits.HEAD_TIMEOUT_S:g} s."),
    ("http_images.md", f"1 to {MAX_PROMPT_CHARS:,} characters"),
    ("http_images.md", f"{IMAGE.min_side} to {IMAGE.max_side} pixels"),
    ("http_images.md", f"{IMAGE.max_pixels / 1e6:g} million"),
    ("http_speech.md", f"1 to {VOICE_LIMITS.max_seconds} s and up to"),
    ("http_speech.md", f"up to {VOICE_LIMITS.max_bytes // MIB} MiB"),
    ("http_transcription.md", f"at most {TRANSCRIPTION_LIMITS.max_bytes // MIB} MiB"),
    ("http_transcription.md", f"less than {MIN_SECONDS:g} s of audio"),
    ("responses.md", f"A page holds at most {MAX_PAGE_BYTES // MIB} MiB"),
    ("responses.md", f"`FILE.reserve`, of {RESERVE_BYTES // MIB} MiB"),
    ("vision.md", f"{IMAGE.min_side} to {IMAGE.max_side}, {IMAGE.max_pixels / 1e6:g} million"),
    ("vision.md", f"{limits.MAX_HELD_IMAGE_BYTES // 2**30} GiB. More: 503"),
    ("vision.md", f"{STEP_PATCHES} patches of 14 x 14"),
]


@pytest.mark.parametrize(("page", "sentence"), SENTENCES)
def test_limit(page: str, sentence: str) -> None:
    assert sentence in " ".join((DOCS / page).read_text("utf-8").split())


@pytest.mark.parametrize(
    ("name", "num_layers", "num_heads", "sizes"),
    [
        ("GLM-4.7-Flash", 47, 20, (512, 64, 192, 256)),
        ("DeepSeek V3 and R1", 61, 128, (512, 64, 128, 128)),
        ("Kimi K2", 61, 64, (512, 64, 128, 128)),
        ("Kimi Linear 48B", 7, 32, (512, 64, 128, 128)),
        ("DeepSeek V2-Lite", 27, 16, (512, 64, 128, 128)),
        ("MiniCPM3-4B", 62, 40, (256, 32, 64, 64)),
        ("Youtu-LLM-2B", 32, 16, (512, 64, 128, 128)),
    ],
)
def test_bytes_of_a_token_of_latent_attention(
    name: str, num_layers: int, num_heads: int, sizes: tuple[int, int, int, int]
) -> None:
    rank, rope_dim, nope_dim, value_dim = sizes
    shape = LatentShape(num_heads=num_heads, head_dim=rank + rope_dim, value_dim=rank)
    half, small = (num_layers * shape.token_bytes(d) for d in (torch.bfloat16, torch.int8))
    whole = 2 * num_layers * num_heads * (nope_dim + rope_dim + value_dim)
    row = f"| {name} | {num_layers} x {rank + rope_dim} | {half:,} | {small:,} | {whole:,} |"
    assert f"{row} 1 / {whole / half:.1f} |" in (DOCS / "kv_cache.md").read_text("utf-8")


def test_bytes_of_a_token_with_an_index() -> None:
    """DeepSeek-V3.2's 61 layers of 512 and 64 values, and index keys of 128."""
    row = LatentShape(num_heads=128, head_dim=512 + 64, value_dim=512)
    key = KeyIndexConfig(num_heads=64, head_dim=128, num_chosen=2048).shape
    layout = KvLayout(shapes=(row, key) * 61, page_size=1, dtype=torch.bfloat16)
    half, small = layout.page_bytes, replace(layout, dtype=torch.int8).page_bytes
    sentence = f"{half:,} bytes in bfloat16, and {small:,} in `int8`"
    assert sentence in " ".join((DOCS / "kv_cache.md").read_text("utf-8").split())


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [(torch.bfloat16, "46,500"), (torch.int8, "90,300"), (torch.float8_e4m3fn, "93,100")],
)
def test_tokens_in_a_gib_of_cache(dtype: torch.dtype, shown: str) -> None:
    """SmolLM2-135M's layers; one page is the null page. Rounded down."""
    shape = KvShape(num_heads=9, num_kv_heads=3, head_dim=64)
    layout = KvLayout(shapes=(shape,) * 30, page_size=16, dtype=dtype)
    num_tokens = (2**30 // layout.page_bytes - 1) * layout.page_size
    assert shown == f"{num_tokens // 100 * 100:,}"
    assert shown in (DOCS / "kv_cache.md").read_text("utf-8")
