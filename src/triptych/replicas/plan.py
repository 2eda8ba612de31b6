"""The plan of replicas: their number and cluster, checked before anything starts.

Owns the list of options that are incompatible with replicas. Imports nothing of Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from triptych.core.bulk.cluster import engine_config, engine_resources, read_count
from triptych.core.errors import ConfigError
from triptych.core.options.batch_limits import LEAST_ROWS
from triptych.core.options.config import Config, DeviceOptions, ReplicaOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """`least` to `most` replicas on the Ray cluster at `address`, or on a private cluster."""

    least: int
    most: int
    address: str
    routing: str
    queue_s: float
    downscale_delay_s: float

    @classmethod
    def of(cls, config: Config) -> Self:
        """Read the plan of `config`. Raises `ConfigError` for incompatible options."""
        options = config.replicas
        least, most = read_count(options.replicas)
        plan = cls(
            least=least,
            most=most,
            address=options.ray_address,
            routing=options.replica_routing,
            queue_s=options.replica_queue_s,
            downscale_delay_s=options.replica_downscale_delay_s,
        )
        if plan.needs_ray:
            _refuse_incompatible_options(config)
        _refuse_unused_options(plan, options)
        return plan

    @property
    def needs_ray(self) -> bool:
        """Whether the replicas run on Ray instead of a plain process tree."""
        return self.most > 1 or bool(self.address)

    def check_room(self, options: DeviceOptions, num_gpus: int) -> None:
        """Raise `ConfigError` if a single machine has too few GPUs: Ray would wait for more."""
        each = engine_resources(options, has_gpus=num_gpus > 0).get("num_gpus", 0)
        if self.most * each > num_gpus:
            raise ConfigError(
                f"--replicas {self.most} needs {self.most * each} GPUs, and this machine has"
                f" {num_gpus}: lower it, or use --device cpu or --ray-address."
            )

    def engine_config(self, config: Config) -> Config:
        """Return the configuration of one engine."""
        return engine_config(config, self.most)

    def ingress_config(self, config: Config) -> Config:
        """Return the configuration of the ingress, which admits the work of all replicas."""
        options = config.schedule
        return replace(
            config,
            schedule=replace(
                options,
                max_batch_size=(options.max_batch_size or LEAST_ROWS) * self.most,
                max_queue_size=options.max_queue_size * self.most,
                max_queue_tokens=options.max_queue_tokens * self.most,
            ),
        )


def _refuse_incompatible_options(config: Config) -> None:
    server, device = config.server, config.device
    if server.ssl_certfile:
        raise ConfigError(
            "--ssl-certfile is not offered with replicas: let a proxy before Ray Serve end TLS."
        )
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
            f"{', '.join(given)} {'are' if given[1:] else 'is'} for a single engine; Ray places and"
            " connects replicas. Leave it out."
        )


def _refuse_unused_options(plan: ReplicaPlan, options: ReplicaOptions) -> None:
    usual, is_fixed = ReplicaOptions(), plan.least == plan.most
    idle = {
        "--replica-routing": not plan.needs_ray and plan.routing != usual.replica_routing,
        "--replica-queue-s": is_fixed and plan.queue_s != usual.replica_queue_s,
        "--replica-downscale-delay-s": (
            is_fixed and plan.downscale_delay_s != usual.replica_downscale_delay_s
        ),
    }
    given = [flag for flag, is_given in idle.items() if is_given]
    if given:
        raise ConfigError(
            f"{', '.join(given)} {'have' if given[1:] else 'has'} no effect with --replicas"
            f" {options.replicas}: leave it out, or set more replicas or a range such as 1..4."
        )
