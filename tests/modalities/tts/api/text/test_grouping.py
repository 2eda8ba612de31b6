"""Numerals of other countries, and those that only look like them."""

# ruff: noqa: RUF001
from __future__ import annotations

from ipaddress import AddressValueError, IPv4Address

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from triptych.modalities.tts.api.text.grouping import Grouping
from triptych.modalities.tts.api.text.language import english
from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.api.text.numbers import NumberWords

GROUPING, NORMALIZE, SAY = Grouping(english()), Normalizer(), NumberWords()


def is_address(text: str) -> bool:
    """Whether four groups are read as an address of the Internet, such as 99.234.171.100."""
    try:
        return bool(IPv4Address(text))
    except AddressValueError:
        return False


@given(st.integers(1000, 10**11), st.sampled_from(["'", "’", " ", "."]))
def test_grouped_digits_are_one_number(number: int, mark: str) -> None:
    text = f"{number:,}".replace(",", mark)
    assume(not is_address(text))
    if mark == "." and number < 10**6:
        text += ",0"  # a single point alone is an English one
    if mark == " ":
        text += " 000"
        number *= 1000
    wanted = SAY.cardinal(number) + (" point zero" if ",0" in text else "")
    assert NORMALIZE(f"There are {text} people.").text == f"There are {wanted} people."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1'234.50", "one thousand two hundred thirty-four point five zero"),
        ("CHF 1'000.50", "one thousand Swiss francs and fifty centimes"),
        ("1.000,50 euros", "one thousand point five zero euros"),
        ("€1.000,50", "one thousand euros and fifty cents"),
        ("1.234.567,89", "one million two hundred thirty-four thousand five hundred sixty-seven"),
        ("€ 1 234 567", "one million two hundred thirty-four thousand five hundred sixty-seven"),
        ("3,50 €", "three euros and fifty cents"),
        ("€3,50", "three euros and fifty cents"),
        ("1 000,50 €", "one thousand euros and fifty cents"),
        ("12,5 %", "twelve point five percent"),
        ("0,5", "zero point five"),
        ("1,5 km", "one point five kilometers"),
        ("3,5-4,5 km", "three point five to four point five kilometers"),
        ("1,5 million", "one point five million"),
        ("2,5 hours", "two point five hours"),
        ("3,50 euros", "three point five zero euros"),
        ("10 000 km", "ten thousand kilometers"),
    ],
)
def test_other_countries_numerals_are_read(text: str, words: str) -> None:
    assert words in NORMALIZE(f"It is {text}.").text


@pytest.mark.parametrize(
    "text",
    [
        "1,234.50 and 1.000 and 1,00,000",
        "1,5 or 10,20,30 or 1,2,3",
        "rows 1,5 in the table, groups 3,4 B",
        "192.168.100.200",
        "5'10\" and '90s and Q4'23",
        "iPhone 15 128 GB",
        "Call 800 555 000.",
        "room 12 345",
        "Version 1.2.345",
        "2024 100 people",
        "$1,500 and 3,456 km",
    ],
)
def test_english_numerals_and_names_are_left_alone(text: str) -> None:
    assert GROUPING(text) == text


@given(st.text("0123456789.,' €%-km", max_size=60))
def test_nothing_but_marks_inside_numerals_changes(text: str) -> None:
    changed = GROUPING(text)
    assert len(changed) == len(text)
    for before, after in zip(text, changed, strict=True):
        assert before == after or (before in ".,' " and after in ".,")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1e5", "one times ten to the five"),
        ("1e-5", "one times ten to the minus five"),
        ("-1e-5", "minus one times ten to the minus five"),
        ("2.5E+3", "two point five times ten to the three"),
        ("1E5", "one E five"),
        ("1e5-1e6", "one times ten to the five to one times ten to the six"),
        ("1e5 - 1e6", "one times ten to the five to one times ten to the six"),
        ("1e5 m", "one times ten to the five m"),
        ("7e3d", "seven e three d"),
        ("#1e5a3c", "number one e five a three c"),
        ("a1e5", "a one e five"),
    ],
)
def test_exponents(text: str, words: str) -> None:
    assert NORMALIZE(f"It is {text}.").text == f"It is {words}."
