"""How many replicas, and where: what the options ask for, checked before anything is started.

Owns what cannot go together with replicas, by name. Imports nothing of Ray.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Self

from triptych.core.config import Config, DeviceOptions
from triptych.core.errors import ConfigError

_COUNT = re.compile(r"(\d{1,4})(?:\.\.(\d{1,4}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """`least` to `most` replicas on the Ray cluster at `address`; empty: one of their own."""

    least: int
    most: int
    address: str
    routing: str
    queue_s: float

    @classmethod
    def of(cls, config: Config) -> Self:
        """The plan of `config`. Raises `ConfigError` for what replicas cannot have."""
        options = config.replicas
        found = _COUNT.fullmatch(options.replicas)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise ConfigError(
                f"--replicas {options.replicas}: write a number from 1, as 2, or a range, as 1..4."
            )
        plan = cls(
            least=least,
            most=most,
            address=options.ray_address,
            routing=options.replica_routing,
            queue_s=options.replica_queue_s,
        )
        if plan.needs_ray:
            _refuse_what_is_one(config)
        return plan

    @property
    def needs_ray(self) -> bool:
        """Whether a plain process tree would not do."""
        return self.most > 1 or bool(self.address)

    def check_room(self, options: DeviceOptions, num_gpus: int) -> None:
        """Raise `ConfigError` where a machine alone has too few GPUs: Ray would wait for more."""
        each = engine_resources(options, has_gpus=num_gpus > 0).get("num_gpus", 0)
        if self.most * each > num_gpus:
            raise ConfigError(
                f"--replicas {self.most} take {self.most * each} GPUs, of which there are"
                f" {num_gpus} here: lower it, or use --device cpu or --ray-address."
            )

    def engine_config(self, config: Config) -> Config:
        """What each engine goes by: no keys, and its share of this machine's threads."""
        num_ranks = self.most * config.device.num_devices
        threads = config.device.threads or max(1, (os.cpu_count() or 1) // num_ranks)
        return replace(
            config,
            server=replace(config.server, api_key=(), api_key_file=""),
            device=replace(config.device, threads=threads),
        )

    def ingress_config(self, config: Config) -> Config:
        """What the ingress goes by: it admits as much as all replicas together take."""
        options = config.schedule
        return replace(
            config,
            schedule=replace(
                options,
                max_batch_size=options.max_batch_size * self.most,
                max_queue_size=options.max_queue_size * self.most,
                max_queue_tokens=options.max_queue_tokens * self.most,
            ),
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


def _refuse_what_is_one(config: Config) -> None:
    server, device = config.server, config.device
    refused = {
        "--headless": server.headless,
        "--external-engine": server.external_engine,
        "--zmq-endpoint-base": bool(server.zmq_endpoint_base),
        "--port 0": server.port == 0,
        f"--device {device.device}": ":" in device.device,
    }
    given = [flag for flag, is_given in refused.items() if is_given]
    if given:
        raise ConfigError(
            f"{', '.join(given)} {'are' if given[1:] else 'is'} for one engine; Ray places and"
            " connects replicas. Leave it out."
        )
