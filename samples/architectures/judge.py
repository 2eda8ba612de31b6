"""How a type is judged: by the loader that a user's folder would get.

Owns the verdicts. A causal type is a tiny model, which answers through `ChatPipeline` in chunks and
next to others, and is compared with transformers' own class. A type of another kind is its default
configuration, completed where it is not usable (`usable`), for which the loader reserves memory as
before reading weights.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from usable import completed

from triptych import ChatPipeline
from triptych.core.errors import TriptychError, WeightsError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ModelOptions
from triptych.core.process.lazy import load
from triptych.core.runtime.decoders.families.table import is_native
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.layout import read_json
from triptych.core.weights.library_errors import library_errors
from triptych.core.weights.resolve import ResolvedModel
from triptych.core.weights.text_alone import text_alone
from triptych.modalities.diffusion.spec import spec_of
from triptych.modalities.embedding.architecture import FAMILIES as ENCODERS
from triptych.modalities.llm.engine.fallback import FallbackBlueprint
from triptych.modalities.modality import modality_of
from triptych.modalities.registry import MODALITIES
from triptych.modalities.tts.modality import FAMILIES as VOICES
from triptych.modalities.vlm.configs.families import FAMILIES as SIGHTED

NATIVE, TRANSFORMERS, BY_ROWS, REFUSED = "native", "transformers", "row by row", "refused"
PROMPT_LENGTHS = (30, 26, 41)
"""All longer than the tiny windows, and one longer than a step."""
STEP_TOKENS, NUM_NEW = 24, 8
TOLERANCE = 1e-3
"""Of log-probabilities."""
_FIRST_PLAIN_ID, _NUM_PLAIN_IDS = 5, tiny_models.VOCAB_SIZE - 5
"""Ids that are not of padding, which some classes do not count as positions."""
_CONFIG = Config(models=ModelOptions(max_length=4096))
_NUM_FAKE_TENSORS, _FAKE_SIZE = 60_000, 600_000
"""Enough for the counts of any configuration, which loaders compare with a file's tensors."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a type runs, or the role that it has instead, and the reason why it does not run."""

    runs: str
    reason: str = ""


def judge(kind: str, name: str, architecture: str) -> Verdict:
    """Judge a type of a kind in `catalog`. Raises `AssertionError` where it answers otherwise."""
    if kind == "chat":
        return judge_chat(name)
    if kind == "images":
        return judge_pipeline(name)
    own = {"vision": SIGHTED, "embedding": ENCODERS, "speech": VOICES}
    if name in own.get(kind, ("whisper",)):
        return Verdict(NATIVE)
    return _judge_default(name, architecture, role="vision" if kind == "vision" else "")


def judge_pipeline(name: str) -> Verdict:
    """Whether a folder with a pipeline of this class is served, and else the refusal."""
    try:
        spec_of(name)
    except WeightsError as error:
        return Verdict(REFUSED, error.message)
    return Verdict(NATIVE)


def judge_chat(model_type: str) -> Verdict:
    """Run a tiny model of a causal type; one that has none is its default configuration."""
    if model_type in SIGHTED:
        return Verdict("vision")
    try:
        with library_errors("There is no tiny model of it"):
            model = tiny_models.tiny_model(model_type)
    except WeightsError:
        return _judge_default(model_type, tiny_models.class_of(model_type).__name__, role="chat")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tiny_models.save_tokenizer(Path(folder))
        resolved = _resolved(folder)
        if (role := modality_of(resolved, MODALITIES).role) != "chat":
            return Verdict(role)
        try:
            check_answers(model, folder)
        except TriptychError as error:
            return Verdict(REFUSED, error.message)
        return Verdict(_path_of(read_json(Path(folder, "config.json"))))


def check_answers(model: Any, folder: str) -> None:
    """Compare a folder's greedy answers with those of its model. Raises `AssertionError`."""
    prompts = [
        [(7 * at + 3 * length) % _NUM_PLAIN_IDS + _FIRST_PLAIN_ID for at in range(length)]
        for length in PROMPT_LENGTHS
    ]
    with ChatPipeline.from_pretrained(
        folder,
        progress=False,
        dtype="float32",
        max_batch_size=len(prompts),
        max_batch_input_tokens=STEP_TOKENS,
        device_memory_utilization=0.05,
    ) as chat:
        answers = chat.complete(
            prompts, temperature=0, max_tokens=NUM_NEW, ignore_eos=True, top_logprobs=1
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        _compare(model, prompt, [(t.token_id, t.logprob) for t in answer.samples[0].logprobs])


def _compare(model: Any, prompt: Sequence[int], found: Sequence[tuple[int, float]]) -> None:
    ids = [*prompt, *(token_id for token_id, _ in found)]
    with torch.inference_mode():
        logprobs_TV = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    best_T = logprobs_TV[len(prompt) - 1 : -1].max(-1).values
    assert len(found) == NUM_NEW
    for position, (token_id, logprob) in enumerate(found, len(prompt)):
        expected = float(logprobs_TV[position - 1, token_id])
        best = float(best_T[position - len(prompt)])
        assert abs(logprob - expected) <= TOLERANCE, f"token {position}: {logprob}, not {expected}"
        assert best - expected <= TOLERANCE, f"token {position} is not the likeliest"


def _path_of(config: Mapping[str, Any]) -> str:
    """The path of a causal model that is served."""
    if is_native(config):
        return NATIVE
    blueprint = FallbackBlueprint(
        config, max_length=0, dtype=torch.float32, device=torch.device("cpu")
    )
    return BY_ROWS if blueprint.known_plan().by_rows else TRANSFORMERS


def _judge_default(model_type: str, architecture: str, role: str = "") -> Verdict:
    """Whether the loader of a type accepts its default configuration.

    If it is of another role than `role`, it runs as that.
    """
    fields = {}
    with suppress(WeightsError), library_errors("Its default configuration is not usable"):
        fields = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    fields |= {"model_type": model_type, "architectures": [architecture]}
    fields = completed(model_type, fields)
    if "vision_config" in fields and fields["vision_config"] is None:  # released folders have one
        tower = CONFIG_MAPPING[model_type].sub_configs["vision_config"]
        fields["vision_config"] = json.loads(tower().to_json_string(use_diff=False))
    for name in ("image_token_id", "image_token_index"):  # folders have it, some defaults do not
        if fields.get(name, 0) is None:
            fields[name] = _FIRST_PLAIN_ID
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields), "utf-8")
        Path(folder, "generation_config.json").write_text("{}", "utf-8")
        os.link(_fake_weights(), Path(folder, "model.safetensors"))
        model = _resolved(folder)
        modality = modality_of(model, MODALITIES)
        try:
            loader = load(modality.engine)(model, _CONFIG, Device.open("cpu"), Ledger(2**62))
            loader.check_size()
        except TriptychError as error:
            return Verdict(REFUSED, error.message)
        if role not in ("", modality.role):
            return Verdict(modality.role)
        is_own = role == "chat" and is_native(text_alone(fields))
        return Verdict(NATIVE if is_own else TRANSFORMERS)


def _resolved(folder: str) -> ResolvedModel:
    return ResolvedModel(name="model", reference=folder, folder=folder, digest="00")


@cache
def _fake_weights() -> str:
    """A file of tensors that no model has."""
    handle, name = tempfile.mkstemp(suffix=".safetensors")
    os.close(handle)
    fakes = {f"fake.{number}": torch.zeros(1, 1) for number in range(_NUM_FAKE_TENSORS)}
    save_file({**fakes, "long": torch.zeros(_FAKE_SIZE, dtype=torch.uint8)}, name)
    return name
