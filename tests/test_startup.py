"""What a start shows: phases as they end, then hits and misses of each kind of thing."""

from __future__ import annotations

import logging

import pytest

from triptych.core.options.config import ServerOptions
from triptych.core.process.lookups import Lookup
from triptych.startup import Startup

FOUND = (
    Lookup(phase="weights", what="one", seconds=0.5, is_hit=True),
    Lookup(phase="native kernels", what="auto", seconds=0.25, is_hit=True, is_promised=True),
    Lookup(phase="weights", what="two", seconds=1.0, is_hit=False, reason="not in the cache"),
)


def test_hits_and_misses_are_shown_when_all_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    startup = Startup(ServerOptions())
    for lookup in FOUND:
        startup.take(lookup)
    startup.phase("load", 2.0, "one")
    startup.ready("http://here")
    startup.ready("again")
    lines = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    assert lines[1:4] == [
        "load 2.00 s one",
        "weights 1.50 s hits 1, misses 1; two: not in the cache",
        "native kernels 0.25 s hits 1, misses 0",
    ]
    assert [line.split()[0] for line in lines[4:]] == ["ready", "ready"], "they are told once"


def test_in_json_each_is_a_record(caplog: pytest.LogCaptureFixture) -> None:
    startup = Startup(ServerOptions(log_format="json"))
    startup.take(FOUND[2])
    with caplog.at_level(logging.INFO):
        startup.ready("here")
    first, last = (record.fields for record in caplog.records)
    assert (first["phase"], first["elapsed_s"]) == ("weights", 1.0)
    assert first["note"] == "hits 0, misses 1; two: not in the cache"
    assert last["phase"] == "ready"
