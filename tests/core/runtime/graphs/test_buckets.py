"""Which sizes steps are captured in, and which of them a step gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triptych.core.options.batch_limits import MOST_ROWS
from triptych.core.runtime.graphs.buckets import Bucket, DecodeBuckets, row_sizes, smallest
from triptych.core.runtime.graphs.decode import decode_graph_bytes


@given(st.integers(1, 700))
def test_at_worst_a_third_of_a_batch_is_padding(most: int) -> None:
    sizes = row_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = smallest(sizes, rows)
        assert size is not None
        assert 0 <= size - rows <= size / 3


@given(st.integers(1, 64), st.integers(1, 5000), st.data())
def test_a_step_gets_the_smallest_bucket_that_holds_it(
    max_rows: int, max_pages: int, data: st.DataObject
) -> None:
    buckets = DecodeBuckets.choose(max_rows, max_pages)
    rows = data.draw(st.integers(1, max_rows))
    pages = data.draw(st.integers(1, max_pages))
    bucket = buckets.fit(rows, pages)
    holding = [b for b in buckets.all() if b.rows >= rows and b.pages >= pages]
    assert bucket == min(holding)
    assert bucket.tokens == bucket.rows


def test_steps_beyond_the_largest_bucket_have_none() -> None:
    buckets = DecodeBuckets.choose(8, 100)
    assert buckets.fit(9, 1) is None
    assert buckets.fit(1, 101) is None


def test_wanted_sizes_take_the_place_of_the_usual_ones() -> None:
    buckets = DecodeBuckets.choose(8, 10, wanted=(5, 2, 5))
    assert buckets.rows == (2, 5)
    assert buckets.fit(3, 1) == Bucket(5, 5, 10)
    assert buckets.fit(6, 1) is None


def test_without_padding_only_batches_of_just_that_size_fit() -> None:
    buckets = DecodeBuckets.choose(8, 20, wanted=(2, 4), pads=False)
    assert buckets.fit(4, 17) == Bucket(4, 4, 20)
    assert buckets.fit(3, 17) is None


def test_the_largest_comes_first() -> None:
    every = DecodeBuckets.choose(4, 100).all()
    assert every[0] == Bucket(4, 4, 100)
    assert every[-1] == Bucket(1, 1, 16)
    assert len(every) == len(set(every)) == 4 * 3


def test_what_steps_compute_with_is_counted_once_and_their_buffers_each() -> None:
    buckets = DecodeBuckets(rows=(1, 2), pages=(16, 64))
    inputs = 8 * sum(rows * (pages + 16) for rows in (1, 2) for pages in (16, 64))
    assert decode_graph_bytes(buckets, lambda rows: 1000 * rows) == 2000 + 2 * 3000 + inputs


def test_the_largest_batch_that_a_gpu_takes_by_itself_has_a_bounded_number_of_sizes() -> None:
    """Each takes memory and 30 ms at the start."""
    assert len(DecodeBuckets.choose(MOST_ROWS, 131_072 // 32).all()) <= 80
