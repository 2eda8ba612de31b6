"""Options of roles: engines that compute prompts, and engines that go on from them.

Owns the declarations, and what cannot go together; `schedulers.pipeline_roles` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from triptych.core.errors import ConfigError
from triptych.core.options.declaration import DURATION, TEXT, Role, option

if TYPE_CHECKING:
    from triptych.core.config import Config

PREFILL, DECODE, WHOLE = "prefill", "decode", "prefill_and_decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Prefill and decode in engines of their own."""

    ROLES: ClassVar[tuple[Role, ...]] = TEXT

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


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The role of an engine, and what it needs for it."""

    role: str
    addresses: tuple[str, ...]
    key_file: str
    timeout_s: float

    @classmethod
    def of(cls, config: Config) -> Self:
        """Raises `ConfigError` for options that miss each other, and for those that bar a role."""
        options = config.pipeline
        plan = cls(
            options.pipeline_role,
            options.prefill_address,
            options.pipeline_key_file,
            options.prefill_timeout_s,
        )
        if plan.is_whole:
            plan._refuse_what_is_for_roles()
        else:
            plan._refuse_what_is_missing()
            _refuse_what_bars(plan.role, config)
        return plan

    @property
    def is_whole(self) -> bool:
        """Whether one engine does both."""
        return self.role == WHOLE

    def _refuse_what_is_for_roles(self) -> None:
        given = {
            "--prefill-address": bool(self.addresses),
            "--pipeline-key-file": bool(self.key_file),
        }
        if named := _named(given):
            raise ConfigError(
                f"{named}: for engines of one role; add --pipeline-role prefill or --pipeline-role"
                " decode, or leave it out."
            )

    def _refuse_what_is_missing(self) -> None:
        if not self.addresses or not self.key_file:
            raise ConfigError(
                f"--pipeline-role {self.role} needs --prefill-address (HOST:PORT or unix:PATH) and"
                " --pipeline-key-file."
            )
        if self.role == PREFILL and len(self.addresses) > 1:
            raise ConfigError(
                "--prefill-address: an engine of role prefill listens on one; name one."
            )


def _refuse_what_bars(role: str, config: Config) -> None:
    device, replicas, models = config.device, config.replicas, config.models
    barred = {
        f"--tensor-parallel-size {device.tensor_parallel_size}": device.tensor_parallel_size > 1,
        "--no-enable-prefix-caching": not config.cache.enable_prefix_caching,
        f"--replicas {replicas.replicas}": replicas.replicas != "1",
        f"--ray-address {replicas.ray_address}": bool(replicas.ray_address),
    }
    if role == PREFILL:  # it listens while its model is loaded, and what decodes loads none
        barred[f"--load {models.load}"] = models.load != "startup"
        barred[f"--idle-unload-s {models.idle_unload_s:g}"] = models.idle_unload_s > 0
    if named := _named(barred):
        raise ConfigError(
            f"--pipeline-role {role} does not go with {named} yet; leave one of them out."
        )


def _named(flags: Mapping[str, bool]) -> str:
    return ", ".join(flag for flag, is_given in flags.items() if is_given)
