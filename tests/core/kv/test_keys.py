"""Page keys differ for whatever must not be shared."""

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from support.page_keys import page_keys
from triptych.core.kv.keys import page_key, root_key

_TEXT = st.text(max_size=4)


@given(
    st.tuples(st.binary(max_size=4), _TEXT, _TEXT), st.tuples(st.binary(max_size=4), _TEXT, _TEXT)
)
def test_roots_are_equal_only_for_equal_owners(
    one: tuple[bytes, str, str], other: tuple[bytes, str, str]
) -> None:
    keys = [
        root_key(space, adapter=adapter, tenant=tenant) for space, adapter, tenant in (one, other)
    ]
    assert (keys[0] == keys[1]) == (one == other)


def test_fields_do_not_run_into_each_other() -> None:
    assert root_key(b"m", adapter="ab", tenant="c") != root_key(b"m", adapter="a", tenant="bc")
    assert root_key(b"m", adapter="x") != root_key(b"m", tenant="x")


def test_keys_are_whole_digests() -> None:
    parent = root_key(b"m")
    expected = hashlib.sha256(parent + struct.pack("<3q", 1, 2, 3)).digest()
    assert page_key(parent, (1, 2, 3)) == expected
    assert len(expected) == 32


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_keys_are_shared_just_as_far_as_tokens_are(one: list[int], other: list[int]) -> None:
    pairs = zip(page_keys(b"r", one, 3), page_keys(b"r", other, 3), strict=False)
    for index, (left, right) in enumerate(pairs, start=1):
        assert (left == right) == (one[: index * 3] == other[: index * 3])


def test_only_full_pages_have_keys() -> None:
    assert [len(page_keys(b"r", range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_contents_that_ids_do_not_name_are_part_of_the_key() -> None:
    assert len({page_key(b"r", (1, 2), contents) for contents in (b"", b"x", b"y")}) == 3
