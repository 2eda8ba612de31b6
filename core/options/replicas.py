"""Options of replicas: how many engines serve the models, and on which Ray cluster.

Owns the declarations; `triptych.replicas` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.options.declaration import BOUND, DURATION, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Several engines behind one address, on Ray Serve (`pip install 'triptych[ray]'`)."""

    replicas: str = option(
        "1",
        "Engines that serve the models, each with a device of its own: a number, or `min..max`, as"
        " many as the work needs. More than one run on Ray.",
        aliases=("--data-parallel-size", "--data-parallel-degree", "--dp-size", "--dp"),
        is_for_server=True,
    )
    ray_address: str = option(
        "",
        "A Ray cluster to deploy on (`auto`: the one that runs here), or to upgrade what was"
        " deployed there. Empty: more than one replica start a cluster of their own.",
        is_for_server=True,
    )
    replica_routing: str = option(
        "predicted",
        "Which replica gets a request: where it is predicted to be done first, cached prefixes"
        " counted; or each in turn.",
        choices=("predicted", "round-robin"),
        aliases=("--load-balance-method",),
        is_for_server=True,
    )
    replica_queue_s: float = option(
        2.0,
        "Seconds of work before a new request above which `min..max` replicas become more.",
        within=DURATION,
        is_for_server=True,
    )
    replica_downscale_delay_s: float = option(
        600.0,
        "Seconds for which fewer of `min..max` replicas must do before one of them goes.",
        within=BOUND,
        is_for_server=True,
    )
