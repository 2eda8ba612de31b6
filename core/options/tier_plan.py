"""The tiers of the prefix cache: their options, checked against each other and the configuration.

Owns the checks, the fields of `--kv-connector-config`, and their messages. Knows no memory and no
files: `core.kv.tiers` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import msgspec

from triptych.core.errors import ConfigError
from triptych.core.options.cache import DEFAULT_RATIO, NULL, TIERED
from triptych.core.options.config import Config
from triptych.core.options.config_file import read_config_file
from triptych.core.options.pipeline import DECODE, PREFILL
from triptych.core.process.typed import convert, describe_mismatch

_GIB = 2**30
_FLAG = "--kv-connector-config"
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "block_store_endpoint": "pages are kept on this machine; leave it out",
        "lmcache_config_file": "write --kv-connector tiered, and set disk_offload_dir",
        "use_debug_tiered_mode": "leave it out",
        "type": "write --kv-connector",
    }
)


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `--kv-connector-config`, sizes in GiB."""

    host_offload_max_gb: float | None = None
    host_kvcache_swap_space_gb: float | None = None
    disk_offload_dir: str = ""
    disk_offload_max_gb: float = 0.0
    disk_offload_direct_io: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """The tiers below the device. `host_bytes` and `disk_bytes` may be 0: the engine chooses.

    Without `folder` there is no disk. `host_ratio` is a multiple of the cache on the device.
    """

    connector: str
    host_bytes: int
    host_ratio: float
    folder: str
    disk_bytes: int

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """The tiers of a configuration, if it has any. Raises `ConfigError`."""
        options = config.cache
        if options.kv_connector == NULL:
            _refuse_idle(config)
            return None
        settings = _read(options.kv_connector_config)
        host_gb = _host_gb(options.host_kvcache_swap_space_gb, settings)
        plan = cls(
            connector=options.kv_connector,
            host_bytes=int(host_gb * _GIB),
            host_ratio=options.hicache_ratio,
            folder=settings.disk_offload_dir,
            disk_bytes=int(settings.disk_offload_max_gb * _GIB),
        )
        plan._check_folder()
        plan._refuse_incompatible(config)
        return plan

    def _check_folder(self) -> None:
        if self.connector == TIERED and not self.folder:
            raise ConfigError(
                "--kv-connector tiered needs a folder:"
                f""" {_FLAG} '{{"disk_offload_dir": "/path/to/folder"}}'."""
            )
        if self.connector != TIERED and (self.folder or self.disk_bytes):
            raise ConfigError(
                f"{_FLAG}: disk_offload_dir and disk_offload_max_gb are for --kv-connector tiered;"
                f" {self.connector} has no disk."
            )

    def _refuse_incompatible(self, config: Config) -> None:
        device, role = config.device, config.pipeline.pipeline_role
        replicas = config.replicas
        is_spread = replicas.replicas != "1" or bool(replicas.ray_address)
        incompatible = {
            "--no-enable-prefix-caching": not config.cache.enable_prefix_caching,
            f"--tensor-parallel-size {device.tensor_parallel_size}": (
                device.tensor_parallel_size > 1
            ),
            f"--pipeline-role {role}": role in (PREFILL, DECODE),
            "--replicas or --ray-address": bool(self.folder) and is_spread,
        }
        if named := ", ".join(flag for flag, is_given in incompatible.items() if is_given):
            raise ConfigError(
                f"--kv-connector {self.connector} cannot be combined with {named} yet; leave one of"
                " them out."
            )


def _refuse_idle(config: Config) -> None:
    """Raise `ConfigError` for sizes of tiers where there are none."""
    options = config.cache
    idle = {
        _FLAG: bool(options.kv_connector_config),
        "--host-kvcache-swap-space-gb": options.host_kvcache_swap_space_gb > 0,
        "--hicache-ratio": options.hicache_ratio != DEFAULT_RATIO,
    }
    if named := ", ".join(flag for flag, is_given in idle.items() if is_given):
        raise ConfigError(
            f"{named}: cached pages are kept on the device alone; add --kv-connector local or"
            " tiered, or leave it out."
        )


def _host_gb(option_gb: float, settings: TierSettings) -> float:
    given = {option_gb, settings.host_offload_max_gb, settings.host_kvcache_swap_space_gb}
    sizes = {size for size in given if size}
    if len(sizes) > 1:
        raise ConfigError(
            "--host-kvcache-swap-space-gb, host_offload_max_gb and host_kvcache_swap_space_gb are"
            " one size; give it once."
        )
    return max(sizes, default=0.0)


def _read(text: str) -> TierSettings:
    """Read the fields of inline JSON or of a file. Raises `ConfigError`."""
    if not text:
        return TierSettings()
    if text.lstrip().startswith("{"):
        try:
            found = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{_FLAG}: invalid JSON ({error}).") from error
    else:
        found = read_config_file(text, _FLAG)
    return _settings(found)


def _settings(found: dict[str, Any]) -> TierSettings:
    for name, instead in _REFUSED.items():
        if found.get(name):
            raise ConfigError(f"{_FLAG}: {name} is not offered: {instead}.")
    try:
        settings = convert({k: v for k, v in found.items() if k not in _REFUSED}, TierSettings)
    except msgspec.ValidationError as error:
        known = ", ".join(TierSettings.__struct_fields__)
        said = describe_mismatch(error, found)
        raise ConfigError(f"{_FLAG}: {said}. Its fields are {known}.") from error
    if settings.disk_offload_direct_io:
        raise ConfigError(
            f"{_FLAG}: disk_offload_direct_io is not offered: pages pass through the system's"
            " cache; leave it out."
        )
    sizes = (settings.host_offload_max_gb, settings.host_kvcache_swap_space_gb)
    if any(size is not None and size < 0 for size in (*sizes, settings.disk_offload_max_gb)):
        raise ConfigError(f"{_FLAG}: sizes are in GiB, and not negative.")
    return settings
