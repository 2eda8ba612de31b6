"""The account of a job, held against the log of the engine's steps, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.denoise_world import FakeImageRunner, measure, request_of
from support.driver import SchedulerDriver
from support.engine_seams import FakeLoader, FakeRunner
from support.load_bench import LoadBench
from support.speech_world import SpeechWorld, segment, speech_request
from support.staged_world import Request as StagedRequest
from support.staged_world import Rig as StagedRig
from support.virtual_engine import Chat, World, ask, prompt_of
from support.vision_world import VisionWorld, see
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.job_report import MAX_SPANS, JobRecorder, JobReport, StepTime
from triptych.core.engine_api.plan import Plan, TokenPlan
from triptych.core.engine_api.reports import StepRecord, StepReport
from triptych.core.options.config import Config, ModelOptions, ScheduleOptions
from triptych.modalities.diffusion.plan import DenoisePlan
from triptych.modalities.diffusion.scheduling.scheduler import DenoiseScheduler
from triptych.schedulers.tokens.scheduler import TokenScheduler

STEP_S = 0.01


class LoggedWorld(World):
    """An engine whose steps are logged as for `/v1/engine/events`."""

    def __init__(self, loaders: Sequence[FakeLoader]) -> None:
        super().__init__(loaders, cost_s=lambda plan: STEP_S)
        self.log: list[StepRecord] = []
        self.engine.on_steps = self._take
        self.engine.watch(True)
        self.turn_until(lambda: self.beats and self.beats[-1].models[0].state == "ready")

    def _take(self, report: StepReport) -> None:
        self.log += report.steps

    def report(self, job_id: str) -> JobReport:
        final = self.outputs.final(job_id)
        assert final is not None
        assert final.report is not None
        return final.report

    def steps_of(self, job_id: str) -> list[StepRecord]:
        """The logged steps that computed for a job."""
        starts = [start_s for start_s, plan in self.executors.started if job_id in jobs_of(plan)]
        found = [step for step in self.log if step.start_s in map(pytest.approx, starts)]
        assert len(found) == len(starts), "every step of the job is in the log"
        return found

    def flush(self) -> None:
        """Turn until the last steps are reported."""
        num_started = len(self.executors.started)
        self.turn_until(lambda: sum(step.num_steps for step in self.log) == num_started)


def jobs_of(plan: Plan) -> set[str]:
    if isinstance(plan, TokenPlan):
        return {row.job_id for row in plan.rows}
    assert isinstance(plan, DenoisePlan)
    return {row.key.job_id for row in (*plan.rows, *plan.starts)}


def check(world: LoggedWorld, job_id: str) -> JobReport:
    """What holds for the account of every job that has run."""
    report, steps = world.report(job_id), world.steps_of(job_id)
    busy_s = sum(span.busy_s for span in report.spans)
    assert busy_s == pytest.approx(sum(step.busy_s for step in steps))
    assert sum(span.num_steps for span in report.spans) == len(steps)
    assert report.spans[0].start_s == pytest.approx(steps[0].start_s - report.arrival_s)
    end_s = max(step.start_s + step.length_s for step in steps)
    assert report.spans[-1].end_s == pytest.approx(end_s - report.arrival_s)
    assert sum(report.waits.values()) + busy_s <= report.length_s + 1e-9
    num_rows = sum(step.num_rows > 1 for step in steps)
    assert sum(span.num_shared for span in report.spans) == num_rows
    return report


def test_a_job_that_waits_for_others_says_for_how_long_and_for_what() -> None:
    chat = Chat(options=ScheduleOptions(max_batch_size=1, max_batch_input_tokens=32))
    world = LoggedWorld([chat.loader])
    world.submit("first", "chat", ask(prompt_of(1), 20))
    world.turn_until(lambda: world.outputs["first"])
    world.submit("second", "chat", ask(prompt_of(2), 3))
    world.finish("first", "second")
    world.flush()
    check(world, "first")
    second = check(world, "second")
    begin_s = world.steps_of("second")[0].start_s
    assert second.waits == {"queue": pytest.approx(begin_s - second.arrival_s)}
    before = [s for s in world.log if second.arrival_s < s.start_s + s.length_s <= begin_s + 1e-9]
    (work,) = second.behind
    assert (work.model, work.kind) == ("chat", "decode")
    assert work.busy_s == pytest.approx(sum(step.busy_s for step in before))
    assert second.jobs_ahead == 1
    assert set(second.sat_out) == {"batch_rows"}


@pytest.mark.parametrize(
    ("options", "lengths", "missing"),
    [
        ({"max_batch_size": 1}, (8, 8), {"batch_rows"}),
        ({"kvcache_ce_watermark": 1.0}, (30, 24), {"cache_pages"}),
        ({"kvcache_ce_watermark": 0.5}, (8, 16), {"cache_pages"}),
        ({"max_batch_input_tokens": 8}, (20, 20), {"step_tokens"}),
    ],
)
def test_the_next_job_says_for_want_of_what_it_sat_out(
    options: dict[str, float], lengths: tuple[int, int], missing: set[str]
) -> None:
    defaults = {"max_batch_size": 8, "max_batch_input_tokens": 64}
    chat = Chat(num_pages=12, options=ScheduleOptions(**{**defaults, **options}))  # type: ignore[arg-type]
    world = LoggedWorld([chat.loader])
    for number, length in enumerate(lengths):
        world.submit(str(number), "chat", ask(prompt_of(number, length), 4))
    world.finish("0", "1")
    assert set(world.report("1").sat_out) == missing
    assert world.report("0").sat_out == {}


def test_a_preempted_job_says_how_long_it_waited_to_go_on() -> None:
    options = ScheduleOptions(max_batch_size=8, max_batch_input_tokens=32, kvcache_ce_watermark=1.0)
    chat = Chat(num_pages=10, options=options)
    world = LoggedWorld([chat.loader])
    jobs = ("0", "1", "2")
    for job_id in jobs:
        world.submit(job_id, "chat", ask(prompt_of(int(job_id), 8), 20))
    world.finish(*jobs)
    world.flush()
    reports = {job_id: check(world, job_id) for job_id in jobs}
    assert reports["0"].counts["preemptions"] == 0
    assert "preempted" not in reports["0"].waits
    last = reports["2"]
    assert last.counts["preemptions"] > 0
    gaps_s = [
        after.start_s - before.start_s - before.length_s
        for before, after in zip(world.steps_of("2"), world.steps_of("2")[1:], strict=False)
    ]
    longest_s = max(gaps_s)
    assert 0 < last.waits["preempted"] <= sum(gaps_s) + 1e-9
    assert last.waits["preempted"] > longest_s - 2 * STEP_S
    stages = [span.stage for span in last.spans]
    assert stages[:3] == ["prefill", "decode", "prefill"], "it was computed again"
    assert sum(work.busy_s for work in last.behind) > 0


def test_a_job_that_hit_the_cache_says_how_many_tokens() -> None:
    chat = Chat()
    world = LoggedWorld([chat.loader])
    prompt = prompt_of(3, 16)
    for job_id in ("cold", "warm"):
        world.submit(job_id, "chat", ask(prompt, 2))
        world.finish(job_id)
    world.flush()
    cold, warm = check(world, "cold"), check(world, "warm")
    assert (cold.counts["cached_tokens"], warm.counts["cached_tokens"]) == (0, 12)
    computed = {
        row.job_id: row.num_tokens
        for _, plan in world.executors.started
        if isinstance(plan, TokenPlan)
        for row in plan.rows
        if row.sampling is not None
    }
    for job_id, report in (("cold", cold), ("warm", warm)):
        assert computed[job_id] == report.counts["prompt_tokens"] - report.counts["cached_tokens"]


def test_an_image_says_which_steps_it_skipped_and_shared() -> None:
    runner = FakeImageRunner()
    scheduler = DenoiseScheduler(
        model="images",
        measure=measure,
        max_images=8,
        max_state_bytes=1 << 30,
        max_jobs=8,
        max_rows=8,
    )
    world = LoggedWorld([Chat().loader, FakeLoader("images", lambda: (scheduler, runner))])
    world.submit("skips", "images", request_of(interval=3))
    world.submit("computes", "images", request_of())
    world.finish("skips", "computes")
    world.flush()
    skips, computes = check(world, "skips"), check(world, "computes")
    assert skips.skipped == {0: [1, 2, 4, 5]}  # of 8, the first, each third and the last compute
    assert (skips.counts["computed_steps"], skips.counts["skipped_steps"]) == (4, 4)
    assert (computes.skipped, computes.counts["computed_steps"]) == ({0: []}, 8)
    (denoised,) = [span for span in skips.spans if span.stage == "denoise"]
    logged = [step for step in world.steps_of("skips") if step.kind == "denoise"]
    assert denoised.num_steps == len(logged) == 4
    assert denoised.num_shared == sum(step.num_rows > 1 for step in logged) > 0


def test_a_job_that_is_cancelled_or_fails_has_an_account() -> None:
    chat = Chat()
    chat.runner.poison["fails"] = 2
    world = LoggedWorld([chat.loader])
    world.submit("stops", "chat", ask(prompt_of(1), 50))
    world.submit("fails", "chat", ask(prompt_of(2), 50))
    world.submit("none", "nothing", ask(prompt_of(3), 1))
    world.finish("fails", "none")
    world.engine.cancel(["stops"])
    world.finish("stops")
    world.flush()
    for job_id, state in (("stops", "cancelled"), ("fails", "failed")):
        report = world.report(job_id)
        assert report.state == state
        assert 0 < sum(span.busy_s for span in report.spans) <= report.length_s + 1e-9
    assert (world.report("none").state, world.report("none").spans) == ("failed", ())


def test_a_job_whose_model_is_loaded_for_it_says_how_long_that_took() -> None:
    chat = Chat()

    def make() -> tuple[TokenScheduler, FakeRunner]:
        bench.clock.advance(2.0)
        return chat.scheduler, chat.runner

    config = Config(models=ModelOptions(load="first-use"))
    bench = LoadBench(FakeLoader("chat", make), config=config)
    for job_id in ("first", "second"):
        job = Job(job_id=job_id, model="chat", request=ask(prompt_of(1), 2), sink=bench.outputs)
        job.arrival_s = bench.clock()
        bench.engine.submit(job)
        bench.finish(job_id)
    waits = {job_id: bench.outputs[job_id][-1].report.waits for job_id in ("first", "second")}
    assert waits["first"]["load"] == pytest.approx(2.0)
    assert "load" not in waits["second"]


def test_a_slow_reader_is_no_wait_for_the_device() -> None:
    recorder = JobRecorder(0.0, {("chat", "decode"): 5.0})
    recorder.wait("queue", 0.0)
    recorder.note("prefill", StepTime(1.0, 2.0))
    recorder.set_paused(True, 2.5)
    recorder.note("decode", StepTime(2.5, 3.0))  # it was in flight
    recorder.set_paused(False, 6.0)
    report = recorder.report("finished", 7.0)
    assert report.waits == {"queue": 1.0, "slow_reader": 3.5}
    assert report.behind == ()


def test_a_wait_goes_on_after_a_slow_reader() -> None:
    recorder = JobRecorder(0.0)
    recorder.set_paused(True, 1.0)
    recorder.set_paused(False, 3.0)
    recorder.note("prefill", StepTime(4.0, 5.0))
    recorder.set_paused(True, 5.0)
    recorder.wait("preempted", 6.0)  # slow readers give way first
    recorder.set_paused(False, 8.0)
    recorder.note("prefill", StepTime(9.0, 10.0))
    report = recorder.report("finished", 10.0)
    assert report.waits == {"queue": 2.0, "slow_reader": 3.0, "preempted": 3.0}


def test_the_number_of_spans_is_bounded() -> None:
    recorder = JobRecorder(0.0)
    for n in range(3 * MAX_SPANS):
        recorder.note("audio" if n % 2 else "decode", StepTime(float(n), n + 0.5, 1))
    report = recorder.report("finished", 1000.0)
    assert len(report.spans) == MAX_SPANS
    assert sum(span.num_steps for span in report.spans) == 3 * MAX_SPANS
    assert sum(span.busy_s for span in report.spans) == pytest.approx(1.5 * MAX_SPANS)


def account(world: SchedulerDriver, job_id: str) -> JobReport:
    return world.jobs[job_id].recorder.report("finished", world.now_s)


def test_a_conversation_about_an_image_says_whether_it_was_encoded() -> None:
    world = VisionWorld()
    for job_id in ("first", "again"):
        world.submit(job_id, see(4, ("a", 8), 4, max_tokens=3))
        world.run()
    first, again = account(world, "first"), account(world, "again")
    assert [span.stage for span in first.spans] == ["encode", "prefill", "decode"]
    assert (first.counts["images"], first.counts["cached_images"]) == (1, 0)
    assert "encode" not in [span.stage for span in again.spans]
    assert again.counts["cached_images"] == 1


def test_speech_says_what_its_codec_took() -> None:
    world = SpeechWorld()
    world.submit("job", speech_request(segment(1)))
    world.run()
    report = account(world, "job")
    assert {span.stage for span in report.spans} == {"prefill", "decode", "audio"}
    assert report.counts["segments"] == 1
    assert report.counts["output_tokens"] > 0


def test_work_in_stages_counts_its_units() -> None:
    world = StagedRig()
    world.submit("job", StagedRequest((2, 1)))
    world.run()
    report = account(world, "job")
    assert report.counts == {"units": 2, "finished_units": 2}
    assert sum(span.num_steps for span in report.spans) == 3
