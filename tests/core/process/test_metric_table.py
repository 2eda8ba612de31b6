"""Every metric that a scheduler reports has a help text of its own kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import triptych
from support.denoise_world import Rig
from support.speech_world import SpeechWorld
from support.staged_world import Rig as StagedWorld
from support.token_world import World as TokenWorld
from support.vision_world import VisionWorld
from triptych.core.kv.transfer.memory import new_counts
from triptych.core.process.metric_table import FAMILIES, GROUPS
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.roles.transfer_jobs import exchange_stats

_COUNTER = re.compile(r"""["'](?:triptych_)?([a-z]\w*_total)["']|\b([a-z]\w*_total)=0""")
_PLACES = ("core/kv", "schedulers", "modalities")


def report(kind: str) -> SchedulerStats:
    """What a scheduler of a kind reports."""
    if kind == "tokens":
        return TokenWorld().scheduler.stats()
    if kind == "vision":
        return VisionWorld().scheduler.stats()
    if kind == "images":
        return Rig().scheduler.stats()
    if kind == "speech":
        return SpeechWorld().scheduler.stats()
    if kind == "stages":
        return StagedWorld().scheduler.stats()
    nothing = SchedulerStats(num_waiting=0, num_running=0, gauges={}, counters={})
    counted = exchange_stats(nothing, new_counts(64), new_counts(64), "feature_")
    return exchange_stats(counted, new_counts(64), new_counts(64))


@pytest.mark.parametrize("kind", ["tokens", "vision", "images", "speech", "stages", "transfers"])
def test_what_a_scheduler_reports_is_in_the_table(kind: str) -> None:
    stats = report(kind)
    names = {**dict.fromkeys(stats.gauges, "gauge"), **dict.fromkeys(stats.counters, "counter")}
    names.pop("page_links", None), names.pop("page_bytes", None)
    assert names
    for name, metric_kind in names.items():
        family = FAMILIES[f"triptych_{name}"]
        assert (family.kind, family.labels) == (metric_kind, ("model",)), name


def test_every_counter_in_the_code_is_in_the_table() -> None:
    root = Path(triptych.__file__).parent
    found = {
        name
        for place in _PLACES
        for file in root.joinpath(*place.split("/")).rglob("*.py")
        for match in _COUNTER.findall(file.read_text(encoding="utf-8"))
        for name in match
        if name
    }
    assert len(found) > 35, "the code was read"
    assert {name for name in found if f"triptych_{name}" not in FAMILIES} == set()


def test_names_follow_prometheus_conventions() -> None:
    assert sum(map(len, GROUPS.values())) == len(FAMILIES), "a name is in one group"
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"(triptych|process)_[a-z0-9_]+", name)
        assert (family.kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|s|kb|mb|mib)(_total)?$", name), "units are base units"
        assert family.help.endswith("."), name
    helps = [family.help for family in FAMILIES.values()]
    assert len(set(helps)) == len(helps), "each says something of its own"
