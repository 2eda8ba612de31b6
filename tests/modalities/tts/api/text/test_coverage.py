import pytest

from triptych.modalities.tts.api.text.chunks import Utterance, split_utterances
from triptych.modalities.tts.api.text.coverage import Coverage, spoken_fraction
from triptych.modalities.tts.api.text.guard import ExpectedDuration
from triptych.modalities.tts.api.text.normalize import Normalizer

TEXT = "Pay $5 now. Then rest. 😀 The end."
EXPECTED = ExpectedDuration(least_s=1.0, likely_s=2.0, most_s=6.0)


def _utterances() -> list[Utterance]:
    return list(split_utterances(Normalizer()(TEXT), 22))


def _account() -> tuple[Coverage, list[Utterance]]:
    coverage, utterances = Coverage(), _utterances()
    for utterance in utterances:
        coverage.expect(utterance)
    return coverage, utterances


def test_everything_spoken_covers_the_text() -> None:
    coverage, utterances = _account()
    for utterance in utterances:
        coverage.speak(utterance)
    assert coverage.fraction == 1.0
    assert coverage.header() == "1.000"


def test_an_unspoken_utterance_is_missing_from_the_account() -> None:
    coverage, (first, *others) = _account()
    assert coverage.header() == "0.000"
    coverage.speak(first)
    assert TEXT[slice(*first.source)] == "Pay $5 now. "
    assert 0 < coverage.fraction < 1
    for other in others:
        coverage.speak(other)
    assert coverage.fraction == 1.0


def test_half_an_utterance_covers_half_its_letters() -> None:
    coverage, (first, *_) = _account()
    coverage.speak(first, 0.5)
    assert 0 < coverage.fraction < 0.5


def test_almost_all_is_not_rounded_up() -> None:
    text = "a" * 4000
    (utterance,) = split_utterances(Normalizer()(text), 5000)
    coverage = Coverage()
    coverage.expect(utterance)
    coverage.speak(utterance, 3999 / 4000)
    assert coverage.header() == "0.999"


def test_nothing_to_speak_is_covered() -> None:
    assert Coverage().header() == "1.000"


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    coverage, (first, *_) = _account()
    with pytest.raises(ValueError, match="between 0 and 1"):
        coverage.speak(first, fraction)


@pytest.mark.parametrize(
    ("reason", "duration_s", "fraction"),
    [
        ("stop", 1.8, 1.0),
        ("stop", 1.0, 1.0),
        ("stop", 0.5, 0.5),
        ("stop", 0.0, 0.0),
        ("length", 6.0, 1.0),
        ("length", 1.0, 0.5),
        ("loop", 0.5, 0.25),
        (None, 1.0, 0.5),
    ],
)
def test_fraction_by_duration(reason: str | None, duration_s: float, fraction: float) -> None:
    assert spoken_fraction(reason, duration_s, EXPECTED) == fraction  # type: ignore[arg-type]


def test_an_utterance_of_no_duration_is_spoken() -> None:
    assert spoken_fraction("stop", 0.0, ExpectedDuration(least_s=0, likely_s=0, most_s=2)) == 1.0
