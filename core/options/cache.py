"""Options of the paged key-value cache and of the tiers below it.

Owns the declarations. `core.options.tier_plan` checks the tiers and sizes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triptych.core.options.declaration import BOUND, TEXT, TOKENS, Range, Role, option

NULL, LOCAL, TIERED = "null", "local", "tiered"
DEFAULT_RATIO = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The paged key-value cache."""

    ROLES: ClassVar[tuple[Role, ...]] = TOKENS

    kv_cache_page_size: int = option(
        32,
        "Tokens per page.",
        aliases=("--page-size", "--block-size"),
        within=Range(low=1, is_power_of_two=True),
    )
    kv_cache_format: str = option(
        "auto",
        "Type of cached keys and values. `auto` follows the compute type. float8_e4m3fn and int8"
        " (one scale per token and head) take half the memory of bfloat16.",
        aliases=("--kv-cache-dtype",),
        choices=("auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8"),
    )
    kv_cache_memory_mb: int = option(
        0,
        "Maximum size of each model's cache in MiB; 0: what memory and batch limits allow.",
        within=BOUND,
    )
    enable_prefix_caching: bool = option(True, "Reuse the cache pages of shared prompt prefixes.")
    kv_connector: str = option(
        NULL,
        "Where cached pages go that leave the device: nowhere (`null`), to host memory (`local`),"
        " or to host memory and disk (`tiered`), where they outlive the process.",
        choices=(NULL, LOCAL, TIERED),
        roles=TEXT,
    )
    kv_connector_config: str = option(
        "",
        "Settings of --kv-connector, as JSON or a YAML or JSON file: `disk_offload_dir`, a local"
        " folder that `tiered` needs, `disk_offload_max_gb` (default: 50 GiB, and at most half of"
        " what is free there) and `host_offload_max_gb`, the same as --host-kvcache-swap-space-gb.",
        roles=TEXT,
    )
    host_kvcache_swap_space_gb: float = option(
        0.0,
        "Host memory for cached pages of each model in GiB; 0: --hicache-ratio decides.",
        aliases=("--hicache-size",),
        within=BOUND,
        roles=TEXT,
    )
    hicache_ratio: float = option(
        DEFAULT_RATIO,
        "Size of the host memory for cached pages as a multiple of the cache on the device; at most"
        " half of the memory that is left.",
        within=Range(low=0, is_open=True),
        roles=TEXT,
    )
    max_vision_cache_entries: int = option(
        256,
        "Images whose features are kept for later prompts; 0: only while in use.",
        within=BOUND,
        roles=("vision",),
    )
