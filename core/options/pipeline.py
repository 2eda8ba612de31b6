"""Options of roles: engines that compute prompts or encode images for those that go on from them.

Owns the declarations. `core.options.pipeline_plan` checks them and `schedulers.roles` acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triptych.core.options.declaration import DURATION, TEXT, Role, option

SOCKETS, NIXL = "sockets", "nixl"
PREFILL, DECODE, WHOLE, ENCODE = "prefill", "decode", "prefill_and_decode", "encode"
_SEEING: tuple[Role, ...] = ("vision",)
DEFAULT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Prefill, decode and the encoder of images in engines of their own."""

    ROLES: ClassVar[tuple[Role, ...]] = TEXT

    pipeline_role: str = option(
        WHOLE,
        "What the engine does of a request: all of it; `prefill`, prompts for engines that decode;"
        " `decode`, the rest, and whatever of prompts does not come in time; `encode`, images"
        " for all of these, with no language model loaded.",
        choices=(WHOLE, PREFILL, DECODE, ENCODE),
        is_for_server=True,
    )
    prefill_address: tuple[str, ...] = option(
        (),
        "HOST:PORT, or unix:PATH on one host: where an engine of role prefill listens, and one of"
        " role decode finds it; there repeat for several.",
        is_for_server=True,
    )
    encoder_address: tuple[str, ...] = option(
        (),
        "HOST:PORT, or unix:PATH on one host: where an engine of role encode listens, and any"
        " other finds it; there repeat for several.",
        roles=_SEEING,
        is_for_server=True,
    )
    pipeline_key_file: str = option(
        "",
        "File with a secret that engines of different roles share, 16 bytes or more.",
        is_for_server=True,
    )
    pipeline_transport: str = option(
        SOCKETS,
        "How pages cross between engines: over their sockets, in shared memory for unix:PATH; or"
        " by `nixl` (`pip install 'triptych[nixl]'`), which uses RDMA where there is.",
        choices=(SOCKETS, NIXL),
        is_for_server=True,
    )
    prefill_timeout_s: float = option(
        DEFAULT_TIMEOUT_S,
        "Longest wait for the next page of a prompt: an engine of role decode then computes it"
        " itself, one of role prefill lets go of a peer that takes none.",
        within=DURATION,
        is_for_server=True,
    )
    encoder_timeout_s: float = option(
        DEFAULT_TIMEOUT_S,
        "Longest wait for an image that is encoded elsewhere, or for its next page: the engine"
        " then encodes it itself, and one of role encode lets go of a peer that takes nothing.",
        within=DURATION,
        roles=_SEEING,
        is_for_server=True,
    )
