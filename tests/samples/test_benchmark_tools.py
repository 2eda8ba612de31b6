"""What the benchmarks share judges rightly: growth, sections of pages, the files of servers."""

import json
import runpy
import string
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "samples" / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Names of a script of that folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: SimpleNamespace(**runpy.run_path(str(BENCHMARKS / f"{name}.py")))


def _sample(soak: Any, at_s: float, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "rss_bytes": {"engine": 1000, "api": 100},
        "pss_bytes": 1100,
        "num_descriptors": 40,
        "num_threads": 20,
        "num_processes": 3,
        "temp_bytes": 0,
        "gauges": {},
    }
    return soak.Sample(at_s=at_s, **values | changes)


def _record(soak: Any, *, rate: float = 0.0, **last: Any) -> Any:
    """A soak of 100 samples, whose engine grows by `rate` bytes a second, and its last rest."""
    samples = [
        _sample(
            soak,
            at_s,
            pss_bytes=1100 + rate * at_s + at_s % 7,
            rss_bytes={"engine": 1000 + rate * at_s + at_s % 7, "api": 100},
        )
        for at_s in range(100)
    ]
    rests = [_sample(soak, 25), _sample(soak, 100, **last)]
    counts = [Counter({("chat", "ok"): 9, ("chat", "cancelled"): 3})] * 101
    return soak.Record(samples=samples, rests=rests, counts=counts, warm_s=25.0)


def _bad(soak: Any, record: Any) -> list[str]:
    return [finding.what for finding in soak.judge(record) if not finding.is_good]


def test_a_steady_server_is_found_good(load: Any) -> None:
    soak = load("soak")
    assert _bad(soak, _record(soak)) == []


def test_memory_that_rises_is_found_whatever_its_noise(load: Any) -> None:
    soak = load("soak")
    assert _bad(soak, _record(soak, rate=0.5)) == ["memory of all", "memory of engine"]


@pytest.mark.parametrize(
    ("last", "what"),
    [
        ({"num_descriptors": 41}, "descriptors at rest"),
        ({"num_threads": 23}, "threads at rest"),
        ({"temp_bytes": 1}, "temp bytes at rest"),
        ({"gauges": {"engine_restarts_total": 1.0}}, "restarts of the engine"),
        ({"gauges": {"kv_pages_leased": 1.0}}, "pages and jobs left"),
    ],
)
def test_what_is_left_at_the_end_is_found(load: Any, last: dict[str, Any], what: str) -> None:
    soak = load("soak")
    assert _bad(soak, _record(soak, **last)) == [what]


def test_an_error_of_a_route_is_found(load: Any) -> None:
    soak = load("soak")
    record = _record(soak)
    record.counts.append(Counter({("chat", "HTTP 500"): 1}))
    assert _bad(soak, record) == ["errors"]
    assert "HTTP 500" in soak.report(record, 1.0)


def test_a_section_is_replaced_and_the_rest_of_the_page_stays(load: Any, tmp_path: Path) -> None:
    pages = load("pages")
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- a -->\n\nold\n\n<!-- /a -->\n\nAfter.\n")
    pages.write_section(page, "a", "new")
    pages.write_section(page, "b", "more")
    pages.write_section(page, "a", "newest")
    begins = "# Title\n\n<!-- a -->\n\nnewest\n\n<!-- /a -->\n\nAfter.\n\n"
    assert page.read_text() == begins + "<!-- b -->\n\nmore\n\n<!-- /b -->\n"


def test_every_place_in_the_file_of_servers_is_filled(load: Any) -> None:
    peers = load("chat_peers")
    entries = tomllib.loads((BENCHMARKS / "chat_peers.toml").read_text())["server"]
    known = {"port", "python", "here", "peers", "folder", "model", "num_cores", "cores"}
    for entry in entries:
        peer = peers.Peer(**entry)
        texts = (peer.command, peer.model, *peer.environment.values())
        places = {name for text in texts for _, name, *_ in string.Formatter().parse(text) if name}
        assert places <= known
        filled = peer.filled(dict.fromkeys(known, "a b"))
        assert "'a b'" in filled.command
        assert json.dumps(filled.body)
        assert "{" not in filled.command + "".join(filled.environment.values())


def test_ours_is_set_next_to_the_best_peer(load: Any) -> None:
    peers = load("chat_peers")
    column = ("tok/s", "one stream", "decode_tokens_per_s", 1.0, True)
    outcomes = [
        peers.Outcome(
            label=label, command="", repeats={"one stream": [{"decode_tokens_per_s": speed}]}
        )
        for label, speed in (("ours", 30.0), ("slow", 10.0), ("fast", 40.0), ("ours", 10.0))
    ]
    assert peers.ratio(outcomes, column, "ours") == "**0.50**"
    assert peers.ratio(outcomes, (*column[:4], False), "ours") == "**0.50**"


def test_the_scheduler_alone_is_timed_while_jobs_wait(load: Any) -> None:
    assert load("growth").scheduler_step_s(num_rows=2, num_waiting=3, num_steps=4) > 0


def test_a_fresh_process_answers_its_first_speech_requests() -> None:
    script = str(BENCHMARKS / "first_requests.py")
    ended = subprocess.run(
        [sys.executable, script, "--runs", "1"], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "1 processes, 0 died; exit codes {0: 1}\n", ended.stderr
