"""Which options of tiers go together, under whose names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.core.errors import ConfigError
from triptych.core.http.auth import Keyring
from triptych.core.kv.tiers.salt import kept_salt
from triptych.core.options import command, table
from triptych.core.options.config import CacheOptions, Config
from triptych.core.options.tier_plan import TierPlan

GIB = 2**30
TIERED = ["--kv-connector", "tiered", "--kv-connector-config"]


def plan(*words: str) -> TierPlan | None:
    parser = command._Parser()
    table.add_options(parser)
    return TierPlan.of(table.resolve(table.parse(parser, words)))


def settings(**given: Any) -> str:
    return json.dumps(given)


def test_without_a_connector_there_are_no_tiers() -> None:
    assert TierPlan.of(Config()) is None
    assert plan("--kv-connector", "null") is None
    assert plan("--no-enable-kvcache-swapping-to-host") is None


@pytest.mark.parametrize(
    ("words", "host_gib", "ratio"),
    [
        (["--kv-connector", "local"], 0, 2),
        (["--enable-kvcache-swapping-to-host", "--host-kvcache-swap-space-gb", "3"], 3, 2),
        (["--enable-hierarchical-cache", "--hicache-ratio", "5"], 0, 5),
        (["--enable-hierarchical-cache", "--hicache-size", "7"], 7, 2),
        (["--kv-connector", "local", "--hicache-write-policy", "write_through"], 0, 2),
        ([*TIERED[:1], "local", TIERED[2], settings(host_offload_max_gb=2)], 2, 2),
    ],
)
def test_names_of_other_servers_size_host_memory(
    words: list[str], host_gib: int, ratio: float
) -> None:
    found = plan(*words)
    assert found is not None
    assert (found.host_bytes, found.host_ratio, found.folder) == (host_gib * GIB, ratio, "")


def test_settings_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text("disk_offload_dir: /pages\ndisk_offload_max_gb: 1.5\n")
    found = plan(*TIERED, str(file))
    assert found is not None
    assert (found.folder, found.disk_bytes) == ("/pages", 1.5 * GIB)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv-connector", "tiered"], "needs a folder"),
        ([*TIERED, "{"], "invalid JSON"),
        ([*TIERED, "/no/such/file"], "kv-connector-config /no/such/file: cannot be read"),
        ([*TIERED, settings(disk_offload_dir=3)], "disk_offload_dir is 3"),
        ([*TIERED, settings(disk_offload_folder="x")], "Its fields are"),
        ([*TIERED, settings(block_store_endpoint="x")], "on this machine"),
        ([*TIERED, settings(disk_offload_dir="x", disk_offload_direct_io=True)], "direct_io"),
        ([*TIERED, settings(disk_offload_dir="x", disk_offload_max_gb=-1)], "not negative"),
        (["--kv-connector", "local", TIERED[2], settings(disk_offload_dir="x")], "has no disk"),
        (["--kv-connector", "lmcache"], "write tiered"),
        (["--enable-lmcache"], "write tiered"),
        (["--kv-connector", "dkv"], "write tiered"),
        (["--hicache-ratio", "3"], "add --kv-connector local"),
        (["--host-kvcache-swap-space-gb", "3"], "add --kv-connector local"),
        (["--kv-connector", "local", "--no-enable-prefix-caching"], "cannot be combined"),
        (["--kv-connector", "local", "--tensor-parallel-size", "2"], "cannot be combined"),
        (["--kv-connector", "local", "--pipeline-role", "decode"], "cannot be combined"),
        ([*TIERED, settings(disk_offload_dir="x"), "--replicas", "2"], "cannot be combined"),
        (["--hicache-write-policy", "write_back"], "as soon as they are complete"),
        (["--hicache-storage-backend", "file"], "--kv-connector local"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(*words)


def test_one_size_is_given_once() -> None:
    config = settings(host_offload_max_gb=2)
    given = {"kv_connector": "local", "kv_connector_config": config}
    with pytest.raises(ConfigError, match="one size"):
        TierPlan.of(Config(cache=CacheOptions(host_kvcache_swap_space_gb=3, **given)))  # type: ignore[arg-type]


def test_tenants_have_the_same_names_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    found = plan(*TIERED, settings(disk_offload_dir=str(folder)))
    keyrings = [Keyring(["one", "two"], salt=kept_salt(found)) for _ in range(2)]
    names = [[ring.identify(f"Bearer {key}").tenant for key in ("one", "two")] for ring in keyrings]
    assert names[0] == names[1]
    assert len(set(names[0])) == 2
    assert kept_salt(plan(*TIERED, settings(disk_offload_dir=str(tmp_path / "other")))) != (
        kept_salt(found)
    )
    assert (folder / "salt").stat().st_mode & 0o077 == 0
    assert kept_salt(None) == kept_salt(plan("--kv-connector", "local")) == b""
    assert Keyring(["one"]).identify("Bearer one").tenant not in names[0]
