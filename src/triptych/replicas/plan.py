"""How many replicas, and where: what the options ask for, checked before anything is started.

Owns what cannot go together with replicas, by name. Imports nothing of Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from triptych.core.bulk.cluster import engine_config, engine_resources, read_count
from triptych.core.errors import ConfigError
from triptych.core.options.config import Config, DeviceOptions, ReplicaOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """`least` to `most` replicas on the Ray cluster at `address`; empty: one of their own."""

    least: int
    most: int
    address: str
    routing: str
    queue_s: float
    downscale_delay_s: float

    @classmethod
    def of(cls, config: Config) -> Self:
        """The plan of `config`. Raises `ConfigError` for what replicas cannot have."""
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
            _refuse_what_is_one(config)
        _refuse_what_is_idle(plan, options)
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
        """What each engine goes by."""
        return engine_config(config, self.most)

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


def _refuse_what_is_idle(plan: ReplicaPlan, options: ReplicaOptions) -> None:
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
            f"{', '.join(given)} {'mean' if given[1:] else 'means'} nothing with --replicas"
            f" {options.replicas}: leave it out, or ask for more of them, or for a range as 1..4."
        )
