"""Options of roles: disaggregated prefill, decode and image encoding.

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
    """Disaggregated prefill, decode and image encoding."""

    ROLES: ClassVar[tuple[Role, ...]] = TEXT

    pipeline_role: str = option(
        WHOLE,
        "Role of this engine. `prefill` computes prompts for decode engines; `decode` does the"
        " rest, and prompts that do not arrive in time; `encode` encodes images for all other"
        " engines, without a language model; the default does everything.",
        choices=(WHOLE, PREFILL, DECODE, ENCODE),
        is_for_server=True,
    )
    prefill_address: tuple[str, ...] = option(
        (),
        "HOST:PORT, or unix:PATH on one host: where a prefill engine listens and a decode engine"
        " connects to it. Repeat for several on decode engines.",
        is_for_server=True,
    )
    encoder_address: tuple[str, ...] = option(
        (),
        "HOST:PORT, or unix:PATH on one host: where an encode engine listens and other engines"
        " connect to it. Repeat for several on these.",
        roles=_SEEING,
        is_for_server=True,
    )
    pipeline_key_file: str = option(
        "",
        "File with a secret of at least 16 bytes, shared by engines of different roles.",
        is_for_server=True,
    )
    pipeline_transport: str = option(
        SOCKETS,
        "How KV pages are transferred between engines: over their sockets (shared memory for"
        " unix:PATH), or by `nixl` (`pip install '.[nixl]'`), which uses RDMA if available.",
        choices=(SOCKETS, NIXL),
        is_for_server=True,
    )
    prefill_timeout_s: float = option(
        DEFAULT_TIMEOUT_S,
        "Longest wait for the next page of a prompt. After it, a decode engine computes the"
        " prompt itself, and a prefill engine disconnects a peer that does not read.",
        within=DURATION,
        is_for_server=True,
    )
    encoder_timeout_s: float = option(
        DEFAULT_TIMEOUT_S,
        "Longest wait for a remotely encoded image or its next page. After it, the engine encodes"
        " the image itself, and an encode engine disconnects a peer that does not read.",
        within=DURATION,
        roles=_SEEING,
        is_for_server=True,
    )
