"""The traits of one recognizer: the options that a request may have.

Owns the traits, and refusing what a model does not have. Knows no torch and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.modalities.asr.languages import LANGUAGES, language_code

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The traits of a model of `family`.

    `languages` are the codes that a request may name: none if the model finds the language without
    help and takes no word for it. Where a request names none, the language is detected, or is
    `default_language`, or missing (`needs_language`). `max_prompt_tokens` 0: no prompt.
    `continues_text`: the text so far is in the prompt of later audio. `can_sample`: it writes token
    by token, so that a temperature has a meaning.
    """

    family: str
    languages: Sequence[str] = ()
    default_language: str = ""
    needs_language: bool = False
    translates: bool = False
    max_prompt_tokens: int = 0
    continues_text: bool = False
    can_sample: bool = False
    has_word_times: bool = False

    def check_language(self, model: str, language: str) -> str:
        """The code of a supported language; empty to detect it. Raises `RequestError`s."""
        if language.strip().lower() in ("", "auto"):
            if self.needs_language:
                raise InvalidRequest(
                    f"{model} does not detect the language: name it, such as en.", param="language"
                )
            return self.default_language
        if not self.languages:
            raise UnsupportedOption(
                f"{model} finds the language without help, and takes none: leave language out.",
                param="language",
            )
        code = language_code(language)
        if code not in self.languages:
            some = ", ".join(LANGUAGES[code] for code in self.languages if code in LANGUAGES)
            raise InvalidRequest(
                f"{model} does not support the language {language[:40]!r}; supported are {some}.",
                param="language",
            )
        return code

    def check_task(self, model: str, task: Task) -> None:
        """Raise `UnsupportedOption` if the model does not support `task`."""
        if task == "translate" and not self.translates:
            known = "English-only and cannot" if tuple(self.languages) == ("en",) else "unable to"
            raise UnsupportedOption(
                f"{model} is {known} translate: serve a multilingual Whisper, such as"
                " --model openai/whisper-tiny, and name it here.",
                param="model",
            )

    def check_options(
        self, model: str, *, prompt: str, temperature: float, has_word_times: bool
    ) -> None:
        """Raise `UnsupportedOption` for an option that models of this family do not have."""
        if prompt.strip() and not self.max_prompt_tokens:
            raise UnsupportedOption(
                f"{model} takes no prompt, as a model of the {self.family} family: leave it out.",
                param="prompt",
            )
        if temperature and not self.can_sample:
            raise UnsupportedOption(
                f"{model} does not sample, as a model of the {self.family} family: leave"
                " temperature out.",
                param="temperature",
            )
        if has_word_times and not self.has_word_times:
            raise UnsupportedOption(
                f"{model} has no times of words, as a model of the {self.family} family: ask for"
                " segment in timestamp_granularities.",
                param="timestamp_granularities",
            )
