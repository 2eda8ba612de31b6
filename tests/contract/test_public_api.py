"""The exports of `triptych` are frozen."""

import pytest

import triptych


def test_exports_are_as_recorded() -> None:
    kinds = ["Chat", "Embedding", "Image", "Speech", "Transcription", "Vision"]
    assert triptych.__all__ == [*(f"{kind}Pipeline" for kind in kinds), "__version__"]
    assert set(triptych.__all__) <= set(dir(triptych))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchPipeline"):
        _ = triptych.NoSuchPipeline  # type: ignore[attr-defined]
