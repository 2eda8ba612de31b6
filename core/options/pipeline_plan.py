"""The role of an engine: its options, checked against each other and the configuration.

Owns the checks and their messages. Knows no sockets; `schedulers.roles.pipeline_roles` opens them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from triptych.core.errors import ConfigError
from triptych.core.options.config import Config
from triptych.core.options.pipeline import (
    DECODE,
    DEFAULT_TIMEOUT_S,
    ENCODE,
    NIXL,
    PREFILL,
    WHOLE,
    PipelineOptions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEndpoint:
    """The addresses where engines of two roles connect (from `flag`) and the time limit there."""

    flag: str
    addresses: tuple[str, ...]
    key_file: str
    transport: str
    timeout_s: float

    def refuse_idle_timeout(self) -> None:
        """Raise `ConfigError` for a time limit without an address."""
        if self.timeout_s != DEFAULT_TIMEOUT_S and not self.addresses:
            limit = self.flag.replace("-address", "-timeout-s")
            raise ConfigError(
                f"{limit} {self.timeout_s:g}: this engine has no {self.flag}; add it, or leave"
                f" {limit} out."
            )


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The role of an engine and the connections it needs."""

    role: str
    pages: PeerEndpoint
    """The connection between prefill and decode engines."""
    _options: PipelineOptions

    @classmethod
    def of(cls, config: Config) -> Self:
        """Raise `ConfigError` for options that are missing or incompatible with the role."""
        plan = cls.checked(config)
        plan._refuse_unused_options()
        plan._refuse_missing_options()
        for endpoint in (plan.pages, plan.features):
            endpoint.refuse_idle_timeout()
        if plan._is_part:
            _refuse_incompatible_options(plan._cause, plan.role, config)
        return plan

    @classmethod
    def checked(cls, config: Config) -> Self:
        """Return the plan of a configuration that `of` accepted when the server started."""
        options = config.pipeline
        pages = PeerEndpoint(
            flag="--prefill-address",
            addresses=options.prefill_address,
            key_file=options.pipeline_key_file,
            transport=options.pipeline_transport,
            timeout_s=options.prefill_timeout_s,
        )
        return cls(options.pipeline_role, pages, options)

    @property
    def features(self) -> PeerEndpoint:
        """The connection between encode engines and other engines. For vision models only."""
        options = self._options
        return PeerEndpoint(
            flag="--encoder-address",
            addresses=options.encoder_address,
            key_file=options.pipeline_key_file,
            transport=options.pipeline_transport,
            timeout_s=options.encoder_timeout_s,
        )

    @property
    def fetches_pages(self) -> bool:
        """Whether prompts are computed by another engine."""
        return self.role == DECODE

    @property
    def sends_pages(self) -> bool:
        """Whether prompts are computed for other engines."""
        return self.role == PREFILL

    @property
    def encodes(self) -> bool:
        """Whether the engine only encodes images for other engines."""
        return self.role == ENCODE

    @property
    def fetches_features(self) -> bool:
        """Whether images are encoded by another engine."""
        return bool(self.features.addresses) and not self.encodes

    @property
    def _is_part(self) -> bool:
        return self.role != WHOLE or bool(self.features.addresses)

    @property
    def _cause(self) -> str:
        return self.features.flag if self.role == WHOLE else f"--pipeline-role {self.role}"

    def _refuse_unused_options(self) -> None:
        if self.pages.addresses and self.role in (WHOLE, ENCODE):
            raise ConfigError(
                f"{self.pages.flag}: for engines of role prefill and decode; add --pipeline-role"
                " prefill or --pipeline-role decode, or leave it out."
            )
        given = {
            "--pipeline-key-file": bool(self.pages.key_file),
            f"--pipeline-transport {NIXL}": self.pages.transport == NIXL,
        }
        if not self._is_part and (named := _named(given)):
            raise ConfigError(
                f"{named}: this engine connects to no other; add --pipeline-role or"
                f" {self.features.flag}, or leave it out."
            )

    def _refuse_missing_options(self) -> None:
        needed = self.features if self.role in (WHOLE, ENCODE) else self.pages
        if self._is_part and not needed.addresses:
            raise ConfigError(f"{self._cause} needs {needed.flag} (HOST:PORT or unix:PATH).")
        if self._is_part and not needed.key_file:
            raise ConfigError(f"{self._cause} needs --pipeline-key-file.")
        if self.role in (PREFILL, ENCODE) and len(needed.addresses) > 1:
            raise ConfigError(
                f"{needed.flag}: an engine of role {self.role} listens on one address; give one."
            )


def _refuse_incompatible_options(cause: str, role: str, config: Config) -> None:
    device, replicas, models = config.device, config.replicas, config.models
    incompatible = {
        f"--tensor-parallel-size {device.tensor_parallel_size}": device.tensor_parallel_size > 1,
        f"--replicas {replicas.replicas}": replicas.replicas != "1",
        f"--ray-address {replicas.ray_address}": bool(replicas.ray_address),
    }
    if role in (PREFILL, DECODE):
        incompatible["--no-enable-prefix-caching"] = not config.cache.enable_prefix_caching
    if role in (PREFILL, ENCODE):  # it listens while its model is loaded; peers cannot load it
        incompatible[f"--load {models.load}"] = models.load != "startup"
        incompatible[f"--idle-unload-s {models.idle_unload_s:g}"] = models.idle_unload_s > 0
    if named := _named(incompatible):
        raise ConfigError(f"{cause} cannot be combined with {named} yet; leave one of them out.")


def _named(flags: Mapping[str, bool]) -> str:
    return ", ".join(flag for flag, is_given in flags.items() if is_given)
