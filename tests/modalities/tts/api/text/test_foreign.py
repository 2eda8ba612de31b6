"""Which sentences are read by the wrong rules: other languages, but not names and loan words."""

# ruff: noqa: RUF001
from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.tts.api.text.foreign import evidence, foreign_spans
from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.api.text.phonemes import Phonemizer
from triptych.modalities.tts.api.text.spoken import Span, merge_spans

NORMALIZE = Normalizer()
is_english = lru_cache(maxsize=None)(Phonemizer().is_english)

FOREIGN = """
Guten Morgen, wie geht es Ihnen heute?
Die Katze sitzt auf dem Tisch und schläft.
Das Wetter ist schön.
Danke!
Bitte warten Sie einen Moment.
**Der Zug** nach Berlin fährt um 8 Uhr ab.
Ich heiße Anna.
Guten Morgen.
Kein Problem, das machen wir morgen.
Bonjour tout le monde.
Bonjour.
Je ne sais pas.
Le chat dort sur la table.
Où est la gare, s'il vous plaît ?
C’est la vie.
Il fait beau aujourd'hui et les enfants jouent dans le jardin.
Merci beaucoup pour votre aide.
Hola, ¿cómo estás?
El perro duerme en la casa.
El perro come la carne.
Muchas gracias por su ayuda.
Me llamo Carlos y vivo en Madrid.
Buenos días.
Ciao, come stai?
Il gatto dorme sul tavolo.
Non parlo italiano.
Buongiorno a tutti.
La vita è bella.
Vorrei un caffè, per favore.
Bom dia, tudo bem?
Eu não falo inglês.
O menino come uma maçã.
Obrigado.
Goedemorgen, hoe gaat het met u?
De kat zit op de mat.
Ik weet het niet.
Het regent vandaag in Amsterdam.
Jag vet inte vad du menar.
Det är en bra dag.
Jeg forstår ikke hva du sier.
Hyvää huomenta, mitä kuuluu?
Minä en ymmärrä suomea.
Dzień dobry, jak się masz?
Kot śpi na stole.
Dobrý den, jak se máte?
Köszönöm szépen.
Bugün hava çok güzel.
Xin chào các bạn.
Selamat pagi, apa kabar?
Bună ziua, ce mai faceți?
Habari ya asubuhi, jina langu ni Juma.
Nid wyf yn siarad Cymraeg yn dda iawn.
""".strip().split("\n")

ENGLISH = """
Jürgen Müller met François Hollande in São Paulo.
Ludwig van Beethoven was born in Bonn.
Charles de Gaulle.
La Paz.
Los Angeles is large.
Leonardo da Vinci painted the Mona Lisa.
El Niño is coming.
She had a déjà vu at the café.
He ordered a crème brûlée and a piña colada.
The Gestalt of the Zeitgeist, said the doppelgänger.
Bon appétit, said the waiter.
Run kubectl apply, then restart nginx.
kubectl
vllm tokenizer
Nguyen Van Thieu met Mobutu Sese Seko.
Rio de Janeiro, Buenos Aires and São Tomé.
I was in the hat.
He died.
Die Hard is a film.
Hello.
No.
OK.
Thank you.
Good morning, Señor García.
The naïve résumé of Zoë.
Don Quixote de la Mancha is by Miguel de Cervantes.
Vincent van Gogh, Oscar de la Hoya and Ursula von der Leyen.
Schadenfreude and Weltschmerz are German words.
Do not say adiós to me.
Tchaikovsky, Rachmaninoff, Shostakovich.
Pizza margherita, tagliatelle al ragù and tiramisu.
Our CEO speaks at 9 AM about state-of-the-art methods.
supercalifragilisticexpialidocious
xyzzy plugh
Cinco de Mayo falls on a Friday.
My son is on the plus side.
gonna wanna lemme go
lol omg brb
La La Land was a hit.
The Bundestag and the Bundesrat met in Berlin.
Bayern München beat Real Madrid 2 to 1.
In vino veritas.
ad hoc, et cetera, per se
De facto leaders met.
We went to Aix-en-Provence and Stratford-upon-Avon.
`None` is not `dict`.
""".strip().split("\n")


PHRASES = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text())
QUOTED = """
I met José in San Jose.
Alexa, play Despacito.
Crème brûlée.
Piña colada.
Voilà.
Jalapeño.
Grosso modo.
Klein bottle.
Ponte Vecchio.
Deutsche Bank.
Casa Blanca.
Kubernetes pods.
numpy and pandas.
Giovanni called.
Nietzsche wrote.
""".strip().split("\n")


def foreign_text(text: str) -> list[str]:
    spoken = NORMALIZE(text)
    return [spoken.text[slice(*span)].strip() for span in foreign_spans(spoken, is_english)]


@pytest.mark.parametrize("text", FOREIGN)
def test_another_language_is_found(text: str) -> None:
    spoken = NORMALIZE(text)
    assert foreign_spans(spoken, is_english) == (Span(0, len(spoken.text)),)


@pytest.mark.parametrize("text", ENGLISH)
def test_english_with_names_and_loans_is_english(text: str) -> None:
    assert foreign_text(text) == []


@pytest.mark.parametrize("text", QUOTED)
def test_short_english_with_names_loans_and_jargon_is_english(text: str) -> None:
    assert foreign_text(text) == []


@pytest.mark.parametrize("language", PHRASES["foreign"])
def test_most_short_phrases_without_function_words_are_found(language: str) -> None:
    phrases = PHRASES["foreign"][language].split("\n")[:-1]
    missed = [phrase for phrase in phrases if not foreign_text(f"{phrase}.")]
    assert len(missed) <= 0.4 * len(phrases), missed


def test_five_of_six_short_phrases_are_found_and_hardly_an_english_one() -> None:
    every = "".join(PHRASES["foreign"].values()).split("\n")[:-1]
    missed = [phrase for phrase in every if not foreign_text(f"{phrase}.")]
    assert len(missed) <= len(every) / 6, missed
    english = PHRASES["english"].split("\n")[:-1]
    wrong = [phrase for phrase in english if foreign_text(f"{phrase}.")]
    assert len(wrong) <= 0.01 * len(english), wrong


def test_two_capitals_are_a_name_but_in_german() -> None:
    assert foreign_text("Schwarze Wolken.") == ["Schwarze Wolken."]
    assert foreign_text("Piazza Grande.") == foreign_text("Nova Terra.") == []


def test_an_inflected_form_of_a_listed_word_counts() -> None:
    lists = evidence()
    assert "cervezas" not in lists.foreign | lists.vocabulary
    assert foreign_text("cervezas.") == ["cervezas."]


@pytest.mark.parametrize("other", FOREIGN[::5])
def test_sentences_are_judged_one_by_one(other: str) -> None:
    assert foreign_text(f"He read it to me. {other} I said that I agreed.") == [
        NORMALIZE(other).text.strip()
    ]


def test_what_shows_nothing_goes_with_its_neighbours() -> None:
    german = "Oma Erna! Wir haben keine Zeit. 17. Tante Grete."
    assert foreign_text(german) == [NORMALIZE(german).text.strip()]
    assert foreign_text("Oma Erna! We have no time. 17. Tante Grete.") == []
    assert foreign_text("17") == foreign_text("Oma Erna.") == []


def test_words_of_the_normalizer_and_given_phonemes_are_no_evidence() -> None:
    assert foreign_text("Müller & Söhne haben 3 Autos und 5 % Rabatt.") != []
    assert foreign_text("Say [gefunden](/ɡəfˈʊndən/) and [nicht](/nˈɪçt/).") == []


def test_hardly_an_english_sentence_of_our_pages_is_taken_for_foreign() -> None:
    pages = Path(__file__).parents[5].joinpath("docs").glob("*.md")
    found = [part for page in pages for part in foreign_text(page.read_text())]
    assert len(found) <= 2, found  # rows of option names


def test_the_lists_do_not_contradict_each_other() -> None:
    lists = evidence()
    assert not lists.english & (lists.shared | lists.foreign | lists.articles | lists.particles)
    assert not lists.foreign & lists.shared
    others = lists.english | lists.shared | lists.articles | lists.particles | lists.foreign
    assert not lists.vocabulary & others


SPANS = st.lists(
    st.builds(lambda at, size: Span(at, at + size), st.integers(0, 30), st.integers(0, 9))
)


@given(SPANS)
def test_joined_spans_cover_the_same_and_do_not_touch(some: list[Span]) -> None:
    def covered(spans: Iterable[Span]) -> set[int]:
        return {at for span in spans for at in range(*span)}

    whole = merge_spans(some)
    assert covered(whole) == covered(some)
    assert all(one.end < two.start for one, two in pairwise(whole))
