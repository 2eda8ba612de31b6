"""Options that no model at hand reads."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

from triptych.core.errors import ConfigError
from triptych.core.options.config import Config, SpeechOptions
from triptych.core.options.relevance import check_in_process, check_relevance
from triptych.core.options.table import (
    Resolved,
    add_options,
    declared,
    parse,
    resolve_keywords,
    resolve_with_sources,
)


def _resolved(*argv: str, environ: dict[str, str] | None = None) -> Resolved:
    parser = argparse.ArgumentParser(prog="triptych serve", allow_abbrev=False)
    add_options(parser)
    return resolve_with_sources(parse(parser, argv), environ=environ or {})


def test_irrelevant_flags_are_refused_with_their_roles() -> None:
    resolved = _resolved("--audio-decoder", "/nope", "--chunk-size=7", "--teacache", "--port=1")
    with pytest.raises(ConfigError) as caught:
        check_relevance(resolved, ("chat",))
    assert caught.value.message.startswith(
        "--audio-decoder, --chunk-size are for speech models; --teacache is for image models. "
    )
    check_relevance(resolved, ("chat", "speech", "image"))


def test_keywords_are_refused_even_at_their_default() -> None:
    resolved = resolve_keywords({"chunk_size": (), "max_vision_cache_entries": 256, "threads": 1})
    with pytest.raises(ConfigError, match=r"^max_vision_cache_entries is for vision .*chunk_size"):
        check_relevance(resolved, ("chat",))


def test_irrelevant_shared_options_only_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "all.yaml"
    file.write_text("chunk_size: 7\nmax_length: 64\n")
    resolved = _resolved("--config-file", str(file), environ={"TRIPTYCH_TEACACHE": "on"})
    with caplog.at_level(logging.WARNING):
        check_relevance(resolved, ("chat",))
    (record,) = caplog.records
    assert record.getMessage() == (
        "without effect here: chunk_size (file all.yaml) is for speech models;"
        " TRIPTYCH_TEACACHE is for image models"
    )


def test_a_ready_configuration_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(speech=SpeechOptions(chunk_size=(7,)))
    with caplog.at_level(logging.WARNING):
        check_relevance(Resolved.of(config), ("chat",))
    assert "chunk_size (configuration) is for speech models" in caplog.text
    caplog.clear()
    check_relevance(Resolved.of(Config()), ("chat",))
    assert not caplog.records


def test_a_command_has_the_flags_of_its_models_alone() -> None:
    parser = argparse.ArgumentParser(prog="triptych chat", allow_abbrev=False)
    add_options(parser, roles=("chat",))
    text = parser.format_help()
    assert all((option.flag in text) == option.is_for(("chat",)) for option in declared().values())
    with pytest.raises(
        ConfigError, match=r"--no-teacache is not an option of .*: it is for image mod"
    ):
        parse(parser, ["--no-teacache"])


def test_what_is_about_a_server_is_refused_in_this_process() -> None:
    resolved = resolve_keywords({"port": 8000, "api_key": ("hush",), "threads": 1})
    with pytest.raises(ConfigError, match=r"^port, api_key are for `triptych serve`: "):
        check_in_process(resolved)
    check_in_process(resolve_keywords({"threads": 1, "max_upload_bytes": 2**20}))


def test_a_server_s_environment_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_PORT", "9000")
    check_in_process(resolve_with_sources())
