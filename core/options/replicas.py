"""Options of replicas: their number, routing, scaling and Ray cluster.

Owns the declarations; `triptych.replicas` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.options.declaration import BOUND, DURATION, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Several engines behind one address, on Ray Serve (`pip install '.[ray]'`)."""

    replicas: str = option(
        "1",
        "Number of engines that serve the models, each with its own device: a number, or"
        " `min..max` to scale with load. More than one run on Ray.",
        aliases=("--data-parallel-size", "--data-parallel-degree", "--dp-size", "--dp", "-dp"),
        is_for_server=True,
    )
    ray_address: str = option(
        "",
        "Ray cluster to deploy on or upgrade (`auto`: the one running here). Empty: a private"
        " cluster is started for more than one replica.",
        is_for_server=True,
    )
    replica_routing: str = option(
        "predicted",
        "How requests are distributed: to the replica predicted to finish first, counting cached"
        " prefixes, or round-robin.",
        choices=("predicted", "round-robin"),
        aliases=("--load-balance-method",),
        is_for_server=True,
    )
    replica_queue_s: float = option(
        2.0,
        "With `min..max` replicas, add one when a new request would wait longer than this.",
        within=DURATION,
        is_for_server=True,
    )
    replica_downscale_delay_s: float = option(
        600.0,
        "With `min..max` replicas, remove one after fewer have sufficed for this long.",
        within=BOUND,
        is_for_server=True,
    )
