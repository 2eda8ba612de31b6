"""A head that drafts: its memory, the rows in its target's pages, and what it is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from support.driver import SchedulerDriver
from support.eagle import save_head
from support.llm_loader import MIB, config, save_llama
from support.shadow_drafts import FreeDrafts
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import ConfigError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, DeviceOptions, ModelOptions, SpeculationOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.engine.loader import LlmLoader
from triptych.schedulers.base import LoadedModel

DRAFTING = SpeculationOptions(speculative_algorithm="eagle3", draft_model_path="a/head")


def open_loader(folder: Path, options: Config, ledger: Ledger | None = None) -> LlmLoader:
    """The loader of a tiny model and of the head in `head`."""
    (folder / "target").mkdir(exist_ok=True)
    save_llama(folder / "target", {})
    resolved = ResolvedModel(name="tiny", reference="x", folder=str(folder / "target"), digest="00")
    resolved = structs.replace(resolved, draft=str(folder / "head"))
    return LlmLoader(resolved, options, Device.open("cpu"), ledger or Ledger(256 * MIB))


def answers(loaded: LoadedModel) -> list[tuple[int, ...]]:
    driver = SchedulerDriver(loaded.scheduler, loaded.runner, model="tiny", depth=2)
    for seed in range(2):
        sampling = SamplingParams(temperature=0.7 * seed, seed=seed, max_tokens=30)
        driver.submit(str(seed), TokenRequest(prompt_ids=tuple(range(9)), sampling=sampling))
    driver.run()
    return [
        tuple(token for delta in driver.payloads(job_id) for token in delta.token_ids)
        for job_id in driver.jobs
    ]


def test_rows_are_a_part_of_pages_and_answers_stay_the_same(tmp_path: Path) -> None:
    torch.manual_seed(1)
    save_head(tmp_path / "head")
    ledger = Ledger(256 * MIB)
    loaded = open_loader(tmp_path, config(speculation=DRAFTING), ledger).load(lambda _: None)
    loaded.scheduler.tokens.drafting.drafter.costs = FreeDrafts()
    runner, held = loaded.runner, ledger.by_owner()
    for owner, kv in (("kv", runner._target.kv), ("draft-kv", runner._draft.kv)):
        assert sum(x.untyped_storage().nbytes() for x in kv.tensors) == held[f"tiny/{owner}"]
    kv = runner._target.kv
    assert kv.hidden.shape == (kv.num_pages, kv.layout.page_size, 32)
    drafted = answers(loaded)
    assert loaded.scheduler.stats().counters["draft_tokens_total"] > 20
    loaded.close()
    assert ledger.by_owner() == {}
    resolved = ResolvedModel(
        name="tiny", reference="x", folder=str(tmp_path / "target"), digest="00"
    )
    plain = LlmLoader(resolved, config(), Device.open("cpu"), Ledger(256 * MIB)).load(
        lambda _: None
    )
    assert answers(plain) == drafted
    plain.close()


@pytest.mark.parametrize(
    ("special", "sections", "error"),
    [
        ({"target_hidden_size": 48}, {}, "reads hidden states of 48 values, and the model has 32"),
        ({"num_hidden_layers": 2}, {}, "head has 2 layers"),
        ({"eagle_aux_hidden_state_layer_ids": None}, {}, "the states after 2, 1, -1 layers"),
        ({}, {"device": DeviceOptions(tensor_parallel_size=2)}, "tiny is divided"),
        ({}, {"models": ModelOptions(model_impl="transformers")}, "whose hidden states a head can"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_loading(
    tmp_path: Path, special: dict[str, Any], sections: dict[str, Any], error: str
) -> None:
    save_head(tmp_path / "head", **special)
    with pytest.raises(ConfigError, match=error):
        open_loader(tmp_path, config(speculation=DRAFTING, **sections)).check_size()


def test_a_whole_model_is_no_head(tmp_path: Path) -> None:
    save_llama(tmp_path / "head", {})
    with pytest.raises(ConfigError, match="is no EAGLE-3 head"):
        open_loader(tmp_path, config(speculation=DRAFTING)).check_size()
