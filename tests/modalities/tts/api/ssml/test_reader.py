"""What an SSML document says, and what of it is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import RequestError, UnsupportedOption
from triptych.modalities.tts.api.ssml.reader import MAX_DEPTH, MAX_ELEMENTS, read_ssml
from triptych.modalities.tts.api.ssml.script import Delivery, DocumentPlace
from triptych.modalities.tts.api.ssml.values import rate
from triptych.modalities.tts.api.text.spoken import Boundary

DOCUMENT = """<?xml version="1.0"?>
<speak version="1.1" xmlns="http://www.w3.org/2001/10/synthesis" xml:lang="en-US">
 <p><s>Grüße &amp; hello</s><s>It is <sub alias="World Wide Web">WWW</sub>, ok?</s></p>
 <voice name="bob">Hi,</voice>
 <break time="250ms"/><break time="1s"/> There
 <prosody rate="+50%">fast <say-as interpret-as="ordinal">3rd</say-as></prosody><break/>
</speak>"""


def test_a_document_becomes_passages_with_pauses() -> None:
    script = read_ssml(DOCUMENT)
    texts = ["Grüße & hello. It is World Wide Web, ok?", "Hi,", "There", "fast third"]
    assert [" ".join(passage.text.split()) for passage in script.passages] == texts
    assert [passage.pause_s for passage in script.passages] == [None, None, 1.25, None]
    us = Delivery(language="en-US")
    deliveries = [us, us._replace(voice="bob"), us, us._replace(rate=1.5)]
    assert [passage.delivery for passage in script.passages] == deliveries
    ends = [Boundary.PARAGRAPH, Boundary.CLAUSE, Boundary.WORD, Boundary.WORD]
    assert [passage.boundary for passage in script.passages] == ends
    assert (script.pause_s, script.ignored) == (0.75, ())
    assert script.passages[1].place == DocumentPlace(4, 20)


def test_each_character_has_its_place_in_the_document() -> None:
    first, *_, last = read_ssml(DOCUMENT).passages
    found = {first.text[at]: DOCUMENT[slice(*first.source_of(at, at + 1))] for at in range(9)}
    assert (found["ü"], found["&"], found["h"]) == ("ü", "&amp;", "h")
    start = first.text.index("World")
    assert first.as_written(start, len(first.text)).startswith("WWW, ok?")
    assert DOCUMENT[slice(*first.source_of(start, start + 3))] == "WWW"
    assert last.as_written(0, len(last.text)) == "fast 3rd"


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_places_hold_for_any_text(text: str) -> None:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    source = f"<speak>x{escaped}<![CDATA[é]]></speak>"
    try:
        (passage,) = read_ssml(source).passages
    except RequestError:
        return  # characters that XML has not
    assert "".join(passage.text).endswith("é")
    assert len(passage.sources) == len(passage.text)
    for char, span in zip(passage.text, passage.sources, strict=True):
        written = source[slice(*span)]
        assert char in (" ", written) or written.startswith("&")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<audio src='x'/>a", "line 1, column 8: <audio> is not supported; there are <speak>"),
        ("<prosody pitch='+2st'>a</prosody>", "<prosody> does not support pitch; it has rate"),
        ("<prosody>a</prosody>", "<prosody> needs rate"),
        ("<prosody rate='+2'>a</prosody>", "rate is one of"),
        ("<voice gender='female'>a</voice>", "<voice> does not support gender"),
        ("<break time='11s'/>a", "at most 10 s"),
        ("<break time='1s' strength='huge'/>a", "strength is one of none"),
        ("<emphasis level='huge'>a</emphasis>", "level is one of strong"),
        ("<break time='soon'/>a", '"500ms"'),
        ("<break strength='huge'/>a", "strength is one of none"),
        ("<break>a</break>", "no text inside"),
        ("a" + "<break time='9s'/>" * 14, "at most 120 s"),
        ("<say-as interpret-as='currency'>$3</say-as>", "interpret-as is one of"),
        ("<say-as interpret-as='ordinal'>x</say-as>", "cannot be read as ordinal"),
        ("<say-as interpret-as='digits' format='3'>1</say-as>", "for date and time"),
        ("<sub alias='a'><s>b</s></sub>", "no elements inside"),
        ("<sub alias='a'></sub>", "no text inside"),
        ("<speak>a</speak>", "<speak> is the outermost"),
        ("a & b", "line 1, column 11: not well-formed"),
        ("&nbsp;", "undefined entity"),
        ("<?php a?>", "processing instruction"),
        ("<break/>", "no words to speak"),
        ("<s>" * MAX_DEPTH, "inside each other"),
        ("<s>a</s>" * MAX_ELEMENTS, "at most 1000 elements"),
    ],
)
def test_whatever_is_not_honoured_is_refused_with_its_place(body: str, message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("+", r"\+")) as caught:
        read_ssml(f"<speak>{body}</speak>")
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("Hello", "a document begins with <speak>"),
        ("<speak xmlns='http://a.example'>a</speak>", "xmlns is http://www.w3.org"),
        ("<speak xmlns:a='b'><a:viseme/>a</speak>", "column 20: <a:viseme> is not supported"),
    ],
)
def test_what_is_no_ssml_is_refused(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_ssml(source)


@pytest.mark.parametrize("text", ["«Hi.»", "Hi!”", "नमस्ते।", "هل؟"])
def test_a_sentence_that_has_ended_gets_no_second_mark(text: str) -> None:
    source = f"<speak xmlns:mstts='https://www.w3.org/2001/mstts'><s>{text}</s></speak>"
    (passage,) = read_ssml(source).passages
    assert passage.text == f"{text} "
    assert passage.boundary is Boundary.SENTENCE


def test_documents_define_no_entities() -> None:
    bomb = '<!DOCTYPE speak [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><speak>&b;</speak>'
    with pytest.raises(UnsupportedOption, match="document type"):
        read_ssml(bomb)


@pytest.mark.parametrize(
    ("text", "factor"),
    [("slow", 0.64), ("1.5", 1.5), ("150%", 1.5), ("+50%", 1.5), ("-10%", 0.9), (".5", 0.5)],
)
def test_rates(text: str, factor: float) -> None:
    assert rate(text) == pytest.approx(factor)


def test_rates_inside_each_other_multiply() -> None:
    inner = "<prosody rate='fast'>a<prosody rate='50%'>b</prosody></prosody>"
    script = read_ssml(f"<speak>{inner}</speak>")
    assert [passage.delivery.rate for passage in script.passages] == [1.55, 0.775]


def test_emphasis_is_named_as_ignored() -> None:
    assert read_ssml("<speak><emphasis>a</emphasis></speak>").ignored == ("emphasis",)
    assert read_ssml("<speak><emphasis level='none'>a</emphasis></speak>").ignored == ()
