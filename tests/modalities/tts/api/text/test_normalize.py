# ruff: noqa: RUF001  # typographic signs are the subject here
import re
import subprocess
import sys

import pytest

from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer
from triptych.modalities.tts.api.text.spoken import SpokenText

US = Normalizer()
UK = Normalizer(NormalizeOptions(dialect="uk"))


def _table(rows: str) -> list[tuple[str, str]]:
    pairs = [row.split(" => ") for row in rows.strip().splitlines()]
    return [(written.strip(), spoken.strip()) for written, spoken in pairs]


NUMBERS = """
5 apples => five apples
1,234 pears => one thousand two hundred thirty-four pears
3.14 => three point one four
0.5 => zero point five
.5 => point five
-7 => minus seven
−7.5 => minus seven point five
(-3) => (minus three)
007 => zero zero seven
1,000,000 => one million
1234567890123456 => one two three four five six seven eight nine zero one two three four five six
٣٤ => thirty-four
４５ => forty-five
5M users => five million users
10k => ten thousand
the 21st, 2nd and 100th => the twenty-first, second and one hundredth
1,000th => one thousandth
1,2,3 => one, two, three
±5 => plus or minus five
~5 => about five
"""

YEARS = """
in 1999 => in nineteen ninety-nine
2007 => two thousand seven
in 1905 => in nineteen oh five
since 2024, => since twenty twenty-four,
the 1980s => the nineteen eighties
the '90s => the nineties
her 20s => her twenties
in '85 => in eighty-five
1800s => eighteen hundreds
1250 items => one thousand two hundred fifty items
in 1999 sales rose => in nineteen ninety-nine sales rose
2001 was good => two thousand one was good
1999–2005 => nineteen ninety-nine to two thousand five
2019-20 => twenty nineteen to twenty
FY2024 => F Y twenty twenty-four
"""

MONEY = """
$3.50 => three dollars and fifty cents
$1 => one dollar
$0.99 => ninety-nine cents
$.50 => fifty cents
$0.01 => one cent
£5.05 => five pounds and five pence
£2m => two million pounds
€1,200 => one thousand two hundred euros
5¢ => five cents
-$5 => minus five dollars
$3.5 million => three point five million dollars
$5bn => five billion dollars
$10–20 => ten to twenty dollars
$10-$20 => ten to twenty dollars
$5–10 million => five to ten million dollars
100 USD => one hundred U S dollars
US$20 => twenty U S dollars
USD 100 => one hundred U S dollars
5€ => five euros
¥1000 => one thousand yen
$5/month => five dollars per month
$3.999 => three point nine nine nine dollars
$PATH => dollar path
"""

QUANTITIES = """
50% => fifty percent
5.5 % => five point five percent
10-20% => ten to twenty percent
-3.5% => minus three point five percent
5 km/h => five kilometers per hour
3.2 GB => three point two gigabytes
1 kg => one kilogram
20 °C => twenty degrees Celsius
-5°F => minus five degrees Fahrenheit
20 ℃ => twenty degrees Celsius
90° => ninety degrees
6'2" => six feet two inches
5′11″ => five feet eleven inches
5" pipe => five inches pipe
5 m² => five square meters
10 m/s => ten meters per second
5 ft. tall => five feet tall
a 5-km run => a five kilometer run
10–20 km => ten to twenty kilometers
5µm => five micrometers
5 ㎞ => five kilometers
40°26'46" => forty degrees twenty-six minutes forty-six seconds
1920x1080 => one thousand nine hundred twenty by one thousand eighty
3 × 4 => three times four
4x => four times
v1 V2.0 => version one version two point zero
Q4'23 => Q four twenty-three
2x + 1 => two x plus one
2 tbsp. of oil => two tablespoons of oil
Figure 5C => Figure five C
"It is 5" => "It is five"
"""

FRACTIONS_AND_MATH = """
1/2 => one half
3/4 => three quarters
2 1/2 cups => two and a half cups
1½ => one and a half
2 1/8 => two and an eighth
¾ => three quarters
22/7 => twenty-two sevenths
8/10 => eight out of ten
5/0 => five slash zero
24/7 => twenty-four seven
9/11 => nine eleven
3 + 4 = 7 => three plus four equals seven
5 * 3 => five times three
10 / 2 => ten divided by two
10 - 4 => ten minus four
a < b => a is less than b
<5 => less than five
>=3 => at least three
5!=3 => five is not equal to three
x^2 and 2^10 => x squared and two to the power of ten
x² => x squared
10⁻³ => ten to the power of minus three
π => pi
"""

DATES = """
March 5, 2024 => March fifth, twenty twenty-four
Mar. 5th => March fifth
5 March 2024 => the fifth of March, twenty twenty-four
on 12 May. => on the twelfth of May.
on the 5th of May => on the fifth of May
2024-03-05 => March fifth, twenty twenty-four
2024/03/05 => March fifth, twenty twenty-four
2024-03-05T10:30 => March fifth, twenty twenty-four, ten thirty
3/14/2024 => March fourteenth, twenty twenty-four
14/03/2024 => March fourteenth, twenty twenty-four
14.03.2024 => March fourteenth, twenty twenty-four
12/25/99 => December twenty-fifth, nineteen ninety-nine
March 2024 => March twenty twenty-four
May 5–7 => May fifth to seventh
May 32 => May thirty-two
in Jan. and Feb. 2020 => in January and February twenty twenty
Mon, 5 Mar => Monday, the fifth of March
Tues. Sept 9 => Tuesday September ninth
Mon–Fri => Monday to Friday
The Sun. => The Sun.
march 5 => march five
"""

TIMES = """
9:30 pm => nine thirty P M
17:05 => seventeen oh five
9:00 => nine o'clock
00:00 => midnight
17:00 UTC => seventeen hundred U T C
9am => nine A M
at 9 a.m. sharp => at nine A M sharp
9-5pm => nine to five P M
9am - 5pm => nine A M to five P M
9 a.m.-5 p.m. daily => nine A M to five P M daily
9:30–10:30 => nine thirty to ten thirty
at 12:34:56 => at twelve thirty-four and fifty-six seconds
1:23:45 => one hour twenty-three minutes forty-five seconds
2h30m => two hours thirty minutes
1h 20min => one hour twenty minutes
2h05 => two hours five minutes
5 min => five minutes
16:9 => sixteen to nine
1:1000 => one to one thousand
25:61 => twenty-five to sixty-one
"""

NAMES = """
Dr. Smith => Doctor Smith
Dr Smith => Doctor Smith
Mr. and Mrs. Jones => Mister and Missus Jones
Main St. near St. Paul => Main Street near Saint Paul
Mulholland Dr. is long => Mulholland Drive is long
5th St. and 6th => fifth Street and sixth
e.g., this, i.e. that => for example, this, that is that
etc. => et cetera.
apples, etc., too => apples, et cetera, too
FBI vs. CIA => F B I versus C I A
Acme Inc. is big => Acme Incorporated is big
No. 5 => Number five
pp. 10–12 => pages ten to twelve
J. K. Rowling => J K Rowling
the U.S. Army => the U S Army
NASA and NATO => NASA and NATO
the FBI's CEOs => the F B I's C E O's
HTML => H T M L
do it NOW => do it now
STOP SHOUTING AT THE CAT PLEASE => stop shouting at the cat please
She has a Ph.D. => She has a P H D.
AT&T, R&D, PhD => A T and T, R and D, P H D
MP3, COVID-19, F-16, B2B => M P three, COVID nineteen, F sixteen, B two B
GPT-4o => G P T four o
x86 and A4 => x eighty-six and A four
Chapter IV => Chapter four
Henry VIII => Henry the eighth
World War II => World War two
Elizabeth II. => Elizabeth the second.
the XIX century => the nineteenth century
Malcolm X, Vitamin C => Malcolm X, Vitamin C
Charles I think => Charles I think
H2O and CO2 => H two O and C O two
NaCl => NaCl
C++ and C# => C plus plus and C sharp
20-year-old => twenty-year-old
mid-1990s => mid nineteen nineties
well-known, don't, rock'n'roll => well-known, don't, rock'n'roll
"""

ADDRESSES = """
https://www.example.com/p?q=1. => w w w dot example dot com slash p question mark q equals one.
example.org/a-b, => example dot org slash a dash b,
john.doe@example.co.uk => john dot doe at example dot co dot u k
report.pdf and main.py! => report dot p d f and main dot p y!
555-123-4567 => five five five, one two three, four five six seven
(555) 123-4567 => five five five, one two three, four five six seven
+44 20 7946 0958 => plus four four, two zero, seven nine four six, zero nine five eight
555-1234 => five five five, one two three four
Tel: 020 7946 0958 => Tel: zero two zero, seven nine four six, zero nine five eight
Call 911! => Call nine one one!
Springfield, IL 62701 => Springfield, I L six two seven zero one
call 5551234567 => call five five five one two three four five six seven
192.168.0.1 => one nine two dot one six eight dot zero dot one
v1.2.3 => version one point two point three
#MachineLearning => hashtag machine learning
#AI2024 => hashtag A I twenty twenty-four
@user_name => at user name
#1 => number one
1-2-3 => one two three
"""

MARKS = """
I love it 😀👍🏽! => I love it !
**bold** _x_ `code` ~~gone~~ => bold x code gone
a - b – c — d -- e => a — b — c — d — e
“Hi” «there» => "Hi" "there"
it’s => it's
[x] {y} => (x) (y)
he / she * we => he — she — we
he/she and/or => he slash she and or
snake_case => snake case
a\u200bb\x00c => abc
end.Next => end. Next
foo.bar => foo dot bar
!!!!!!!!!!!!!!!!!!!!!! => !!!!!!!!
ﬁne cafe\u0301 𝐁old => fine café Bold
東京。はい！ => 東京。はい！
नमस्ते => नमस्ते
--help => help
© 2024 => copyright twenty twenty-four
"""

TABLES = [
    NUMBERS,
    YEARS,
    MONEY,
    QUANTITIES,
    FRACTIONS_AND_MATH,
    DATES,
    TIMES,
    NAMES,
    ADDRESSES,
    MARKS,
]


@pytest.mark.parametrize(
    ("written", "spoken"), [pair for table in TABLES for pair in _table(table)]
)
def test_reads_out(written: str, spoken: str) -> None:
    assert US(written).text == spoken


@pytest.mark.parametrize(
    ("written", "spoken"),
    _table("""
    105 => one hundred and five
    1,005 => one thousand and five
    2007 => two thousand and seven
    3/4/2024 => the third of April, twenty twenty-four
    2024-03-05 => the fifth of March, twenty twenty-four
    3/14/2024 => the fourteenth of March, twenty twenty-four
    """),
)
def test_british_reading(written: str, spoken: str) -> None:
    assert UK(written).text == spoken


def test_a_paragraph_or_list_item_without_a_mark_gets_a_full_stop() -> None:
    text = "# Shopping\n\nWe need:\n- eggs\n- milk\n1. bread\n2. 5 rolls!\n\n---\nThe end"
    spoken = "Shopping. We need: eggs. milk. one. bread. two. five rolls! The end"
    assert US(text).text == spoken


def test_a_wrapped_line_is_no_break() -> None:
    assert US("one line\nand the next").text == "one line and the next"


def test_sentences_keep_the_full_stop_of_their_last_abbreviation() -> None:
    text = "They met at 5 p.m. Then they left the U.S. The end of Acme Inc."
    spoken = "They met at five P M. Then they left the U S. The end of Acme Incorporated."
    assert US(text).text == spoken


@pytest.mark.parametrize(
    ("written", "spoken"),
    [("Hi 😀!", "Hi grinning face !"), ("👍🏽", "thumbs up sign"), ("🇺🇸", "U S"), ("5️⃣", "five")],
)
def test_emoji_can_be_named(written: str, spoken: str) -> None:
    assert Normalizer(NormalizeOptions(emoji="name"))(written).text == spoken


def test_acronyms_can_be_left_to_the_engine() -> None:
    keep = Normalizer(NormalizeOptions(acronyms="keep"))
    assert keep("The FBI has 3 CEOs").text == "The FBI has three CEOs"


@pytest.mark.parametrize(
    "text", ["", " \n\t ", "😀", "...", "\u200b", "\ud800", "*** ---", "🎉 ✨"]
)
def test_nothing_to_say_is_silent(text: str) -> None:
    spoken = US(text)
    assert spoken.is_silent
    assert spoken.source == (0, len(text))


def source_of(spoken: SpokenText, start: int, end: int) -> tuple[int, int]:
    """The source of the spoken characters `start:end`; all of it for words that were rewritten."""
    first = next(segment for segment in spoken.segments if segment.spoken.end > start)
    last = next(segment for segment in spoken.segments if segment.spoken.end >= end)
    left = start - first.spoken.start if first.is_aligned else 0
    right = last.spoken.end - end if last.is_aligned else 0
    return first.source.start + left, last.source.end - right


def test_every_word_knows_its_source() -> None:
    text = "  Pay **$3.50** by 3/4/2024, Dr. Who 😀."
    spoken = US(text)
    sources = {
        word[0]: text[slice(*source_of(spoken, *word.span()))]
        for word in re.finditer(r"\S+", spoken.text)
    }
    assert sources["Pay"].strip() == "Pay"
    assert sources["three"] == sources["cents"] == "$3.50**"
    assert sources["March"] == "3/4/2024"
    assert sources["twenty-four,"] == "3/4/2024,"
    assert sources["Doctor"] == "Dr."
    assert sources["Who"] == "Who"


def test_copied_letters_map_one_to_one() -> None:
    text = "Sum: 5 apples and pears"
    spoken = US(text)
    at = spoken.text.index("pears")
    for offset in range(5):
        assert source_of(spoken, at + offset, at + offset + 1) == (18 + offset, 19 + offset)
    assert source_of(spoken, at - 4, at) == (14, 18)


def test_a_lone_letter_before_a_break_is_no_initial() -> None:
    assert US("Plan A\n\nBegin with B\n\nC").text == "Plan A, Begin with B, C"


def test_long_runs_of_signs_become_a_short_pause() -> None:
    for sign in ". ", "–", "(", "'\"", "?!", "—  ":
        assert len(US("a " + sign * 5000 + " b").text) < 16


def test_reading_text_needs_no_torch() -> None:
    modules = ("normalize", "chunks", "coverage")
    names = ", ".join(f"triptych.modalities.tts.api.text.{name}" for name in modules)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
