"""Gemma 3n in its released form, where its encoders' package is missing: its text is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.decoder_families import TINY
from support.dense_families import DENSE
from support.llm_loader import MIB, config, loader
from support.text_models import byte_tokenizer
from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.ledger import Ledger
from triptych.core.options.config import ModelOptions
from triptych.core.weights import text_alone
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.modality import modality_of
from triptych.modalities.registry import MODALITIES


def save_released(folder: Path) -> transformers.PreTrainedModel:
    """A tiny Gemma 3n as it is released, with a tensor of an encoder; returns the text model."""
    torch.manual_seed(3)
    fields = transformers.Gemma3nTextConfig(**{**TINY, **DENSE["gemma3n"][1]})
    model = transformers.Gemma3nForCausalLM(fields).eval()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(file).items()
    }
    tensors["model.vision_tower.conv.weight"] = torch.ones(4)
    save_file(tensors, file, metadata={"format": "pt"})
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": fields.to_dict(),
        "vision_config": {"model_type": "gemma3n_vision"},
        "audio_config": {"model_type": "gemma3n_audio"},
    }
    (folder / "config.json").write_text(json.dumps(whole))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def test_its_text_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_released(tmp_path)
    resolved = ResolvedModel(name="tiny", reference="x", folder=str(tmp_path), digest="00")
    monkeypatch.setattr(text_alone, "find_spec", lambda name: None)
    assert modality_of(resolved, MODALITIES).role == "chat"
    assert TextModel.open(resolved, ModelOptions()).vocab_size == TINY["vocab_size"]
    loaded = loader(tmp_path, Ledger(256 * MIB), config()).load(lambda _: None)
    assert "tiny answers text alone: its encoders need timm" in caplog.text
    outputs: list[Output] = []
    prompt = tuple(range(3, 60))
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    request = TokenRequest(prompt_ids=prompt, sampling=sampling)
    job = Job(job_id="0", model="tiny", request=request, sink=outputs.append, arrival_s=0.0)
    loaded.scheduler.submit(job)
    for step_id in range(20):
        proposal = loaded.scheduler.propose(0.0)
        plan = proposal and loaded.scheduler.book(proposal, step_id, 0.0)
        if plan is None:
            break
        loaded.scheduler.commit(plan, loaded.runner.launch(plan).result(), 0.0)
    answer = [token for output in outputs for token in output.payload.token_ids]
    with torch.inference_mode():
        expected_TV = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
    assert answer == expected_TV[len(prompt) - 1 :].argmax(1).tolist()
    loaded.close()


def test_with_the_package_it_is_a_vision_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_alone, "find_spec", lambda name: object())
    given = {"model_type": "gemma3n", "text_config": {}}
    assert text_alone.text_alone(given) == given
