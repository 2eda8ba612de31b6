"""The model that drafts: its memory, its vocabulary, and what it is refused for."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from support.llm_loader import MIB, config, save_llama
from support.text_models import byte_tokenizer
from triptych.core.errors import ConfigError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, DeviceOptions, SpeculationOptions
from triptych.core.options.together import check_together
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.draft_runner import DraftingRunner
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.engine.loader import LlmLoader

DRAFTING = SpeculationOptions(speculative_algorithm="standalone", draft_model_path="x")


def open_loader(folder: Path, ledger: Ledger, options: Config, *special: str) -> LlmLoader:
    """The loader of a tiny model with another one that drafts, which has `special` tokens."""
    resolved = ResolvedModel(name="tiny", reference="x", folder=str(folder / "target"), digest="00")
    for name, tokens in (("target", ("<a>",)), ("small", special or ("<a>",))):
        (folder / name).mkdir()
        save_llama(folder / name, {})
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens(list(tokens))
        tokenizer.save(str(folder / name / "tokenizer.json"))
    resolved = structs.replace(resolved, draft=str(folder / "small"))
    return LlmLoader(resolved, options, Device.open("cpu"), ledger)


def test_its_memory_is_in_the_ledger_and_given_back(tmp_path: Path) -> None:
    ledger = Ledger(256 * MIB)
    loaded = open_loader(tmp_path, ledger, config(speculation=DRAFTING)).load(lambda _: None)
    assert isinstance(loaded.runner, DraftingRunner)
    held = ledger.by_owner()
    kv, pool = loaded.runner._draft._kv, loaded.scheduler.tokens.drafting.drafter.pool
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kv.tensors)
    assert held["tiny/draft-kv"] == num_bytes > 0
    assert kv.num_pages == pool.num_pages + 1
    assert held["tiny/draft-weights"] == held["tiny/weights"]
    loaded.close()
    assert ledger.by_owner() == {}


def test_its_pages_take_no_more_than_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triptych.modalities.llm.engine.draft_loader._CACHE_SHARE", 1e-9)
    loader = open_loader(tmp_path, Ledger(256 * MIB), config(speculation=DRAFTING))
    loaded = loader.load(lambda _: None)
    assert loaded.scheduler.tokens.drafting.drafter.pool.num_pages == 1
    assert "tiny: small drafts for texts of up to" in caplog.text
    loaded.close()


@pytest.mark.parametrize(("tokens", "fits"), [(("<a>", "<b>"), True), (("<b>",), False)])
def test_a_token_means_one_text_in_both(
    tmp_path: Path, tokens: tuple[str, ...], fits: bool
) -> None:
    model = open_loader(tmp_path, Ledger(256 * MIB), config(speculation=DRAFTING), *tokens)
    if fits:
        model.check_size()
    else:
        with pytest.raises(ConfigError, match="small and tiny differ in 1 tokens; name a model"):
            model.check_size()


def test_a_divided_model_takes_none(tmp_path: Path) -> None:
    options = config(speculation=DRAFTING, device=DeviceOptions(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="tiny is divided"):
        open_loader(tmp_path, Ledger(256 * MIB), options).check_size()


@pytest.mark.parametrize(
    ("algorithm", "path", "error"),
    [("standalone", "", "needs --draft-model-path"), ("ngram", "x", "takes effect with")],
)
def test_the_model_and_its_use_come_together(algorithm: str, path: str, error: str) -> None:
    options = SpeculationOptions(speculative_algorithm=algorithm, draft_model_path=path)
    with pytest.raises(ConfigError, match=error):
        check_together(Config(speculation=options))
