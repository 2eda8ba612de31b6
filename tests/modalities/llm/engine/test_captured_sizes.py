"""Captured steps of a loaded model: their sizes, their memory, and options that need them."""

from __future__ import annotations

from typing import Any

import pytest

from support.llm_loader import MIB, Save, config, loader
from triptych.core.errors import ConfigError
from triptych.core.ledger import Ledger
from triptych.core.options.config import (
    Config,
    DebugOptions,
    DeviceOptions,
)
from triptych.core.runtime.engine import loader as core_loader
from triptych.core.runtime.engine.token_runner import TokenRunner
from triptych.core.runtime.graphs.buckets import DecodeBuckets
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.schedulers.base import LoadedModel


def captured(**options: Any) -> Config:
    return config(device=DeviceOptions(device_graph_capture=True, **options))


def graphs_of(loaded: LoadedModel) -> DecodeGraphs | None:
    assert isinstance(loaded.runner, TokenRunner)
    return loaded.runner._graphs


def test_captured_steps_are_in_the_ledger_and_stay_within(save: Save) -> None:
    ledger = Ledger(64 * MIB)
    loaded = loader(save(), ledger, captured()).load(lambda _: None)
    graphs, reserved = graphs_of(loaded), ledger.by_owner()["tiny/graphs"]
    assert graphs is not None
    assert isinstance(loaded.runner, TokenRunner)
    loaded.runner.capture()
    assert graphs.steps.num_captured == len(graphs.buckets.all()) > 0
    assert 0 < graphs.steps.num_bytes <= reserved
    held = ledger.by_owner()
    assert held["tiny/graphs"] == graphs.steps.num_bytes, "as measured, from then on"
    pages = sum(cells.nbytes for cells in loaded.runner._kv.tensors)
    assert held["tiny/kv"] == pages
    loaded.close()
    assert ledger.by_owner() == {}


def test_on_a_cpu_nothing_is_captured_unasked(save: Save) -> None:
    loaded = loader(save(), Ledger(64 * MIB), config()).load(lambda _: None)
    assert graphs_of(loaded) is None


def test_sizes_of_captured_steps_are_the_users(save: Save) -> None:
    options = captured(device_graph_rows=(3, 1), device_graph_padding=False)
    graphs = graphs_of(loader(save(), Ledger(64 * MIB), options).load(lambda _: None))
    assert graphs is not None
    assert graphs.buckets == DecodeBuckets((1, 3), (8,), pads=False)
    graphs = graphs_of(
        loader(save(), Ledger(64 * MIB), captured(device_graph_max_rows=2)).load(lambda _: None)
    )
    assert graphs is not None
    assert graphs.buckets.rows == (1, 2)


def test_without_room_for_captured_steps_a_model_is_served_without(
    save: Save, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core_loader, "decode_graph_bytes", lambda *_: 2**40)
    loaded = loader(save(), Ledger(64 * MIB), captured()).load(lambda _: None)
    assert graphs_of(loaded) is None
    assert "steps run eagerly: tiny/graphs needs" in caplog.text


def test_steps_with_prompts_are_not_captured_on_a_cpu(save: Save) -> None:
    with pytest.raises(ConfigError, match=r"^--device-graph-prompts: steps of tiny"):
        loader(save(), Ledger(64 * MIB), captured(device_graph_prompts=True)).load(lambda _: None)
    graphs = graphs_of(loader(save(), Ledger(64 * MIB), captured()).load(lambda _: None))
    assert graphs is not None
    assert graphs.prompts is None


@pytest.mark.parametrize("more", [{}, {"device_graph_max_rows": 3}])
def test_sizes_beyond_the_largest_batch_are_refused(save: Save, more: dict[str, Any]) -> None:
    options = captured(device_graph_rows=(1, 9 if not more else 4), **more)
    with pytest.raises(ConfigError, match="--device-graph-rows: no batch of"):
        loader(save(), Ledger(64 * MIB), options).load(lambda _: None)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (config(device=DeviceOptions(device_graph_rows=(2,))), "--device-graph-rows"),
        (config(device=DeviceOptions(device_graph_max_rows=2)), "--device-graph-max-rows"),
        (config(device=DeviceOptions(device_graph_padding=False)), "--no-device-graph-padding"),
        (config(debug=DebugOptions(debug_verify_replay=True)), "--debug-verify-replay"),
    ],
)
def test_options_of_captured_steps_want_some(save: Save, options: Config, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}.*--device-graph-capture"):
        loader(save(), Ledger(64 * MIB), options).load(lambda _: None)
