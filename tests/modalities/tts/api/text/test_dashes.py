# ruff: noqa: RUF001  # typographic signs are the subject here
import pytest

from triptych.modalities.tts.api.text.normalize import Normalizer

SAY = Normalizer()
DASHES = ["-", "–", "−", " - ", " – ", " − "]
RANGES = [
    ("9 AM", "5 PM", "nine A M to five P M"),
    ("9 am", "5 pm", "nine A M to five P M"),
    ("7:00AM", "9:00PM", "seven A M to nine P M"),
    ("10:00", "17:00", "ten o'clock to seventeen hundred"),
    ("$5", "$10", "five to ten dollars"),
    ("$1,000", "$2,000", "one thousand to two thousand dollars"),
    ("5€", "10€", "five to ten euros"),
    ("5%", "10%", "five to ten percent"),
    ("2019", "2021", "twenty nineteen to twenty twenty-one"),
    ("5 kg", "10 kg", "five to ten kilograms"),
    ("5°C", "10°C", "five to ten degrees Celsius"),
    ("10GB", "20GB", "ten to twenty gigabytes"),
    ("10", "20", "ten to twenty"),
]


@pytest.mark.parametrize("dash", DASHES)
@pytest.mark.parametrize(("low", "high", "spoken"), RANGES)
def test_a_dash_between_values_of_one_kind_is_to(
    low: str, high: str, spoken: str, dash: str
) -> None:
    assert SAY(f"It is {low}{dash}{high} here.").text == f"It is {spoken} here."


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("The answer is 10-4=6.", "The answer is ten minus four equals six."),
        ("9 - 5 = 4", "nine minus five equals four"),
        ("20-5*2", "twenty minus five times two"),
        ("x-1=3", "x minus one equals three"),
        ("What is 12 - 5?", "What is twelve minus five?"),
        ("2024-01-05", "January fifth, twenty twenty-four"),
        ("Call 555-0123 today", "Call five five five, zero one two three today"),
        ("1-2-3", "one two three"),
        ("-5 degrees", "minus five degrees"),
        ("COVID-19 and F-16", "COVID nineteen and F sixteen"),
        ("a well-known T-shirt", "a well-known T-shirt"),
    ],
)
def test_signs_and_names_keep_their_sense(written: str, spoken: str) -> None:
    assert SAY(written).text == spoken


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("3.0e-5", "three point zero times ten to the minus five"),
        ("₹1,00,000", "one hundred thousand rupees"),
        ("or 020 7946 0958.", "or zero two zero, seven nine four six, zero nine five eight."),
        ("0161 496 0000", "zero one six one, four nine six, zero zero zero zero"),
        ("In 1024 bytes", "In one thousand twenty-four bytes"),
        ("in 1999 sales rose", "in nineteen ninety-nine sales rose"),
    ],
)
def test_numbers_keep_sign_groups_and_count(written: str, spoken: str) -> None:
    assert SAY(written).text == spoken
