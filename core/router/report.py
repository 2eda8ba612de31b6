"""Load reports of replicas: queued seconds of work, and costs of requests.

Owns the report and its derivation from an engine's heartbeat. The seconds come from the cost models
of the engine's schedulers.
"""

from __future__ import annotations

import msgspec

from triptych.core.engine_api.reports import Heartbeat
from triptych.core.process.metrics import split_series

BACKLOG_SECONDS = "backlog_seconds"
JOB_SECONDS = "job_seconds"
PREFILL_SECONDS = "token_seconds"


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica's load. `job_s` and `token_s` are seconds per job and per prompt token, by model.

    `backlog_s` is the remaining work of its device; `cache_tokens` is the capacity of its cache,
    of which the share `page_use` (0 to 1) is in use. `ready` names the models in memory.
    """

    backlog_s: float = 0.0
    job_s: dict[str, float] = {}
    token_s: dict[str, float] = {}
    cache_tokens: int = 0
    page_use: float = 0.0
    ready: tuple[str, ...] = ()

    @classmethod
    def of(cls, beat: Heartbeat, page_size: int) -> LoadReport:
        """Derive the load from `beat`, for an engine with pages of `page_size` tokens."""
        found: dict[str, dict[str, float]] = {}
        for name, value in beat.gauges.items():
            gauge, labels = split_series(name)
            if "model" in labels:
                found.setdefault(gauge.removeprefix("triptych_"), {})[labels["model"]] = value
        num_pages = sum(found.get("kv_pages", {}).values())
        num_leased = sum(found.get("kv_pages_leased", {}).values())
        return cls(
            backlog_s=sum(found.get(BACKLOG_SECONDS, {}).values()),
            job_s=found.get(JOB_SECONDS, {}),
            token_s=found.get(PREFILL_SECONDS, {}),
            cache_tokens=int(num_pages * page_size),
            page_use=num_leased / num_pages if num_pages else 0.0,
            ready=tuple(each.model for each in beat.models if each.state == "ready"),
        )
