"""What each figure of a benchmark means."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.llm.api.bench.client import BenchServer, RequestRecord
from triptych.modalities.llm.api.bench.load import Load, Run, Workload
from triptych.modalities.llm.api.bench.metrics import (
    Goodput,
    Spread,
    count_errors,
    over_repeats,
    percentiles,
    ratios,
    summarize,
)
from triptych.modalities.llm.api.bench.report import Result, document, machine, table


def _sample(
    *arrivals_s: float, ended_s: float, num_output_tokens: int, error: str = ""
) -> RequestRecord:
    return RequestRecord(
        sent_s=10.0,
        ended_s=ended_s,
        arrivals_s=list(arrivals_s),
        num_prompt_tokens=100,
        num_cached_tokens=50,
        num_output_tokens=num_output_tokens,
        error=error,
    )


def _run() -> Run:
    return Run(
        samples=(
            _sample(11.0, 12.0, 14.0, ended_s=14.5, num_output_tokens=8),
            _sample(13.0, ended_s=13.0, num_output_tokens=1),
            _sample(error="HTTP 429", ended_s=10.1, num_output_tokens=0),
        ),
        elapsed_s=4.5,
    )


def test_metrics_of_one_run() -> None:
    metrics = summarize(_run())
    assert metrics["output_tokens_per_s"] == 9 / 4.5
    assert metrics["requests_per_s"] == 2 / 4.5
    assert metrics["ttft_p50_s"] == 2.0
    assert metrics["itl_p50_s"] == 1.5
    assert metrics["tpot_p50_s"] == 3.5 / 7
    assert metrics["e2e_p50_s"] == pytest.approx(3.75)
    assert metrics["prompt_tokens_mean"] == 100
    assert metrics["cached_tokens_mean"] == 50
    assert metrics["num_errors"] == 1
    assert metrics["ttft_mean_s"] == 2.0
    assert metrics["itl_p95_s"] == pytest.approx(1.95)
    assert (metrics["num_requests"], metrics["prompt_tokens"], metrics["output_tokens"]) == (
        3,
        200,
        9,
    )
    assert metrics["total_tokens_per_s"] == 209 / 4.5
    assert "goodput_per_s" not in metrics


@pytest.mark.parametrize(
    ("targets", "num_good"),
    [
        (["ttft:1500"], 1),
        (["ttft:3000"], 2),
        (["ttft:3000", "itl:1900"], 1),  # the longest gap of the first is 2 s
        (["e2el:4000"], 1),
        (["tpot:400"], 1),
    ],
)
def test_good_requests_meet_every_target(targets: list[str], num_good: int) -> None:
    metrics = summarize(_run(), Goodput.parse(targets))
    assert metrics["goodput_per_s"] == num_good / 4.5
    assert metrics["goodput_share"] == num_good / 3


def test_a_run_that_only_failed_has_counts_and_no_latencies() -> None:
    failed = _sample(error="timeout", ended_s=11.0, num_output_tokens=0)
    metrics = summarize(Run(samples=(failed, failed), elapsed_s=1.0))
    assert metrics["num_errors"] == 2
    assert metrics["output_tokens_per_s"] == 0
    assert not [name for name in metrics if name.startswith(("ttft", "itl", "e2e", "prompt"))]


def test_errors_are_counted_by_kind() -> None:
    assert count_errors([_run(), _run()]) == {"HTTP 429": 2}


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_ordered_and_within(values: list[float]) -> None:
    found = list(percentiles(values).values())
    assert found == sorted(found)
    assert min(values) <= found[0]
    assert found[-1] <= max(values)


def test_percentiles_interpolate() -> None:
    assert percentiles([0.0, 1.0, 2.0, 3.0, 4.0])[50] == 2.0
    assert percentiles([0.0, 10.0])[90] == 9.0
    assert percentiles([]) == {}


def test_spread_over_repeats_skips_what_one_repeat_lacks() -> None:
    repeats = [{"a": 3.0, "b": 1.0}, {"a": 1.0}, {"a": 2.0, "b": 1.0}]
    assert over_repeats(repeats) == {"a": Spread(2.0, 1.0, 3.0)}


def test_ratios_are_taken_repeat_by_repeat() -> None:
    ours = [{"a": 1.0}, {"a": 2.0}, {"a": 4.0}]
    theirs = [{"a": 2.0}, {"a": 6.0}, {"a": 4.0}]
    assert ratios(ours, theirs) == {"a": Spread(2.0, 1.0, 3.0)}


def test_ratio_to_zero_is_left_out() -> None:
    assert ratios([{"num_errors": 0.0}], [{"num_errors": 2.0}]) == {}


def test_document_and_table_name_no_address() -> None:
    target = BenchServer(label="ours", base_url="http://secret.example:1", model="/home/me/tiny")
    one, runs = Load(concurrency=1), (_run(), _run())
    result = Result(target=target, load=one, runs=runs)
    theirs = BenchServer(label="theirs", base_url="http://b")
    other = Result(target=theirs, load=one, runs=runs)
    workload = Workload(num_requests=3, prompt_tokens=100, output_tokens=8)
    found = document([result, other], workload, {})
    assert "secret" not in str(found)
    assert "/home" not in str(found)
    assert found["loads"][0]["targets"][0]["model"] == "tiny"
    assert found["loads"][0]["targets"][0]["errors"] == {"HTTP 429": 2}
    assert found["loads"][0]["ratios"]["theirs / ours"]["ttft_p50_s"] == {
        "median": 1,
        "low": 1,
        "high": 1,
    }
    titles = [column.header for column in table([result, other]).columns]
    assert titles == ["", "ours", "theirs", "theirs / ours"]


def test_machine_is_described_without_its_name() -> None:
    found = machine()
    assert found["num_cores"] >= 1
    assert found["memory_gib"] > 0
    processor = {"cpu", "cpu_family", "cpu_model", "instructions"}
    assert set(found) == processor | {"num_cores", "memory_gib", "system", "gpus"}


def test_prompts_have_the_length_asked_for_and_share_only_the_prefix() -> None:
    workload = Workload(
        num_requests=4, prompt_tokens=100, output_tokens=1, shared_prefix_tokens=60, seed=1
    )
    prompts = [prompt.split() for prompt in workload.prompts(repeat=0, tokens_per_word=2.0)]
    assert [len(words) for words in prompts] == [50] * 4
    assert len({tuple(words[:30]) for words in prompts}) == 1
    assert len({tuple(words[30:]) for words in prompts}) == 4


def test_prompts_repeat_for_a_seed_and_differ_between_repeats() -> None:
    workload = Workload(num_requests=2, prompt_tokens=20, output_tokens=1, shared_prefix_tokens=10)
    first = workload.prompts(repeat=0, tokens_per_word=1.0)
    assert first == workload.prompts(repeat=0, tokens_per_word=1.0)
    again = workload.prompts(repeat=1, tokens_per_word=1.0)
    assert not {prompt[:40] for prompt in first} & {prompt[:40] for prompt in again}


def test_a_one_token_answer_has_no_gaps() -> None:
    sample = _sample(11.0, ended_s=11.0, num_output_tokens=1)
    assert sample.gaps_s == []
    assert math.isclose(sample.e2e_s, 1.0)
