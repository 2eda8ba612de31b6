"""Qwen3-ASR (Alibaba): an encoder of one-second chunks in front of Qwen3.

Owns its prompt with a context and a language, and reading the language that it names.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.asr.engine.decoding.writing import PromptedModel, tokens_of
from triptych.modalities.asr.engine.tokens import Written
from triptych.modalities.asr.engine.window_model import Heard, Window
from triptych.modalities.asr.engine.windowed import WindowedBlueprint
from triptych.modalities.asr.languages import LANGUAGES, language_code

_MARK = "<asr_text>"
"""The token between the language and the text."""
_OWN_NAMES = {"tl": "Filipino"}


class Qwen3Asr(PromptedModel):
    """Writes "language English<asr_text>" and the text; the text alone with a given language."""

    network_class, processor_class = "Qwen3ASRForConditionalGeneration", "Qwen3ASRProcessor"

    def inputs(self, window: Window) -> dict[str, Any]:
        """The features and the prompt."""
        language = _OWN_NAMES.get(window.language) or LANGUAGES.get(window.language, "").title()
        return self.placed(
            self.processor.apply_transcription_request(
                window.pcm_S, language=language or None, prompt=window.prompt or None
            )
        )

    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Tensor]:
        """The sound in the language model's space."""
        model = self.network.model
        tower = model.audio_tower
        hidden_TD = yield from self.layerwise("encode", tower, tower.layers, **inputs)
        projected_TD: Tensor = model.multi_modal_projector(tower.ln_post(hidden_TD))
        return projected_TD

    def heard(self, window: Window, written: Written) -> Heard:
        """The tokens after the mark, and the language before it."""
        tokens, ids = tokens_of(written), list(written.token_ids)
        mark_id = self.tokenizer.token_to_id(_MARK)
        if window.language or mark_id not in ids:
            return Heard(tokens, window.language)
        at = ids.index(mark_id)
        named = str(self.tokenizer.decode(ids[:at])).strip().removeprefix("language ")
        codes = {name: code for code, name in _OWN_NAMES.items()}
        return Heard(tokens[at + 1 :], codes.get(named) or language_code(named))


open_qwen3 = partial(WindowedBlueprint, Qwen3Asr)
