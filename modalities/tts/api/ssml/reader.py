"""Reads SSML (W3C, https://www.w3.org/TR/speech-synthesis11/) into a script.

Owns the elements and attributes that are honoured; every other one is refused by name, with its
place. The parser is expat: declarations of types and entities are refused, so a document never
means more text than it has, and its depth and elements are bounded. Knows neither voices nor sound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NoReturn
from xml.parsers import expat

from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.modalities.tts.api.ssml.say_as import spoken_as
from triptych.modalities.tts.api.ssml.script import Delivery, DocumentPlace, Passage, Script
from triptych.modalities.tts.api.ssml.values import MAX_PAUSES_S, emphasis, pause_s, rate
from triptych.modalities.tts.api.text.chunks import CLAUSE_ENDS, CLOSERS, SENTENCE_ENDS
from triptych.modalities.tts.api.text.spoken import Boundary, Span

MAX_DEPTH = 32
MAX_ELEMENTS = 1000
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z0-9]{2,8}){0,4}\Z")
_HEAD = ("version", "xmlns", "xml:lang", "xsi:schemaLocation", "xmlns:*")
_NAMESPACES = ("http://www.w3.org/2001/10/synthesis", "https://www.w3.org/2001/10/synthesis")
ATTRIBUTES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "speak": _HEAD,
        "p": ("xml:lang",),
        "s": ("xml:lang",),
        "lang": ("xml:lang",),
        "voice": ("name", "xml:lang"),
        "prosody": ("rate",),
        "break": ("time", "strength"),
        "say-as": ("interpret-as", "format"),
        "sub": ("alias",),
        "emphasis": ("level",),
    }
)
"""The elements with the attributes that are honoured; `emphasis` alone changes nothing."""
_NEEDED = {"voice": "name", "prosody": "rate", "say-as": "interpret-as", "sub": "alias"}
_NEEDED["lang"] = "xml:lang"
_REPLACED = ("say-as", "sub")


def read_ssml(source: str) -> Script:
    """The script of a document. Raises `RequestError` that names the place of a mistake."""
    return _SsmlReader(source).read()


@dataclass(slots=True)
class _Element:
    """An open element. What a replaced one holds is `written`, from the character `start` on."""

    name: str
    given: Mapping[str, str]
    delivery: Delivery
    start: int = 0
    end: int = 0
    written: str = ""


@dataclass(slots=True)
class _Open:
    """The passage that is being read."""

    delivery: Delivery
    place: DocumentPlace
    pause_s: float | None
    text: list[str] = field(default_factory=list)
    sources: list[Span] = field(default_factory=list)
    written: dict[Span, str] = field(default_factory=dict)
    has_english_words: bool = False

    def add(self, text: str, sources: list[Span]) -> None:
        """Add characters with their sources."""
        self.text += text
        self.sources += sources

    def close(self) -> Passage | None:
        """The passage, `None` if it has only white space."""
        text = "".join(self.text)
        if not text.strip():
            return None
        return Passage(
            text=text,
            sources=tuple(self.sources),
            written=self.written,
            delivery=self.delivery,
            place=self.place,
            pause_s=self.pause_s,
            boundary=_boundary(text),
            has_english_words=self.has_english_words,
        )


class _SsmlReader:
    """One pass over one document."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._data = source.encode("utf-8", "replace")
        self._byte = self._char = 0  # the same place, in bytes and in characters
        self._stack: list[_Element] = []
        self._num_elements = 0
        self._passages: list[Passage] = []
        self._ignored: dict[str, None] = {}
        self._pause_s: float | None = None
        self._paused_s = 0.0
        self._open: _Open | None = None
        self._parser = parser = expat.ParserCreate("UTF-8")
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.ProcessingInstructionHandler = self._refuse("A processing instruction")
        parser.StartDoctypeDeclHandler = self._refuse("A document type")
        parser.EntityDeclHandler = self._refuse("An entity declaration")

    def read(self) -> Script:
        try:
            self._parser.Parse(self._data, True)
        except expat.ExpatError as error:
            place = DocumentPlace(error.lineno, error.offset + 1)
            reason = expat.errors.messages[error.code]
            if not self._num_elements:
                reason += ": a document begins with <speak>; a text without marks is no SSML"
            raise InvalidRequest(f"SSML, {place}: {reason}.", param="input") from error
        self._close()
        if not self._passages:
            raise InvalidRequest("The SSML has no words to speak.", param="input")
        return Script(
            passages=tuple(self._passages),
            pause_s=self._pause_s or 0.0,
            ignored=tuple(self._ignored),
        )

    # -- what expat finds ------------------------------------------------------------------------

    def _start(self, name: str, given: dict[str, str]) -> None:
        self._check(name, given)
        try:
            delivery = self._delivery(name, given)
            if name == "break":
                self._rest(pause_s(given.get("time"), given.get("strength")))
            elif name == "emphasis" and emphasis(given.get("level")):
                self._ignored["emphasis"] = None
        except RequestError as error:
            raise self._placed(error, name) from error
        if name in ("p", "s"):
            self._end_unit(name)
        self._stack.append(_Element(name, given, delivery))

    def _end(self, name: str) -> None:
        element = self._stack.pop()
        if name in _REPLACED:
            try:
                self._replace(element)
            except RequestError as error:
                raise self._placed(error, name) from error
        elif name in ("p", "s"):
            self._end_unit(name)

    def _characters(self, text: str) -> None:
        start = self._offset()
        sources = [Span(at, at + 1) for at in range(start, start + len(text))]
        if len(text) == 1:
            sources = [Span(start, self._end_of(start))]
        element = self._stack[-1]
        if element.name in _REPLACED:
            element.start = element.start if element.written else start
            element.end = sources[-1].end
            element.written += text
        elif element.name == "break":
            self._fail("<break> has no text inside it.")
        elif text.strip():
            spaced = "".join(" " if char.isspace() else char for char in text)
            self._passage().add(spaced, sources)
        elif self._open is not None:  # space between elements begins no passage
            self._open.add(" " * len(text), sources)

    # -- what it means ---------------------------------------------------------------------------

    def _delivery(self, name: str, given: Mapping[str, str]) -> Delivery:
        outer = self._stack[-1].delivery if self._stack else Delivery()
        language = given.get("xml:lang", "")
        if language and not _LANGUAGE.match(language):
            raise InvalidRequest("xml:lang is a tag such as en-US.")
        return Delivery(
            voice=given["name"] if name == "voice" else outer.voice,
            language=language or outer.language,
            rate=outer.rate * rate(given["rate"]) if name == "prosody" else outer.rate,
        )

    def _passage(self) -> _Open:
        """The passage of the current delivery."""
        delivery = self._stack[-1].delivery
        if self._open is None or self._open.delivery != delivery:
            self._close()
            self._open = _Open(delivery, self._place(), self._pause_s)
        return self._open

    def _close(self) -> None:
        """End the open passage; without words it leaves its pause to the next one."""
        if self._open is not None and (passage := self._open.close()) is not None:
            self._passages.append(passage)
            self._pause_s = None
        self._open = None

    def _rest(self, seconds: float) -> None:
        self._paused_s += seconds
        if self._paused_s > MAX_PAUSES_S:
            raise InvalidRequest(f"All breaks together have at most {MAX_PAUSES_S:g} s.")
        if seconds:
            self._close()
            self._pause_s = (self._pause_s or 0.0) + seconds

    def _end_unit(self, name: str) -> None:
        """End a sentence or paragraph before or after the element `name`."""
        text = [] if self._open is None else self._open.text
        if self._open is None or not any(not char.isspace() for char in reversed(text)):
            return
        last = next((char for char in reversed(text) if char.strip(CLOSERS).strip()), "")
        is_ended = last in SENTENCE_ENDS
        at = self._open.sources[-1].end
        marks = "\n\n" if name == "p" else " " if is_ended else ". "
        self._open.add(marks, [Span(at, at)] * len(marks))

    def _replace(self, element: _Element) -> None:
        written = " ".join(element.written.split())
        if not written:
            raise InvalidRequest("It has no text inside it.")
        is_english = element.name == "say-as"
        if is_english:
            given = element.given
            words = spoken_as(written, given["interpret-as"], given.get("format", ""))
        else:
            words = " ".join(element.given["alias"].split())
        source = Span(element.start, element.end)
        passage = self._passage()
        passage.add(words, [source] * len(words))
        passage.written[source] = written
        passage.has_english_words |= is_english

    # -- mistakes --------------------------------------------------------------------------------

    def _check(self, name: str, given: Mapping[str, str]) -> None:
        self._num_elements += 1
        if self._num_elements > MAX_ELEMENTS or len(self._stack) >= MAX_DEPTH:
            self._fail(f"at most {MAX_ELEMENTS} elements, {MAX_DEPTH} inside each other.")
        if (name == "speak") == bool(self._stack):
            self._fail("<speak> is the outermost element, and no other.")
        if name not in ATTRIBUTES:
            known = ", ".join(f"<{each}>" for each in ATTRIBUTES)
            self._fail(f"<{name[:40]}> is not supported; there are {known}.")
        if self._stack and self._stack[-1].name in (*_REPLACED, "break"):
            self._fail(f"<{self._stack[-1].name}> has no elements inside it.")
        for attribute in given:
            if _general(attribute) not in ATTRIBUTES[name]:
                known = ", ".join(ATTRIBUTES[name])
                self._fail(f"<{name}> does not support {attribute[:40]}; it has {known}.")
        if (needed := _NEEDED.get(name, "")) and not given.get(needed, "").strip():
            self._fail(f"<{name}> needs {needed}.")
        if given.get("version", "1.1") not in ("1.0", "1.1"):
            self._fail("the version of SSML is 1.0 or 1.1.")
        if given.get("xmlns", _NAMESPACES[0]) not in _NAMESPACES:
            self._fail(f"xmlns is {_NAMESPACES[0]}.")

    def _refuse(self, what: str) -> Callable[..., None]:
        return lambda *_: self._fail(f"{what} is not supported.")

    def _fail(self, message: str) -> NoReturn:
        raise UnsupportedOption(f"SSML, {self._place()}: {message}", param="input")

    def _placed(self, error: RequestError, name: str) -> RequestError:
        return type(error)(f"SSML, {self._place()}, <{name}>: {error}", param="input")

    # -- places ----------------------------------------------------------------------------------

    def _place(self) -> DocumentPlace:
        return DocumentPlace(self._parser.CurrentLineNumber, self._parser.CurrentColumnNumber + 1)

    def _offset(self) -> int:
        """The character of the source at which the current event begins."""
        byte = self._parser.CurrentByteIndex
        self._char += len(self._data[self._byte : byte].decode("utf-8", "replace"))
        self._byte = byte
        return self._char

    def _end_of(self, start: int) -> int:
        """Where the source of one character ends: a reference such as "&amp;" is longer."""
        if self._source[start] == "&":
            return self._source.index(";", start) + 1
        return start + (2 if self._source.startswith("\r\n", start) else 1)


def _general(attribute: str) -> str:
    """The attribute as `ATTRIBUTES` has it: a prefix may be declared, its elements are refused."""
    return "xmlns:*" if attribute.startswith("xmlns:") else attribute


def _boundary(text: str) -> Boundary:
    """The unit that ends with a passage."""
    words = text.rstrip()
    if "\n\n" in text[len(words) :]:
        return Boundary.PARAGRAPH
    end = words.rstrip(CLOSERS)
    if end.endswith(SENTENCE_ENDS):
        return Boundary.SENTENCE
    return Boundary.CLAUSE if end.endswith(CLAUSE_ENDS) else Boundary.WORD
