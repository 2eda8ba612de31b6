"""The exports of `triptych` are frozen."""

import pytest

import triptych


def test_exports_are_as_recorded() -> None:
    assert triptych.__all__ == [
        "AudioGenerationConfig",
        "ChatPipeline",
        "EmbeddingPipeline",
        "Engine",
        "ImageInProgress",
        "ImagePipeline",
        "PipelineConfig",
        "RequestError",
        "SamplingParams",
        "Server",
        "SetupError",
        "SpeechPipeline",
        "TranscriptionPipeline",
        "TriptychError",
        "VisionPipeline",
        "__version__",
    ]
    assert all(getattr(triptych, name) for name in triptych.__all__)
    assert set(triptych.__all__) <= set(dir(triptych))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchPipeline"):
        _ = triptych.NoSuchPipeline  # type: ignore[attr-defined]
