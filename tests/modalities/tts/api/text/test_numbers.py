import pytest

from triptych.modalities.tts.api.text.numbers import NumberWords, digits, plural

US, UK = NumberWords(), NumberWords(use_and=True)


@pytest.mark.parametrize(
    ("n", "us", "uk"),
    [
        (0, "zero", "zero"),
        (13, "thirteen", "thirteen"),
        (40, "forty", "forty"),
        (99, "ninety-nine", "ninety-nine"),
        (100, "one hundred", "one hundred"),
        (101, "one hundred one", "one hundred and one"),
        (1000, "one thousand", "one thousand"),
        (1001, "one thousand one", "one thousand and one"),
        (1_000_000, "one million", "one million"),
        (1_000_100, "one million one hundred", "one million one hundred"),
        (-21, "minus twenty-one", "minus twenty-one"),
        (10**33, "one decillion", "one decillion"),
    ],
)
def test_cardinals(n: int, us: str, uk: str) -> None:
    assert (US.cardinal(n), UK.cardinal(n)) == (us, uk)


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (0, "zeroth"),
        (1, "first"),
        (12, "twelfth"),
        (20, "twentieth"),
        (23, "twenty-third"),
        (100, "one hundredth"),
        (1_000_003, "one million third"),
    ],
)
def test_ordinals(n: int, words: str) -> None:
    assert US.ordinal(n) == words


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (44, "forty-four"),
        (1000, "one thousand"),
        (1066, "ten sixty-six"),
        (1100, "eleven hundred"),
        (1905, "nineteen oh five"),
        (2000, "two thousand"),
        (2009, "two thousand nine"),
        (2010, "twenty ten"),
        (12000, "twelve thousand"),
    ],
)
def test_years(n: int, words: str) -> None:
    assert US.year(n) == words


@pytest.mark.parametrize(
    ("numeral", "words"),
    [
        ("7", "seven"),
        ("19", "nineteen"),
        ("007", "zero zero seven"),
        ("505", "five oh five"),
        ("747", "seven forty-seven"),
        ("1080", "ten eighty"),
        ("90210", "nine zero two one zero"),
    ],
)
def test_codes(numeral: str, words: str) -> None:
    assert US.code(numeral) == words


def test_digit_strings_and_plurals() -> None:
    assert digits("20-7a") == "two zero seven"
    assert [plural(word) for word in ("twenty", "six", "ten")] == ["twenties", "sixes", "tens"]


def test_every_number_below_a_million_is_read_differently() -> None:
    spoken = {US.cardinal(n) for n in range(0, 1_000_000, 997)}
    assert len(spoken) == len(range(0, 1_000_000, 997))
