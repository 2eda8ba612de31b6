"""What is asked of a Ray cluster: how many engines, what each takes, the way in.

Owns what `triptych serve --replicas` and commands with many rows have in common. Nothing of Ray is
imported before a cluster is joined.
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

_COUNT = re.compile(r"(\d{1,4})(?:\.\.(\d{1,4}))?")
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray gives its own processes 30 and 5 s to start, and ends with an error where a busy machine
    # takes longer. What Serve waits in all is 60 s.
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Ray's workers step back for all else on a machine (15); an engine of `serve` alone does not.
    "RAY_worker_niceness": "0",
}


def read_count(text: str) -> tuple[int, int]:
    """The least and the most engines of `--replicas`. Raises `ConfigError`."""
    found = _COUNT.fullmatch(text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"--replicas {text}: write a number from 1, as 2, or a range, as 1..4.")
    return least, most


def engine_config(config: Config, num_engines: int) -> Config:
    """What each of so many engines goes by: no keys, and its share of this machine's threads."""
    num_ranks = num_engines * config.device.num_devices
    threads = config.device.threads or max(1, (os.cpu_count() or 1) // num_ranks)
    return replace(
        config,
        server=replace(config.server, api_key=(), api_key_file=""),
        device=replace(config.device, threads=threads),
    )


def engine_resources(options: DeviceOptions, *, has_gpus: bool) -> dict[str, int]:
    """What Ray sets aside for an engine, all ranks of it, on a cluster that `has_gpus` or not.

    An engine sees no GPU that was not set aside for it.
    """
    num_ranks = options.num_devices
    takes_any = options.device in ("auto", "default")
    if options.device.startswith(("gpu", "cuda")) or (takes_any and has_gpus):
        return {"num_gpus": num_ranks, "num_cpus": num_ranks}
    return {"num_cpus": options.threads * num_ranks}


def import_ray(part: str = "ray") -> Any:
    """Ray, or a part of it; it sends nothing anywhere. Raises `ConfigError` where it is missing."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(part)
    except ImportError as error:
        raise ConfigError(
            "--replicas and --ray-address run on Ray, which is not installed:"
            " pip install 'triptych[ray]'."
        ) from error


def join(address: str, options: ServerOptions, **own: Any) -> None:
    """Connect to the cluster at `address`, or start one here as `own` says. Raises `SetupError`."""
    where = {"address": address} if address else own
    try:
        import_ray().init(**where, log_to_driver=options.log_level == "debug")
    except ConfigError:
        raise
    except Exception as error:  # Ray has no type of its own for this
        place = f"at --ray-address {address}" if address else "to be started here"
        raise SetupError(f"There is no Ray cluster {place}: {error}") from error
    _close_token()


def _close_token() -> None:
    """Keep the token by which code runs on the cluster from others: Ray leaves it readable."""
    place = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    with suppress(OSError):  # there is none, or it is somebody else's to keep
        Path(place).expanduser().chmod(0o600)


def has_gpus() -> bool:
    """Whether the cluster has any; without one (`serve build`) there is nothing to ask."""
    ray = import_ray()
    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0))
