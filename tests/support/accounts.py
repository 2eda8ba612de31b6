"""An engine client that has an account of every job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.http import FakeEngine
from triptych.core.engine_api.job_report import BusyWith, JobReport, JobSpan

REPORT = JobReport(
    state="finished",
    arrival_s=50.0,
    length_s=4.0,
    first_output_s=2.5,
    jobs_ahead=3,
    waits={"queue": 1.0, "preempted": 0.5},
    behind=(BusyWith(model="other", kind="denoise", busy_s=1.25),),
    sat_out={"cache_pages": 2},
    spans=(
        JobSpan(stage="prefill", start_s=1.0, end_s=2.0, busy_s=0.75, num_steps=3),
        JobSpan(stage="decode", start_s=2.0, end_s=4.0, busy_s=1.5, num_steps=9, num_shared=4),
    ),
    counts={"prompt_tokens": 20, "cached_tokens": 16},
    skipped={0: [1, 2]},
)


@dataclass
class ReportingEngine(FakeEngine):
    """An engine client that has an account of every job that has ended."""

    async def submit(self, model: str, request: Any, *, job_id: str, **about: Any) -> Any:  # type: ignore[override]
        self.journal.open(job_id, model)
        async for output in super().submit(model, request, job_id=job_id, **about):
            if output.is_final:
                self.journal.end(job_id)
                self.journal.add_report(job_id, REPORT)
            yield output
