"""The front end of models whose prompts are words: text tokens between special tokens.

Owns how long their utterances are, how long they may take, and how each family spells a prompt.
User text is never parsed as a special token. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import InvalidRequest, WeightsError
from triptych.core.text.tokenizer import encode, read_tokenizer
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import FrontEnd, PlannedSegment, Voice
from triptych.modalities.tts.api.text.chunks import split_utterances
from triptych.modalities.tts.api.text.foreign import foreign_spans
from triptych.modalities.tts.api.text.guard import expected_duration
from triptych.modalities.tts.api.text.spoken import Boundary, SpokenText, intersect_spans
from triptych.modalities.tts.api.text.tongues import is_english
from triptych.modalities.tts.configs.higgs import CODEC_FOLDER
from triptych.modalities.tts.configs.orpheus import CODES_PER_FRAME, read_speech_block
from triptych.modalities.tts.wire import SpeechSegment

_MAX_CHARACTERS = 280
"""Maximum characters of an utterance: about 18 s of speech, which these models speak reliably."""
_FIRST_CHARACTERS = (100, 180)
_PARAGRAPH_PAUSE_S = 0.4

Template: TypeAlias = tuple[str | int, ...]
"""Parts of a prompt: special tokens such as `<|eot_id|>`, ids, and texts with fields in braces."""


class PromptTokenizer:
    """A model's tokenizer, with which no text encodes to special tokens.

    `has_marks`: it adds its own special tokens around each text.
    """

    def __init__(self, resolved: ResolvedModel, *, has_marks: bool = False) -> None:
        self._tokenizer = read_tokenizer(Path(resolved.folder), resolved.name)
        self._tokenizer.encode_special_tokens = True
        self._has_marks = has_marks

    def read(self, template: Template) -> Template:
        """Replace special tokens by ids. Raises `WeightsError` where the tokenizer lacks one."""
        return tuple(
            self._mark(part) if isinstance(part, str) and part.startswith("<|") else part
            for part in template
        )

    def ids(self, template: Template, **fields: str) -> tuple[int, ...]:
        """The ids of a template that was `read`, with its fields filled in."""
        ids: list[int] = []
        for part in template:
            if isinstance(part, int):
                ids.append(part)
            else:
                texts = [part.format(**fields)]
                (encoding,) = encode(self._tokenizer, texts, add_special_tokens=self._has_marks)
                ids += encoding.ids
        return tuple(ids)

    def _mark(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise WeightsError(f"tokenizer.json has no token {token!r}, which this model needs.")
        return int(token_id)


@dataclass(kw_only=True, eq=False)
class PromptFrontEnd(FrontEnd):
    """Implements `FrontEnd` for one served model.

    `turn` spells a text in a `voice`. With a built-in voice or instructions, it follows `system`,
    which describes the `scene`.
    """

    tokenizer: PromptTokenizer
    turn: Template
    system: Template = ()
    scene: str = ""

    def __post_init__(self) -> None:
        self.turn, self.system = self.tokenizer.read(self.turn), self.tokenizer.read(self.system)

    def check_voice(self, voice: str) -> str:
        """The canonical name of a voice. Raises `InvalidRequest` that lists the voices."""
        return self.known_voice(voice) if voice.strip() else self.default_voice

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        """The clip's turn, which precedes the new one; none without its words.

        Raises `InvalidRequest` without cloning.
        """
        if not self.can_clone:
            raise InvalidRequest("This model cannot imitate recordings.", param="voice")
        return self.prompt_ids(transcript, self.default_voice, "") if transcript else ()

    def prompt_ids(
        self, text: str, voice: str, instructions: str, language: str = ""
    ) -> tuple[int, ...]:
        """The prompt of a text in a built-in voice, or, for any other name, in a clip's."""
        is_own = voice in self.voices_by_name
        return self.tokenizer.ids(
            (*self.system, *self.turn) if is_own or instructions else self.turn,
            voice=voice if is_own else self.default_voice,
            text=text,
            scene=instructions or self.scene,
        )

    def _plan(
        self, spoken: SpokenText, voice: str, instructions: str, language: str
    ) -> Iterator[PlannedSegment]:
        """Plan with numbers and signs as `reading` says; words are left to the model."""
        if is_english(self.reading(language, voice, spoken.text)):
            spoken = replace(spoken, foreign=foreign_spans(spoken, lambda _: True))
        for utterance in split_utterances(spoken, _MAX_CHARACTERS, _FIRST_CHARACTERS):
            segment = SpeechSegment(prompt_ids=())
            if not utterance.spoken.is_silent:
                is_last = utterance.source.end == spoken.source.end
                is_paragraph = utterance.boundary is Boundary.PARAGRAPH and not is_last
                segment = SpeechSegment(
                    prompt_ids=self.prompt_ids(utterance.text, voice, instructions, language),
                    max_steps=expected_duration(utterance.text).max_tokens(self.steps_per_s),
                    pause_s=_PARAGRAPH_PAUSE_S if is_paragraph else 0.0,
                )
            unspoken = intersect_spans(utterance.spoken.rewritten, utterance.spoken.foreign)
            yield PlannedSegment(segment=segment, utterance=utterance, unspoken=unspoken)


# -- families ------------------------------------------------------------------------------------


def open_csm(resolved: ResolvedModel, config: Mapping[str, Any]) -> PromptFrontEnd:
    """CSM: "[speaker]text" between two marks. Raises `WeightsError` for unfit files.

    A speaker's voice follows from its earlier speech, so without a clip it is random, and the same
    within a text. A clip is of speaker 0.
    """
    codec = config.get("codec_config") or {}
    return PromptFrontEnd(
        name=resolved.name,
        sample_rate=int(codec.get("sampling_rate", 24_000)),  # released Mimi
        steps_per_s=float(codec.get("frame_rate") or codec.get("_frame_rate") or 12.5),
        voices=tuple(
            Voice(name=str(number), description="A speaker with a random voice.")
            for number in range(10)
        ),
        default_voice="0",
        can_clone=True,
        sampling=SamplingParams(temperature=0.9, top_k=50),
        tokenizer=PromptTokenizer(resolved),
        turn=("<|begin_of_text|>", "[{voice}]{text}", "<|end_of_text|>"),
    )


def _header(role: str) -> Template:
    return ("<|start_header_id|>", role, "<|end_header_id|>", "\n\n")


def open_higgs(resolved: ResolvedModel, config: Mapping[str, Any]) -> PromptFrontEnd:
    """Higgs Audio V2: a conversation in which the assistant answers with sound.

    Instructions describe the scene, as in the released model. With a clip, the system turn is the
    clip's. Raises `WeightsError` for unfit files.
    """
    codec = Path(resolved.folder) / CODEC_FOLDER / "config.json"
    fields = read_json(codec) if codec.is_file() else {}
    return PromptFrontEnd(
        name=resolved.name,
        sample_rate=int(fields.get("sample_rate", 24_000)),
        steps_per_s=25.0,
        voices=(Voice(name="default", description="A speaker that fits the text."),),
        default_voice="default",
        can_clone=True,
        takes_instructions=True,
        sampling=SamplingParams(temperature=0.7, top_p=0.95, top_k=50),
        tokenizer=PromptTokenizer(resolved),
        system=(
            "<|begin_of_text|>",
            *_header("system"),
            "Generate audio following instruction.\n\n",
            *("<|scene_desc_start|>", "\n{scene}\n", "<|scene_desc_end|>", "<|eot_id|>"),
        ),
        turn=(
            *_header("user"),
            *("{text}", "<|eot_id|>"),
            *_header("assistant"),
            "<|audio_out_bos|>",
        ),
        scene="Audio is recorded from a quiet room.",
    )


def open_orpheus(resolved: ResolvedModel, config: Mapping[str, Any]) -> PromptFrontEnd:
    """Orpheus: "voice: text", as in the released model's own package.

    Tags such as <laugh>, <sigh> and <gasp> are words to it. Raises `WeightsError` for unfit files.
    """
    block = read_speech_block(config)
    codec = Path(resolved.folder) / block.codec / "config.json"
    rate = read_json(codec).get("sampling_rate", 24_000) if codec.is_file() else 24_000
    return PromptFrontEnd(
        name=resolved.name,
        sample_rate=rate,
        steps_per_s=rate / (2048 / CODES_PER_FRAME),  # SNAC's frame at 24 kHz has 2048 samples
        voices=tuple(Voice(name=name, language="en-US") for name in block.voices),
        default_voice=block.voices[0],
        sampling=SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1),
        tags=block.tags,
        tokenizer=PromptTokenizer(resolved, has_marks=True),
        turn=(*block.prompt_start, "{voice}: {text}", *block.prompt_end),
    )
