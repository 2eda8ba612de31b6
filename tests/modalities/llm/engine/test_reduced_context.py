"""A context that does not fit is reduced to what does, unless the user named one."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from support.llm_loader import MIB, config, loader, save_llama
from triptych.core.errors import ModelTooLarge
from triptych.core.ledger import Ledger
from triptych.core.options.config import ModelOptions

OWN = 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose context takes 256 MiB of cache."""
    save_llama(tmp_path, {})
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": OWN}))
    return tmp_path


@pytest.mark.parametrize("is_checked", [True, False])
def test_the_context_is_what_fits(
    folder: Path, caplog: pytest.LogCaptureFixture, is_checked: bool
) -> None:
    ledger = Ledger(64 * MIB)
    loading = loader(folder, ledger, config())
    with caplog.at_level(logging.WARNING):
        if is_checked:
            loading.check_size()
        loaded = loading.load(lambda _: None)
    assert 512 <= loaded.reduced_context < OWN
    assert [each.args for each in caplog.records if "reduced" in each.msg] == [
        ("tiny", loaded.reduced_context)
    ]
    pool = loaded.scheduler.tokens.pool  # type: ignore[attr-defined]
    assert pool.num_pages * pool.page_size == loaded.reduced_context
    named = replace(config(), models=ModelOptions(max_length=loaded.reduced_context + 99))
    with pytest.raises(ModelTooLarge, match="Give --max-length"):
        loader(folder, Ledger(64 * MIB), named).load(lambda _: None)
    loaded.close()
    ledger.check()
    assert not ledger.by_owner()


def test_a_useless_context_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.core.runtime.engine.loader._LEAST_CONTEXT", OWN)
    with pytest.raises(ModelTooLarge, match="can never fit with its context"):
        loader(folder, Ledger(64 * MIB), config()).load(lambda _: None)
