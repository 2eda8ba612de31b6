"""Features as pages: bit for bit what they were, in pieces that are given back."""

from __future__ import annotations

import pytest
import torch

from triptych.modalities.vlm.engine import feature_memory
from triptych.modalities.vlm.engine.encoder import FeatureLayout, open_cache
from triptych.modalities.vlm.engine.feature_memory import IncomingFeatures, OutgoingFeatures

CPU, DIGEST, NUM_FEATURES = torch.device("cpu"), b"digest", 7


@pytest.fixture(params=[(1, torch.float32), (3, torch.bfloat16)])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FeatureLayout:
    monkeypatch.setattr(feature_memory, "PAGE_BYTES", 100)
    num_parts, dtype = request.param
    return FeatureLayout(num_parts=num_parts, hidden_size=6, dtype=dtype)


def test_features_cross_bit_for_bit(layout: FeatureLayout) -> None:
    shape = (layout.num_parts, NUM_FEATURES, layout.hidden_size)
    features_DNC = torch.randn(shape).to(layout.dtype)
    leaving = OutgoingFeatures(layout, 10**6, 4, CPU)
    cache = open_cache(10**6, 4)
    arriving = IncomingFeatures(cache, layout, 10**6, CPU)
    leaving.keep(DIGEST, features_DNC)
    lent, expected = leaving.lend(DIGEST), arriving.expect(NUM_FEATURES)
    assert len(lent) == len(expected) == leaving.num_pages_of(NUM_FEATURES) > 1
    total = sum(leaving.num_bytes(page_id) for page_id in lent)
    assert total == features_DNC.nbytes == leaving.num_bytes_of(NUM_FEATURES)
    for source, target in zip(lent, expected, strict=True):
        buffer = memoryview(bytearray(leaving.num_bytes(source)))
        assert len(buffer) == arriving.num_bytes(target) <= leaving.page_bytes
        leaving.read(source, buffer)
        arriving.write(target, buffer)
    assert arriving.keep(DIGEST, expected)
    arriving.drop(expected)
    found = cache.acquire(DIGEST)
    assert found is not None
    assert torch.equal(found.hidden_NC, features_DNC[0])
    assert (found.late_LNC is None) == (layout.num_parts == 1)
    if found.late_LNC is not None:
        assert torch.equal(found.late_LNC, features_DNC[1:])
    assert cache.num_bytes == features_DNC.nbytes
    assert cache.num_references == 2


def test_what_is_lent_stays_until_it_is_dropped(layout: FeatureLayout) -> None:
    leaving = OutgoingFeatures(layout, 10**6, 0, CPU)  # keeps what is in use alone
    features_DNC = torch.ones((layout.num_parts, NUM_FEATURES, layout.hidden_size))
    leaving.keep(DIGEST, features_DNC.to(layout.dtype))
    first, second = leaving.lend(DIGEST), leaving.lend(DIGEST)
    assert not set(first) & set(second)
    leaving.release(DIGEST)
    leaving.drop(first)
    assert leaving.lend(DIGEST)
    leaving.drop(second)
    with pytest.raises(KeyError):
        leaving.num_bytes(second[0])
    assert leaving.lend(b"other") == ()
    leaving.drop(())


def test_without_room_on_the_device_nothing_is_kept(
    layout: FeatureLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    cache = open_cache(10**6, 4)
    arriving = IncomingFeatures(cache, layout, 10**6, CPU)
    expected = arriving.expect(NUM_FEATURES)
    monkeypatch.setattr(torch.Tensor, "to", full)
    assert not arriving.keep(DIGEST, expected)
    assert len(cache) == 0
    arriving.drop(expected)
