"""Loading a model with tiers: host memory is in the ledger, and comes back with the model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from support.llm_loader import MIB, Save, config, loader
from support.recurrent_models import recurrent_model
from triptych.core.errors import ConfigError, ModelTooLarge
from triptych.core.kv.parts import PartKind
from triptych.core.ledger import Ledger
from triptych.core.options.config import CacheOptions, Config


def tiers(**options: Any) -> Config:
    return config(cache=CacheOptions(**{"kv_connector": "local", **options}))


def on_disk(folder: Path) -> Config:
    settings = json.dumps({"disk_offload_dir": str(folder)})
    return tiers(kv_connector="tiered", kv_connector_config=settings)


@pytest.mark.parametrize(
    ("options", "share"), [({}, 2.0), ({"hicache_ratio": 0.5}, 0.5), ({"hicache_ratio": 1e9}, 0)]
)
def test_host_memory_follows_the_cache_and_what_is_left(
    options: dict[str, float], share: float, save: Save
) -> None:
    ledger = Ledger(64 * MIB)
    loaded = loader(save(), ledger, tiers(**options)).load(lambda _: None)
    held = ledger.by_owner()
    page_bytes = loaded.runner.kv.layout.page_bytes
    pages = held["tiny/kv"] // page_bytes - 1
    left = ledger.available_bytes + held["tiny/kv-host"]
    wanted = share * pages * page_bytes if share else left // 2
    assert 0 <= wanted - held["tiny/kv-host"] < page_bytes
    ledger.check()
    loaded.close()
    assert ledger.by_owner() == {}


def test_a_size_that_never_fits_is_refused_with_its_option(save: Save) -> None:
    with pytest.raises(ModelTooLarge, match="--host-kvcache-swap-space-gb"):
        loader(save(), Ledger(64 * MIB), tiers(host_kvcache_swap_space_gb=1)).load(lambda _: None)
    small = tiers(host_kvcache_swap_space_gb=1e-9)
    with pytest.raises(ConfigError, match="another --host-kvcache-swap-space-gb"):
        loader(save(), Ledger(64 * MIB), small).load(lambda _: None)


def test_a_model_that_is_loaded_again_opens_its_folder_again(save: Save, tmp_path: Path) -> None:
    folder = save()
    for _ in range(2):
        ledger = Ledger(64 * MIB)
        loaded = loader(folder, ledger, on_disk(tmp_path)).load(lambda _: None)
        with pytest.raises(ConfigError, match="another server"):
            loader(folder, Ledger(64 * MIB), on_disk(tmp_path)).load(lambda _: None)
        loaded.close()
        assert ledger.by_owner() == {}
    assert "triptych-tiers" not in {thread.name for thread in threading.enumerate()}


def test_kinds_of_parts_have_the_shares_of_the_device(tmp_path: Path) -> None:
    recurrent_model("lfm2").save_pretrained(tmp_path)
    ledger = Ledger(256 * MIB)
    loaded = loader(tmp_path, ledger, tiers(hicache_ratio=3.0)).load(lambda _: None)
    shelves, pool = loaded.scheduler.exchange._store._shelves, loaded.scheduler.tokens.pool
    assert [*shelves] == [PartKind.FULL, PartKind.STATE]
    numbers = [shelf.host.num_pages for shelf in shelves.values()]
    assert numbers == [3 * pool.num_pages, 3 * pool.snapshots.num_snapshots]
    sizes = [shelf.host.num_pages * shelf.host.page_bytes for shelf in shelves.values()]
    assert ledger.by_owner()["tiny/kv-host"] == sum(sizes)
    loaded.close()
    assert ledger.by_owner() == {}
