"""Builds the Ray Serve application from a configuration; also for Serve's config files.

applications:
- name: triptych
import_path: triptych.replicas.application:build
args: { model: [...], replicas: 2..8 }
"""

from __future__ import annotations

from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from triptych.core.bulk.cluster import engine_resources, has_gpus
from triptych.core.options.config import Config
from triptych.core.options.table import make_config
from triptych.replicas.deployments import EngineReplica, Ingress
from triptych.replicas.plan import ReplicaPlan

REPORT_S = 1.0
"""Interval of a replica's load reports to routers and autoscaler."""
_HEALTH_S = 2.0
_HANGS_S = 10.0  # Serve replaces a replica after three timeouts in a row
_DRAIN_SLACK_S = 5.0
_INGRESS_SLACK_S = 20.0  # an ingress notices its replacement late
_MAX_REQUESTS = 1_000_000  # the ingress admits; engines queue


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application from options with the names of Triptych's config files."""
    lists = {
        name: tuple(value) if isinstance(value, list) else value for name, value in args.items()
    }
    config = make_config(lists)
    return application(config, ReplicaPlan.of(config))


def application(config: Config, plan: ReplicaPlan) -> serve.Application:
    """Build an ingress in front of the replicas of `plan`."""
    engine_config = plan.engine_config(config)
    encode = msgspec.json.encode
    drain_s = config.server.drain_timeout_s
    common = {
        "max_ongoing_requests": _MAX_REQUESTS,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": _HEALTH_S,
        "health_check_timeout_s": _HANGS_S,
    }
    engines = serve.deployment(EngineReplica).options(
        name="engine",
        ray_actor_options=engine_resources(engine_config.device, has_gpus=has_gpus()),
        request_router_config=RequestRouterConfig(
            request_router_class="triptych.replicas.request_router:PredictedSecondsRouter",
            request_router_kwargs={"policy": plan.routing},
            request_routing_stats_period_s=REPORT_S,
        ),
        graceful_shutdown_timeout_s=drain_s + _DRAIN_SLACK_S,
        **_scale(plan),
        **common,
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=drain_s + _INGRESS_SLACK_S,
        **common,
    )
    bound: serve.Application = ingress.bind(
        encode(plan.ingress_config(config)), engines.bind(encode(engine_config))
    )
    return bound


def _scale(plan: ReplicaPlan) -> dict[str, Any]:
    if plan.least == plan.most:
        return {"num_replicas": plan.most}
    policy = AutoscalingPolicy(
        policy_function="triptych.replicas.scaling:QueueScaling",
        policy_kwargs={"target_queue_s": plan.queue_s},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=plan.least,
            max_replicas=plan.most,
            downscale_delay_s=plan.downscale_delay_s,
            policy=policy,
            metrics_interval_s=REPORT_S,
            look_back_period_s=5 * REPORT_S,
        )
    }
