"""Speech of the trained models, step by step on plain torch: for checkpoints on their way.

Owns the loop of the token decoder over transformers' cache. The engine has its own, on pages; the
tests hold the two to each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from talker_training import Talker
from torch import Tensor
from transformers import DynamicCache

from triptych.modalities.tts.models.voice.codec import VoiceCodec
from triptych.modalities.tts.models.voice.config import VoiceConfig
from triptych.modalities.tts.models.voice.synthesis import synthesise
from triptych.modalities.tts.models.voice.talker import Kind, TalkerPositions, windows


class Speaker:
    """An exported voice: phoneme ids to codes to sound."""

    def __init__(self, folder: Path) -> None:
        values: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.config = VoiceConfig.read(values)
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        self._talker = Talker(self.config.talker, self.config.codec).eval()
        self._talker.load_state_dict(_part(tensors, "talker."))
        self._codec = VoiceCodec(self.config.codec)
        self._codec.load_state_dict(_part(tensors, "codec."))
        self._codec.prepare()

    @torch.inference_mode()
    def sound(self, codes_1QF: Tensor, seed: int = 0) -> Tensor:
        """Samples [S] of codes."""
        seeds = torch.tensor([seed])
        return synthesise(self._codec(codes_1QF), seeds, self.config.codec)[0]

    @torch.inference_mode()
    def codes(self, ids: list[int]) -> Tensor:
        """The likeliest codes [1, Q, F] of a sentence's symbols, pads around."""
        config, num_symbols = self.config.talker, len(ids)
        before, after = config.num_symbols_before, config.num_symbols_after + 1
        outside = config.num_symbols
        padded_1P = torch.tensor([[outside] * before + ids + [outside] * after])
        cache, steps = DynamicCache(), list[Tensor]()
        positions, due, held = self._prompt(padded_1P, num_symbols), 0, 0
        while due < num_symbols:
            states = self._talker.stack(
                inputs_embeds=self._talker.input(positions), past_key_values=cache, use_cache=True
            )
            scores = self._talker.output(states.last_hidden_state[:, -1])
            codes_1Q = scores.codes.argmax(-1)
            steps.append(codes_1Q)
            first = int(held >= config.max_held)
            advance = first + int(scores.advance[0, first:].argmax())
            due, held = due + advance, 0 if advance else held + 1
            positions = TalkerPositions(
                windows(padded_1P, torch.tensor([[min(due, num_symbols)]]), config),
                torch.tensor([[held]]),
                self._codec.values(codes_1Q)[:, None],
                torch.tensor([[Kind.STEP]]),
            )
        return torch.stack(steps, -1)

    def _prompt(self, padded_1P: Tensor, num_symbols: int) -> TalkerPositions:
        due_1T = torch.tensor([[*range(num_symbols), 0]])
        nothing = torch.zeros(1, num_symbols + 1, self.config.codec.num_codebooks)
        return TalkerPositions(
            windows(padded_1P, due_1T, self.config.talker),
            torch.zeros_like(due_1T),
            nothing,
            torch.tensor([[Kind.SYMBOL] * num_symbols + [Kind.START]]),
        )


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
