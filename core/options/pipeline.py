"""Options of roles: engines that compute prompts, and engines that go on from them.

Owns the declarations, and what cannot go together; `schedulers.pipeline_roles` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triptych.core.errors import ConfigError
from triptych.core.options.declaration import DURATION, Role, option

if TYPE_CHECKING:
    from triptych.core.config import Config

PREFILL, DECODE, WHOLE = "prefill", "decode", "prefill_and_decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Prefill and decode in engines of their own."""

    ROLES: ClassVar[tuple[Role, ...]] = ("chat", "vision")

    pipeline_role: str = option(
        WHOLE,
        "What the engine does of a request: all of it; `prefill`, prompts for engines that decode;"
        " `decode`, the rest, and whatever of prompts does not come in time.",
        choices=(WHOLE, PREFILL, DECODE),
        is_for_server=True,
    )
    prefill_address: tuple[str, ...] = option(
        (),
        "HOST:PORT, or unix:PATH on one host: where an engine of role prefill listens, and one of"
        " role decode finds it; there repeat for several.",
        is_for_server=True,
    )
    pipeline_key_file: str = option(
        "",
        "File with a secret that the engines of both roles share, 16 bytes or more.",
        is_for_server=True,
    )
    prefill_timeout_s: float = option(
        10.0,
        "Longest wait for the next page of a prompt: an engine of role decode then computes it"
        " itself, one of role prefill lets go of a peer that takes none.",
        within=DURATION,
        is_for_server=True,
    )


def check_roles(config: Config) -> None:
    """Raise `ConfigError` for options of roles that miss each other, or others that bar them."""
    options = config.pipeline
    if options.pipeline_role == WHOLE:
        given = {
            "--prefill-address": bool(options.prefill_address),
            "--pipeline-key-file": bool(options.pipeline_key_file),
        }
        if named := ", ".join(flag for flag, is_given in given.items() if is_given):
            raise ConfigError(
                f"{named}: for engines of one role; add --pipeline-role prefill or --pipeline-role"
                " decode, or leave it out."
            )
        return
    role = f"--pipeline-role {options.pipeline_role}"
    if not options.prefill_address or not options.pipeline_key_file:
        raise ConfigError(
            f"{role} needs --prefill-address (HOST:PORT or unix:PATH) and --pipeline-key-file."
        )
    if options.pipeline_role == PREFILL and len(options.prefill_address) > 1:
        raise ConfigError("--prefill-address: an engine of role prefill listens on one; name one.")
    barred = {
        f"--tensor-parallel-size {config.device.tensor_parallel_size}": (
            config.device.tensor_parallel_size > 1
        ),
        "--no-enable-prefix-caching": not config.cache.enable_prefix_caching,
        f"--replicas {config.replicas.replicas}": config.replicas.replicas != "1",
        f"--ray-address {config.replicas.ray_address}": bool(config.replicas.ray_address),
    }
    if named := ", ".join(flag for flag, is_given in barred.items() if is_given):
        raise ConfigError(f"{role} does not go with {named} yet; leave one of them out.")
