"""Parts of a divided model: together they are the whole, and each reads what it needs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from triptych.core.layers.spans import Span, even_span, feature_span, head_spans

NUM_RANKS = st.integers(1, 16)


def items(span: Span) -> range:
    return range(span.total)[span.slice]


@given(total=st.integers(1, 5000), num_ranks=NUM_RANKS)
def test_even_spans_follow_each_other_and_the_first_are_the_longest(
    total: int, num_ranks: int
) -> None:
    spans = [even_span(total, rank, num_ranks) for rank in range(num_ranks)]
    assert [item for span in spans for item in items(span)] == list(range(total))
    lengths = [span.length for span in spans]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(total=st.integers(16, 20000), num_ranks=NUM_RANKS)
def test_features_are_divided_in_whole_vectors_where_there_are_enough(
    total: int, num_ranks: int
) -> None:
    spans = [feature_span(total, rank, num_ranks) for rank in range(num_ranks)]
    assert sum(span.length for span in spans) == total
    assert all(b.first == a.first + a.length for a, b in pairwise(spans))
    assert all(span.length for span in spans)
    if total % 64 == 0 and total >= 64 * num_ranks:
        assert all(span.length % 64 == span.first % 64 == 0 for span in spans)


@given(num_kv_heads=st.integers(1, 12), group_size=st.integers(1, 9), data=st.data())
def test_every_query_has_one_rank_and_its_key_is_there(
    num_kv_heads: int, group_size: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group_size
    num_ranks = data.draw(st.integers(1, num_heads))
    spans = [head_spans(num_heads, num_kv_heads, rank, num_ranks) for rank in range(num_ranks)]
    assert [q for each in spans for q in items(each.queries)] == list(range(num_heads))
    for each in spans:
        queries, keys = items(each.queries), items(each.keys)
        assert queries
        # As attention counts: so many queries in a row read one key.
        assert len(queries) % len(keys) == 0
        per_key = len(queries) // len(keys)
        assert [keys[i // per_key] for i in range(len(queries))] == [
            q // group_size for q in queries
        ]
    assert max(each.keys.length for each in spans) == spans[0].keys.length


@given(total=st.integers(1, 99), first=st.integers(0, 98), size=st.integers(1, 64))
def test_a_span_in_smaller_items(total: int, first: int, size: int) -> None:
    span = Span(min(first, total - 1), 1, total)
    assert list(items(span.times(size))) == [
        item * size + i for item in items(span) for i in range(size)
    ]
