"""Fakes of the text path: a byte tokenizer, a model folder, an engine that follows a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.reports import ModelStatus
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.weights.resolve import ResolvedModel

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, after three special ones: ids are easy to reason about."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


def write_text_folder(folder: Path, **config: Any) -> ResolvedModel:
    """A model folder with everything but weights."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    values = {"vocab_size": 259, "max_position_embeddings": 256, "eos_token_id": 0, **config}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"})
    )
    return ResolvedModel(name="tiny", reference="tiny", folder=str(folder), digest="00")


Script = Callable[[TokenRequest], Sequence[TokenDelta]]


class ScriptedClient:
    """An engine client whose jobs answer as `script` says; remembers what was cancelled."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.models: tuple[ModelStatus, ...] = ()
        self.submitted: list[tuple[str, TokenRequest]] = []
        self.finished: list[str] = []
        self.cancelled: list[str] = []

    async def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> AsyncGenerator[Output, None]:
        self.submitted.append((job_id, request))
        done = False
        try:
            for delta in self.script(request):
                await asyncio.sleep(0)
                done = delta.finish_reason is not None
                yield Output(job_id=job_id, payload=delta, is_final=done)
        finally:
            (self.finished if done else self.cancelled).append(job_id)

    def status(self) -> EngineStatus:
        return EngineStatus(
            is_ready=True,
            is_alive=True,
            is_draining=False,
            beat_age_s=0.0,
            num_restarts=0,
            models=self.models,
            last_beat=None,
        )

    async def load(self, model: str) -> None: ...

    async def close(self) -> None: ...
