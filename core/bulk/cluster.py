"""Ray clusters: the number of engines, their resources, and connecting.

Owns the code shared by `triptych serve --replicas` and bulk commands. Ray is not imported before a
cluster is joined.
"""

from __future__ import annotations

import importlib
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from triptych.core.errors import ConfigError, SetupError
from triptych.core.options.config import Config, DeviceOptions, ServerOptions
from triptych.core.options.server import without_keys

_COUNT = re.compile(r"(\d{1,4})(?:\.\.(\d{1,4}))?")
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray allows its own processes 30 and 5 s to start, and fails if a busy machine takes longer.
    # Serve waits 60 s in all.
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Ray's workers run at niceness 15 by default; an engine of `serve` without Ray runs at 0.
    "RAY_worker_niceness": "0",
}


def read_count(text: str) -> tuple[int, int]:
    """The minimum and maximum number of engines of `--replicas`. Raises `ConfigError`."""
    found = _COUNT.fullmatch(text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(
            f"--replicas {text}: write a number from 1, such as 2, or a range, such as 1..4."
        )
    return least, most


def engine_config(config: Config, num_engines: int) -> Config:
    """The configuration of each of `num_engines`: no API keys, and a share of the threads."""
    num_ranks = num_engines * config.device.num_devices
    threads = config.device.threads or max(1, (os.cpu_count() or 1) // num_ranks)
    return replace(
        config,
        server=without_keys(config.server),
        device=replace(config.device, threads=threads),
    )


def engine_resources(options: DeviceOptions, *, has_gpus: bool) -> dict[str, int]:
    """The resources that Ray reserves for an engine with all its ranks.

    An engine sees only GPUs reserved for it.
    """
    num_ranks = options.num_devices
    takes_any = options.device in ("auto", "default")
    if options.device.startswith(("gpu", "cuda")) or (takes_any and has_gpus):
        return {"num_gpus": num_ranks, "num_cpus": num_ranks}
    return {"num_cpus": options.threads * num_ranks}


def import_ray(part: str = "ray") -> Any:
    """Import Ray, or a module of it, with telemetry off. Raises `ConfigError` if not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(part)
    except ImportError as error:
        raise ConfigError(
            "--replicas and --ray-address run on Ray, which is not installed: run"
            " pip install '.[ray]' in a clone of Triptych."
        ) from error


def join(address: str, options: ServerOptions, **own: Any) -> None:
    """Connect to the cluster at `address`, or start one here with `own`. Raises `SetupError`."""
    where = {"address": address} if address else own
    try:
        import_ray().init(**where, log_to_driver=options.log_level == "debug")
    except ConfigError:
        raise
    except Exception as error:  # Ray has no specific type for this
        place = f"at --ray-address {address}" if address else "started here"
        raise SetupError(f"Cannot connect to a Ray cluster {place}: {error}") from error
    _close_token()


def _close_token() -> None:
    """Make Ray's token, which permits running code on the cluster, private to this user."""
    place = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    with suppress(OSError):  # absent, or another user's
        Path(place).expanduser().chmod(0o600)


def has_gpus() -> bool:
    """Whether the cluster has GPUs; false without a cluster (`serve build`)."""
    ray = import_ray()
    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0))
