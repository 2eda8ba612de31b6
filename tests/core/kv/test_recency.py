"""The recency list against an ordered dictionary."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.kv.recency import RecencyList

SIZE = 6


@given(st.lists(st.tuples(st.sampled_from(("append", "remove", "pop")), st.integers(0, SIZE - 1))))
def test_behaves_like_an_ordered_dictionary(actions: list[tuple[str, int]]) -> None:
    ring, model = RecencyList(SIZE), OrderedDict[int, None]()
    for action, item in actions:
        if action == "append" and item not in model:
            ring.append(item)
            model[item] = None
        elif action == "remove" and item in model:
            ring.remove(item)
            del model[item]
        elif action == "pop" and model:
            assert ring.pop_oldest() == model.popitem(last=False)[0]
        ring.check()
        assert list(ring) == list(model)
        assert len(ring) == len(model)
        assert [i in ring for i in range(SIZE)] == [i in model for i in range(SIZE)]


def test_misuse_is_an_assertion() -> None:
    ring = RecencyList(2)
    with pytest.raises(AssertionError, match="empty"):
        ring.pop_oldest()
    with pytest.raises(AssertionError, match="not in"):
        ring.remove(1)
    ring.append(1)
    with pytest.raises(AssertionError, match="already"):
        ring.append(1)
