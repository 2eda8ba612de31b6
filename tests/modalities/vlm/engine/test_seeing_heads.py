"""Models that see, with a layer that predicts further tokens or a head: answers stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from support.driver import SchedulerDriver
from support.eagle import save_head
from support.llm_loader import MIB
from support.shadow_drafts import FreeDrafts
from support.vision_models import pixels, save_model
from support.vision_rig import VisionRig, class_inputs
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.ledger import Ledger
from triptych.core.options.config import CacheOptions, Config, ModelOptions, ScheduleOptions
from triptych.core.options.speculation import SpeculationOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.vlm.engine.loader import VisionLoader
from triptych.schedulers.base import LoadedModel

_IN_LAYER = "model.language_model.layers.3"
LAYERS = {
    "qwe": (
        "mtp.layers.0",
        *("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc"),
    ),
    "glm": (
        _IN_LAYER,
        *(f"{_IN_LAYER}.{part}" for part in ("enorm", "hnorm", "shared_head.norm", "eh_proj")),
    ),
}
"""The names of a layer, three norms and a projection."""
SUN, MOON = pixels(40, 60, 1), pixels(20, 24, 2)
PROMPTS = (
    ((1, 5, 9, 12), SUN, (20, 21, 22)),
    ((1, 5, 9, 12), SUN, (20, 21, 22), MOON, (13, 14)),
    (tuple(range(3, 20)),),
)


def save_with_layer(name: str, folder: Path, before: str = "") -> tuple[Any, torch.Tensor]:
    """Save a model whose second layer, with attention, is also the one that predicts.

    Names of that layer have `before` in front.
    """
    model = save_model(name, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    body = "model.language_model."
    layer, *names, fc = LAYERS[name[:3]]
    mtp = {
        f"{layer}.{key.removeprefix(f'{body}layers.1.')}": tensor.clone()
        for key, tensor in tensors.items()
        if key.startswith(f"{body}layers.1.")
    }
    norm = tensors[f"{body}norm.weight"]
    mtp |= {f"{each}.weight": norm.clone() for each in names}
    size = len(norm)
    mtp[f"{fc}.weight"] = torch.randn(size, 2 * size) * (2 * size) ** -0.5
    if name == "glm_ocr":
        mtp[f"{layer}.embed_tokens.weight"] = tensors[f"{body}embed_tokens.weight"].clone()
    tensors |= {f"{before}{key}": tensor for key, tensor in mtp.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return model, mtp[f"{fc}.weight"]


def load(
    folder: Path, ledger: Ledger, algorithm: str = "none", model_impl: str = "auto"
) -> LoadedModel:
    config = Config(
        models=ModelOptions(model=("x",), max_length=64, model_impl=model_impl),
        schedule=ScheduleOptions(max_batch_size=4, max_batch_input_tokens=16),
        cache=CacheOptions(kv_cache_page_size=4),
        speculation=SpeculationOptions(
            speculative_algorithm=algorithm, draft_model_path="head" * (algorithm == "eagle3")
        ),
    )
    resolved = ResolvedModel(
        name="tiny", reference="x", folder=str(folder), digest="00", draft=str(folder / "head")
    )
    loaded = VisionLoader(resolved, config, Device.open("cpu"), ledger).load(lambda _: None)
    if algorithm != "none":
        loaded.scheduler.tokens.drafting.drafter.costs = FreeDrafts()
    return loaded


def answers(loaded: LoadedModel, rig: VisionRig) -> list[tuple[int, ...]]:
    """Of greedy and seeded requests in company, and again, where their prompts are cached."""
    driver = SchedulerDriver(loaded.scheduler, loaded.runner, model="tiny", depth=2)
    for turn in range(2):
        for number, parts in enumerate(PROMPTS):
            prompt = rig.prompt(*parts)
            sampling = SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=16)
            request = TokenRequest(
                prompt_ids=prompt.prompt_ids, contents=prompt.images, sampling=sampling
            )
            driver.submit(f"{turn} {number}", request)
        driver.run()
    return [
        tuple(token for delta in driver.payloads(job_id) for token in delta.token_ids)
        for job_id in driver.jobs
    ]


@torch.inference_mode()
def expected_cells(model: Any, fc_OI: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """What the layer makes of a prompt's cells, by transformers' modules."""
    found: dict[str, Any] = {}
    text = model.model.language_model
    hook = text.register_forward_pre_hook(
        lambda module, args, given: found.update(given), with_kwargs=True
    )
    hidden_1TC = model.model(**inputs).last_hidden_state[:, :-1]
    hook.remove()
    pair = [text.norm(found["inputs_embeds"][:, 1:]), text.norm(hidden_1TC)]
    x_1TC = linear(torch.cat(pair, dim=2), fc_OI)
    places = found["position_ids"][-3:, :, :-1]
    num_cells = x_1TC.shape[1]
    out_1TC = text.layers[1](
        x_1TC,
        position_embeddings=text.rotary_emb(x_1TC, places),
        attention_mask=torch.full((1, 1, num_cells, num_cells), -torch.inf).triu(1),
        position_ids=places[0],
    )
    cells_TC: torch.Tensor = text.norm(out_1TC)[0]
    return cells_TC


@pytest.mark.parametrize(
    ("name", "before"), [("qwen3_5", "model."), ("qwen3_5_moe", ""), ("glm_ocr", "")]
)
def test_cells_of_images_are_those_of_the_class(tmp_path: Path, name: str, before: str) -> None:
    model, fc_OI = save_with_layer(name, tmp_path, before)
    model.set_attn_implementation("eager")
    rig = VisionRig(tmp_path)
    loaded = load(tmp_path, Ledger(256 * MIB), "mtp")
    head = loaded.runner._tokens._draft.head._with_rows._head
    cells, forward = [], head.forward

    def keep(*given: Any) -> torch.Tensor:
        hidden_TC = forward(*given)
        cells.append(hidden_TC.clone())
        return hidden_TC

    head.forward = keep
    prompt = rig.prompt(*PROMPTS[1])
    request = TokenRequest(
        prompt_ids=prompt.prompt_ids,
        contents=prompt.images,
        sampling=SamplingParams(temperature=0.0, max_tokens=3),
    )
    driver = SchedulerDriver(loaded.scheduler, loaded.runner, model="tiny")
    driver.submit("one", request)
    driver.run()
    loaded.close()
    inputs = class_inputs(model, tmp_path, rig, PROMPTS[1])
    expected_TC = expected_cells(model, fc_OI, inputs)
    found_TC = torch.cat(cells)[: len(expected_TC)]
    torch.testing.assert_close(found_TC, expected_TC, atol=1e-4, rtol=1e-4)


def check_answers(folder: Path, algorithm: str) -> None:
    """Answers with drafts are those without, also where rows have to give way."""
    rig, ledger = VisionRig(folder), Ledger(256 * MIB)
    plain = load(folder, ledger)
    expected = answers(plain, rig)
    plain.close()
    loaded = load(folder, ledger, algorithm)
    assert answers(loaded, rig) == expected
    assert loaded.scheduler.stats().counters["draft_tokens_total"] > 50
    pool = loaded.scheduler.tokens.pool
    pool.extend(pool.acquire(()), pool.num_available - 17)
    assert answers(loaded, rig) == expected
    assert loaded.scheduler.stats().counters["preemptions_total"] > 0
    loaded.close()
    assert ledger.by_owner() == {}


def test_a_predicting_layer_changes_no_token(tmp_path: Path) -> None:
    save_with_layer("qwen3_5", tmp_path)
    check_answers(tmp_path, "mtp")


def test_a_head_changes_no_token(tmp_path: Path) -> None:
    """It reads the inputs of layers after which features are added again."""
    save_model("qwen3_vl", tmp_path)
    rope = {"type": "mrope", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    save_head(tmp_path / "head", vocab_size=80, rope_scaling=rope)
    check_answers(tmp_path, "eagle3")


def test_transformers_classes_leave_the_layer_out(tmp_path: Path) -> None:
    """Their own rule has the number of the released layer."""
    save_with_layer("glm_ocr", tmp_path)
    load(tmp_path, Ledger(256 * MIB), model_impl="transformers").close()
