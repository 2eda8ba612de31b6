"""The part of each rank of a divided model: heads, features, the vocabulary.

Owns the arithmetic. Knows no tensor and no process.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAIN_UNIT = 64
"""Features of a whole vector of any kind."""
BLOCK_UNIT = 256
"""Features of a whole block of any format."""


@dataclass(frozen=True, slots=True)
class Shard:
    """`length` items of a whole of `total`, from `first` on."""

    first: int
    length: int
    total: int

    @classmethod
    def whole(cls, total: int) -> Shard:
        """The shard of all items."""
        return cls(0, total, total)

    def __contains__(self, item: int) -> bool:
        """Whether this part has the item of that number in the whole."""
        return self.first <= item < self.first + self.length

    @property
    def slice(self) -> slice:
        """The slice of the whole."""
        return slice(self.first, self.first + self.length)

    def times(self, size: int) -> Shard:
        """The same part, counted in items that are `size` times smaller."""
        return Shard(self.first * size, self.length * size, self.total * size)


def even_shard(total: int, rank: int, num_ranks: int) -> Shard:
    """Split into parts of ranks, as evenly as possible; the first ranks have one more."""
    length, rest = divmod(total, num_ranks)
    return Shard(rank * length + min(rank, rest), length + (rank < rest), total)


def feature_shard(total: int, rank: int, num_ranks: int, unit: int = PLAIN_UNIT) -> Shard:
    """As `even_shard`, in whole units if there are enough of them, or in halves of units."""
    while total % unit or total // unit < num_ranks:
        unit //= 2
    return even_shard(total // unit, rank, num_ranks).times(unit)


@dataclass(frozen=True, slots=True)
class HeadShards:
    """A rank's query heads, and the key-value heads that these read."""

    queries: Shard
    keys: Shard

    @classmethod
    def whole(cls, num_heads: int, num_kv_heads: int) -> HeadShards:
        """The shards of all heads."""
        return cls(Shard.whole(num_heads), Shard.whole(num_kv_heads))


def head_shards(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> HeadShards:
    """Key-value heads with all their queries; where there are fewer than ranks, several share one.

    Each of these ranks has a copy of it, and a part of its queries. There are no more ranks than
    query heads.
    """
    group_size = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        keys = even_shard(num_kv_heads, rank, num_ranks)
        return HeadShards(keys.times(group_size), keys)
    key = rank * num_kv_heads // num_ranks
    sharing = [r for r in range(num_ranks) if r * num_kv_heads // num_ranks == key]
    part = even_shard(group_size, sharing.index(rank), len(sharing))
    queries = Shard(key * group_size + part.first, part.length, num_heads)
    return HeadShards(queries, Shard(key, 1, num_kv_heads))
