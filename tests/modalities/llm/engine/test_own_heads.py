"""Models served with the layer that predicts further tokens, or with a DFlash draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from support.decoder_families import save_family
from support.driver import SchedulerDriver
from support.head_models import let_layers_add_nothing, save_dflash, save_mtp
from support.llm_loader import MIB, config
from support.shadow_drafts import FreeDrafts
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import ConfigError
from triptych.core.ledger import Ledger
from triptych.core.options.config import ModelOptions
from triptych.core.options.speculation import SpeculationOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.engine.loader import LlmLoader
from triptych.schedulers.base import LoadedModel


def load(folder: Path, ledger: Ledger, algorithm: str = "none") -> LoadedModel:
    """The model in `target`, with a draft in `draft` if there is one."""
    draft = folder / "draft"
    resolved = ResolvedModel(name="tiny", reference="x", folder=str(folder / "target"), digest="00")
    if algorithm == "dflash":
        resolved = structs.replace(resolved, draft=str(draft))
    options = SpeculationOptions(
        speculative_algorithm=algorithm, draft_model_path="x" if algorithm == "dflash" else ""
    )
    given = config(speculation=options)
    loaded = LlmLoader(resolved, given, Device.open("cpu"), ledger).load(lambda _: None)
    if algorithm != "none":
        loaded.scheduler.tokens.drafting.drafter.costs = FreeDrafts()
    return loaded


def answers(loaded: LoadedModel) -> list[tuple[int, ...]]:
    """Of a greedy and two seeded requests in company; the last two begin alike."""
    driver = SchedulerDriver(loaded.scheduler, loaded.runner, model="tiny", depth=2)
    for seed in range(3):
        sampling = SamplingParams(temperature=0.8 * (seed > 0), seed=seed, max_tokens=24)
        prompt = (*range(3, 28), 40 + seed // 2)
        driver.submit(str(seed), TokenRequest(prompt_ids=prompt, sampling=sampling))
    driver.run()
    return [
        tuple(token for delta in driver.payloads(job_id) for token in delta.token_ids)
        for job_id in driver.jobs
    ]


def drafted(folder: Path, algorithm: str) -> tuple[float, float]:
    """Drafted and accepted tokens; answers are those without drafts."""
    ledger = Ledger(256 * MIB)
    loaded = load(folder, ledger, algorithm)
    found = answers(loaded)
    counters = loaded.scheduler.stats().counters
    held = ledger.by_owner()
    assert held["tiny/draft-weights"] > 0
    kv = loaded.runner._draft.kv
    assert held["tiny/draft-kv"] == sum(x.untyped_storage().nbytes() for x in kv.tensors)
    loaded.close()
    assert ledger.by_owner() == {}
    plain = load(folder, ledger)
    assert answers(plain) == found
    plain.close()
    return counters["draft_tokens_total"], counters["accepted_draft_tokens_total"]


@pytest.mark.parametrize("agrees", [False, True])
@pytest.mark.parametrize(
    ("name", "algorithm"), [("glm-4.5", "mtp"), ("deepseek-v3", "nextn"), ("qwen3.5", "mtp")]
)
def test_a_predicting_layer_changes_no_token(
    tmp_path: Path, name: str, algorithm: str, agrees: bool
) -> None:
    save_mtp(tmp_path / "target", name)
    if agrees:
        let_layers_add_nothing(tmp_path / "target")
    num_drafted, num_accepted = drafted(tmp_path, algorithm)
    assert num_drafted > 20
    assert num_accepted == num_drafted if agrees else num_accepted < num_drafted


@pytest.mark.parametrize("agrees", [False, True])
def test_a_dflash_draft_changes_no_token(tmp_path: Path, agrees: bool) -> None:
    save_family(tmp_path / "target", "Qwen3", tie_word_embeddings=False)
    save_dflash(tmp_path / "draft")
    if agrees:
        let_layers_add_nothing(tmp_path / "target", has_one_token=True)
        let_layers_add_nothing(tmp_path / "draft")
    num_drafted, num_accepted = drafted(tmp_path, "dflash")
    assert num_drafted > 20
    assert num_accepted == num_drafted if agrees else num_accepted < num_drafted


def test_transformers_classes_leave_the_layer_out(tmp_path: Path) -> None:
    save_mtp(tmp_path / "target", "deepseek-v3")
    resolved = ResolvedModel(
        name="tiny", reference="x", folder=str(tmp_path / "target"), digest="00"
    )
    given = config(models=ModelOptions(model_impl="transformers"))
    loaded = LlmLoader(resolved, given, Device.open("cpu"), Ledger(256 * MIB)).load(lambda _: None)
    loaded.close()


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    save_family(tmp_path / "target", "Qwen3")
    with pytest.raises(ConfigError, match="--speculative-algorithm mtp: tiny has no layer that"):
        load(tmp_path, Ledger(256 * MIB), "mtp")
