"""Pages below the device, as the scheduler sees them: who finds them, keeps them, drops them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from support import page_keys
from support.tiered_world import TieredWorld
from support.token_steps import prompt
from support.token_world import NAMESPACE, World, token_request
from triptych.core.engine_api.tokens import CacheAction
from triptych.core.errors import UnsupportedOption
from triptych.core.kv.keys import root_key
from triptych.core.kv.parts import PagePart, PartKind

FIRST, SECOND, LONG = prompt(17), prompt(17, 20), prompt(38, 30)

FULL = PartKind.FULL


def tiered(folder: Path, host_pages: int = 30) -> TieredWorld:
    """A device of ten pages of four tokens: a long prompt evicts the others."""
    world = World(num_pages=10, page_size=4, max_length=40, max_batch_size=2)
    return TieredWorld(world, host_pages=host_pages, folder=folder, disk_pages=100)


def run(tiers: TieredWorld, name: str, ids: tuple[int, ...], tenant: str = "") -> int:
    """Run a prompt; returns the tokens of it that were cached."""
    tiers.run(token_request(ids, max_tokens=1, tenant=tenant), name)
    return tiers.world.deltas(name)[0].num_cached_tokens


def prompt_keys(world: World, ids: tuple[int, ...]) -> list[bytes]:
    """The keys of a prompt's pages."""
    return page_keys.page_keys(root_key(NAMESPACE), ids, world.pool.page_size)


def act(world: World, action: CacheAction, ids: tuple[int, ...], tenant: str = "") -> int:
    """Do something with the pages of a prompt; returns the tokens that were there."""
    name = f"{action}-{tenant}-{ids[:1]}-{len(world.requests)}"
    request = token_request(ids, tenant=tenant)
    world.submit(name, msgspec.structs.replace(request, cache_action=action))
    (delta,) = world.deltas(name)
    del world.jobs[name]
    assert world.outputs.final(name) is not None
    world.check()
    return delta.num_cached_tokens


def test_an_evicted_prompt_comes_back_for_its_own_tenant_alone(tmp_path: Path) -> None:
    tiers = tiered(tmp_path)
    assert run(tiers, "cold", FIRST, "a") == 0
    assert run(tiers, "long", LONG) == 0
    assert run(tiers, "other", FIRST, "b") == 0
    assert run(tiers, "nobody's", FIRST) == 0
    assert run(tiers, "again", LONG) == 36
    assert run(tiers, "warm", FIRST, "a") == 16
    assert tiers.counter("kv_host_page_hits_total") == 9 + 4


def test_pages_that_are_not_trusted_leave_the_tiers(tmp_path: Path) -> None:
    tiers = tiered(tmp_path)
    run(tiers, "good", FIRST)
    tiers.world.runner.bad_jobs.add("bad")
    tiers.world.submit("bad", token_request((*FIRST, 5), max_tokens=4))
    tiers.finish()
    assert run(tiers, "again", FIRST) == 0
    assert run(tiers, "fine", FIRST) == 16


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_dropped_prompt_is_computed_again(is_evicted: bool, tmp_path: Path) -> None:
    tiers = tiered(tmp_path)
    run(tiers, "first", FIRST, "a")
    run(tiers, "second", SECOND, "a")
    if is_evicted:
        run(tiers, "long", LONG)
    assert act(tiers.world, "drop", FIRST, "b") == 0
    assert act(tiers.world, "drop", (*FIRST, 1, 2, 3, 4), "a") == 16
    assert act(tiers.world, "drop", FIRST, "a") == 0
    assert run(tiers, "again", FIRST, "a") == 0
    assert run(tiers, "kept", SECOND, "a") == 16


def test_a_running_row_keeps_dropped_pages(tmp_path: Path) -> None:
    tiers = tiered(tmp_path)
    world = tiers.world
    run(tiers, "first", FIRST)
    world.submit("row", token_request(FIRST, max_tokens=9))
    world.step()
    assert act(world, "drop", FIRST) == 16
    tiers.finish()
    assert world.pool.num_leased == 0


def test_all_pages_are_dropped_at_once(tmp_path: Path) -> None:
    tiers = tiered(tmp_path)
    for name, ids in {"first": FIRST, "long": LONG}.items():
        run(tiers, name, ids)
    assert act(tiers.world, "clear", (0,)) > 0
    assert act(tiers.world, "drop", FIRST) == 0
    tiers.work()
    assert tiers.tiers.gauges() == {"kv_host_bytes": 0, "kv_disk_bytes": 0}
    assert run(tiers, "again", LONG) == 0
    assert run(tiers, "more", FIRST) == 0


def test_pinned_pages_outlast_others_in_host_memory(tmp_path: Path) -> None:
    tiers = tiered(tmp_path, host_pages=12)
    run(tiers, "first", FIRST)
    assert act(tiers.world, "pin", FIRST) == 16
    for start in (20, 30, 40):
        run(tiers, f"long {start}", prompt(38, start))
    hits = tiers.counter("kv_host_page_hits_total")
    assert run(tiers, "kept", FIRST) == 16
    assert tiers.counter("kv_host_page_hits_total") == hits + 4
    assert act(tiers.world, "unpin", FIRST) == 16
    for start in (20, 30, 40):
        run(tiers, f"again {start}", prompt(38, start))
    hits = tiers.counter("kv_host_page_hits_total")
    assert run(tiers, "on disk", FIRST) == 16
    assert tiers.counter("kv_host_page_hits_total") == hits


def test_pins_leave_half_of_the_tiers_to_others(tmp_path: Path) -> None:
    tiers = tiered(tmp_path)
    tiers.tiers._shelves[FULL].disk.num_pages = 6  # type: ignore[union-attr]
    run(tiers, "first", FIRST)
    assert act(tiers.world, "pin", FIRST) == 12
    run(tiers, "long", LONG)
    assert act(tiers.world, "drop", FIRST) == 16
    assert act(tiers.world, "pin", FIRST) == 0


def test_one_tenant_pins_an_eighth(tmp_path: Path) -> None:
    tiers = tiered(tmp_path).tiers
    tiers._shelves[FULL].disk.num_pages = 16  # type: ignore[union-attr]
    keys = [bytes([number]) for number in range(20)]
    assert [tiers.pin(keys[:5], "a"), tiers.pin(keys[5:6], "a")] == [2, 0]
    assert [tiers.pin(keys[:3], "b"), tiers.pin(keys[3:], "")] == [3, 5]  # two of them were there
    assert tiers.pin(keys[19:], "c") == 0, "half of all"


def test_without_tiers_pages_are_dropped_and_never_pinned() -> None:
    world = World(num_pages=10, page_size=4)
    world.submit("first", token_request(FIRST, max_tokens=1))
    world.finish_all()
    with pytest.raises(UnsupportedOption, match="kv-connector"):
        world.scheduler._act_on_cache(world.scheduler._open(world.jobs["first"]), "pin")
    assert act(world, "drop", FIRST) == 16
    assert world.pool.num_cached == 0


def divided(folder: Path) -> TieredWorld:
    """As `tiered`, of a model with windows of two pages and recurrent layers."""
    kinds = {"window": 9, "num_spare_windows": 9, "num_snapshots": 6}
    world = World(num_pages=10, page_size=4, max_length=40, max_batch_size=2, **kinds)  # type: ignore[arg-type]
    return TieredWorld(world, host_pages=30, folder=folder, disk_pages=100)


@pytest.mark.parametrize("kind", [*PartKind, None])
def test_a_hit_needs_every_kind_of_parts(kind: PartKind | None, tmp_path: Path) -> None:
    """After a restart, with one damaged part of a kind; computed, it is saved again."""
    first = divided(tmp_path)
    assert run(first, "first", FIRST) == 0
    first.tiers.close()
    again = divided(tmp_path)
    if kind is not None:
        disk = again.tiers._shelves[kind].disk
        assert disk is not None
        path = disk._path(prompt_keys(again.world, FIRST)[3])
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert run(again, "again", FIRST) == (16 if kind is None else 0)
    assert again.counter("kv_disk_pages_refused_total") == (kind is not None)
    again.tiers.close()
    assert run(divided(tmp_path), "healed", FIRST) == 16


def test_only_the_parts_that_a_row_sees_come_back(tmp_path: Path) -> None:
    tiers = divided(tmp_path)
    run(tiers, "first", FIRST)
    run(tiers, "long", LONG)
    loaded: list[PagePart] = []
    load = tiers.tiers._load
    tiers.tiers._load = lambda part: loaded.append(part) or load(part)  # type: ignore[method-assign,func-returns-value]
    assert run(tiers, "again", FIRST) == 16
    keys = prompt_keys(tiers.world, FIRST)
    places = [(part.kind.name, keys.index(part.key)) for part in loaded]
    full = [("FULL", page) for page in range(4)]
    assert places == [*full, ("WINDOW", 2), ("WINDOW", 3), ("STATE", 3)]
