"""Transcripts of a recognizer: text, segments, words.

Owns the API process's view of a model (tokenizer, languages), and converting timed tokens to a
transcript. Knows nothing of HTTP or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from tokenizers import Tokenizer

from triptych.core.text.byte_level import unspell
from triptych.core.text.growth import steps_of
from triptych.core.text.tokenizer import encode, read_tokenizer
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.asr.api.words import BROKEN, WordTiming, words_of
from triptych.modalities.asr.families import family_of
from triptych.modalities.asr.languages import UNSPACED, begins_unspaced
from triptych.modalities.asr.traits import Traits
from triptych.modalities.asr.wire import TimedTokens

_SPACE = "\u2581"
"""The space in tokens of SentencePiece."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's text, bytes and log-probability."""

    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptSegment:
    """A segment of a transcript. `text` keeps its leading space; times are in seconds."""

    index: int
    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[ScoredToken, ...]
    words: tuple[WordTiming, ...]
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The transcript of a whole recording. `language` is a code."""

    text: str
    segments: tuple[TranscriptSegment, ...]
    language: str
    duration_s: float

    @property
    def words(self) -> tuple[WordTiming, ...]:
        """All words in order, if their times were requested."""
        return tuple(word for segment in self.segments for word in segment.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptDelta:
    """The finished segments of one window. The `text` of all deltas joins to the transcript's."""

    text: str
    segments: tuple[TranscriptSegment, ...]
    language: str
    heard_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class RecognizerText:
    """The API process's view of one recognizer: its traits and its tokenizer."""

    name: str
    traits: Traits
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.tokenizer.encode_special_tokens = True  # a caller's prompt is plain text

    @classmethod
    def open(cls, resolved: ResolvedModel) -> RecognizerText:
        """Read a resolved model's folder.

        Raises `WeightsError` if it is incomplete, or of a family that is not served.
        """
        folder = Path(resolved.folder)
        family = family_of(read_json(folder / "config.json"))
        traits, tokenizer = family.read(folder), read_tokenizer(folder, resolved.name)
        return cls(name=resolved.name, traits=traits, tokenizer=tokenizer)

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """The tokens of preceding text, or of a context; for a long text, the latest."""
        text = prompt.strip()
        if not text:
            return ()
        spelled = f" {text}" if self.traits.continues_text else text
        (encoding,) = encode(self.tokenizer, [spelled], add_special_tokens=False)
        return tuple(encoding.ids[-self.traits.max_prompt_tokens :])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id) or ""
        if any(step["type"] == "ByteLevel" for step in steps_of(self.tokenizer.decoder)):
            return unspell(token)
        return token.replace(_SPACE, " ").encode()

    def text_of(self, token_ids: Sequence[int], language: str) -> str:
        """The text of one segment, with the space that parts it from the one before."""
        text = self.decode(token_ids).replace(BROKEN, "")
        if self.traits.continues_text:
            return text
        text = text.strip()
        is_spaced = language not in UNSPACED and not begins_unspaced(text)
        return f" {text}" if text and is_spaced else text

    def segment(
        self, timed: TimedTokens, index: int, offset_s: float, language: str
    ) -> TranscriptSegment:
        """A segment of the transcript, from a part that starts at `offset_s` of the recording."""
        tokens = [
            replace(token, start_s=token.start_s + offset_s, end_s=token.end_s + offset_s)
            for token in timed.tokens
        ]
        ids = tuple(token.token_id for token in tokens)
        data = [self._bytes_of(token_id) for token_id in ids]
        has_times = all(token.end_s >= 0 for token in timed.tokens)
        return TranscriptSegment(
            index=index,
            start_s=timed.start_s + offset_s,
            end_s=timed.end_s + offset_s,
            text=self.text_of(ids, language),
            token_ids=ids,
            tokens=tuple(
                ScoredToken(spelled.decode("utf-8", errors="replace"), spelled, token.logprob)
                for spelled, token in zip(data, tokens, strict=True)
            ),
            words=words_of(tokens, self.decode, language) if has_times else (),
            avg_logprob=timed.avg_logprob,
            no_speech_prob=timed.no_speech_prob,
            compression_ratio=timed.compression_ratio,
            temperature=timed.temperature,
        )


def gather(deltas: Sequence[TranscriptDelta]) -> Transcript:
    """Join all deltas of a recording to its transcript."""
    assert deltas, "a recording ends with a delta"
    return Transcript(
        text="".join(delta.text for delta in deltas),
        segments=tuple(segment for delta in deltas for segment in delta.segments),
        language=deltas[-1].language,
        duration_s=deltas[-1].duration_s,
    )
