"""Loading a model with recurrent layers: its states are in the ledger as they are allocated."""

from pathlib import Path

import pytest

from support.llm_loader import MIB, config, loader
from support.recurrent_models import recurrent_model
from triptych.core.ledger import Ledger
from triptych.core.options.config import CacheOptions, DeviceOptions
from triptych.core.options.speculation import SpeculationOptions
from triptych.core.runtime.engine.cache_size import CacheSize
from triptych.core.runtime.layers.attention import KvLayout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lfm2")
    recurrent_model("lfm2").save_pretrained(path)
    return path


@pytest.mark.parametrize(("caches", "captures"), [(True, None), (False, None), (True, True)])
def test_the_ledger_has_what_is_allocated(
    folder: Path, caches: bool, captures: bool | None
) -> None:
    ledger = Ledger(256 * MIB)
    options = config(
        cache=CacheOptions(enable_prefix_caching=caches),
        device=DeviceOptions(device_graph_capture=captures),
    )
    loaded = loader(folder, ledger, options).load(lambda _: None)
    kv, held = loaded.runner.kv, ledger.by_owner()
    assert held["tiny/states"] == kv.states.num_bytes
    assert held["tiny/kv"] == sum(tensor.nbytes for tensor in kv.tensors)
    assert kv.states.num_slots == 4 + bool(captures)
    snapshots = loaded.scheduler.tokens.pool.snapshots
    assert (snapshots.num_snapshots >= 12) == caches
    loaded.close()
    assert ledger.by_owner() == {}


@pytest.mark.parametrize(("algorithm", "draft", "num_kept"), [("ngram", "", 4), ("eagle3", "x", 0)])
def test_drafts_take_a_second_state_for_each_row(
    folder: Path, algorithm: str, draft: str, num_kept: int
) -> None:
    """Not of a model that the head is not for."""
    ledger = Ledger(256 * MIB)
    speculation = SpeculationOptions(speculative_algorithm=algorithm, draft_model_path=draft)
    loaded = loader(folder, ledger, config(speculation=speculation)).load(lambda _: None)
    kv = loaded.runner.kv
    assert kv.states.num_slots == 4 + num_kept
    assert ledger.by_owner()["tiny/states"] == kv.states.num_bytes
    loaded.close()


def size(layout: KvLayout, num_bytes: int) -> CacheSize:
    return CacheSize.divided(
        layout, num_bytes, least_pages=8, most_pages=512, num_slots=4, has_snapshots=True
    )


def test_snapshots_take_half_of_the_memory_at_most(folder: Path) -> None:
    kv = loader(folder, Ledger(256 * MIB), config()).load(lambda _: None).runner.kv
    page_bytes, state_bytes = kv.layout.page_bytes, kv.layout.state_bytes
    tight = size(kv.layout, 9 * page_bytes)
    assert (tight.num_pages, tight.num_snapshots) == (8, page_bytes // state_bytes)
    middle = size(kv.layout, 24 * state_bytes + 100 * page_bytes)
    assert (middle.num_slots, middle.num_snapshots) == (4, 12)
    ample = size(kv.layout, 2**40)
    assert (ample.num_pages, ample.num_snapshots) == (512, 512 * kv.layout.page_size // 256)
