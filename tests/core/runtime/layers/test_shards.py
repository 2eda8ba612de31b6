"""Parts of a divided model: together they are the whole, and each reads what it needs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from triptych.core.runtime.layers.shards import Shard, even_shard, feature_shard, head_shards

NUM_RANKS = st.integers(1, 16)


def items(shard: Shard) -> range:
    return range(shard.total)[shard.slice]


@given(total=st.integers(1, 5000), num_ranks=NUM_RANKS)
def test_even_shards_follow_each_other_and_the_first_are_the_longest(
    total: int, num_ranks: int
) -> None:
    shards = [even_shard(total, rank, num_ranks) for rank in range(num_ranks)]
    assert [item for shard in shards for item in items(shard)] == list(range(total))
    lengths = [shard.length for shard in shards]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(total=st.integers(16, 20000), num_ranks=NUM_RANKS, unit=st.sampled_from([64, 256]))
def test_features_are_divided_in_whole_units_where_there_are_enough(
    total: int, num_ranks: int, unit: int
) -> None:
    shards = [feature_shard(total, rank, num_ranks, unit) for rank in range(num_ranks)]
    assert sum(shard.length for shard in shards) == total
    assert all(b.first == a.first + a.length for a, b in pairwise(shards))
    assert all(shard.length for shard in shards)
    if total % unit == 0 and total >= unit * num_ranks:
        assert all(shard.length % unit == shard.first % unit == 0 for shard in shards)


@given(num_kv_heads=st.integers(1, 12), group_size=st.integers(1, 9), data=st.data())
def test_every_query_has_one_rank_and_its_key_is_there(
    num_kv_heads: int, group_size: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group_size
    num_ranks = data.draw(st.integers(1, num_heads))
    shards = [head_shards(num_heads, num_kv_heads, rank, num_ranks) for rank in range(num_ranks)]
    assert [q for each in shards for q in items(each.queries)] == list(range(num_heads))
    for each in shards:
        queries, keys = items(each.queries), items(each.keys)
        assert queries
        # As attention counts: so many queries in a row read one key.
        assert len(queries) % len(keys) == 0
        per_key = len(queries) // len(keys)
        assert [keys[i // per_key] for i in range(len(queries))] == [
            q // group_size for q in queries
        ]
    assert max(each.keys.length for each in shards) == shards[0].keys.length


@given(total=st.integers(1, 99), first=st.integers(0, 98), size=st.integers(1, 64))
def test_a_shard_in_smaller_items(total: int, first: int, size: int) -> None:
    shard = Shard(min(first, total - 1), 1, total)
    assert list(items(shard.times(size))) == [
        item * size + i for item in items(shard) for i in range(size)
    ]
