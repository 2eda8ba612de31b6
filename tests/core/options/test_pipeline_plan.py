"""Which options of roles go together."""

from __future__ import annotations

import argparse

import pytest

from triptych.core.errors import ConfigError
from triptych.core.options.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    PipelineOptions,
    ReplicaOptions,
)
from triptych.core.options.pipeline_plan import PipelinePlan
from triptych.core.options.relevance import check_relevance
from triptych.core.options.table import resolve_with_sources

_MEETING = {"prefill": "prefill_address", "decode": "prefill_address", "encode": "encoder_address"}


def _config(role: str, *, sections: dict[str, object] | None = None, **options: object) -> Config:
    """An engine of a role with what it needs, but for what is given."""
    needed: dict[str, object] = {"pipeline_key_file": "key"}
    if role in _MEETING:
        needed[_MEETING[role]] = ("host:1",)
    given = needed | {"pipeline_role": role} | options
    return Config(pipeline=PipelineOptions(**given), **sections or {})  # type: ignore[arg-type]


def test_a_role_with_its_address_and_key_is_taken() -> None:
    for role in _MEETING:
        PipelinePlan.of(_config(role))
    PipelinePlan.of(_config("decode", prefill_address=("host:1", "unix:/run/pages")))
    PipelinePlan.of(Config())


@pytest.mark.parametrize("role", ["prefill_and_decode", "prefill", "decode"])
def test_any_engine_but_an_encoder_may_have_images_encoded_elsewhere(role: str) -> None:
    plan = PipelinePlan.of(_config(role, encoder_address=("host:2", "host:3")))
    assert plan.fetches_features
    assert plan.features.addresses == ("host:2", "host:3")
    assert not PipelinePlan.of(_config("encode")).fetches_features


@pytest.mark.parametrize(
    ("role", "options", "message"),
    [
        ("decode", {"prefill_address": ()}, "decode needs --prefill-address"),
        ("decode", {"pipeline_key_file": ""}, "decode needs --pipeline-key-file"),
        ("encode", {"encoder_address": ()}, "encode needs --encoder-address"),
        ("prefill", {"prefill_address": ("a:1", "b:1")}, "--prefill-address: .* listens on one"),
        ("encode", {"encoder_address": ("a:1", "b:1")}, "--encoder-address: .* listens on one"),
        ("prefill_and_decode", {"prefill_address": ("a:1",)}, "^--prefill-address: for engines"),
        ("encode", {"prefill_address": ("a:1",)}, "^--prefill-address: for engines"),
        ("prefill_and_decode", {}, "^--pipeline-key-file: this engine connects to no other"),
        (
            "prefill_and_decode",
            {"encoder_address": ("a:1",), "pipeline_key_file": ""},
            "^--encoder-address needs --pipeline-key-file",
        ),
        (
            "decode",
            {"encoder_address": ("a:1",), "prefill_address": ()},
            "decode needs --prefill-address",
        ),
        ("decode", {"encoder_timeout_s": 3.0}, "^--encoder-timeout-s 3: .* no --encoder-address"),
        ("encode", {"prefill_timeout_s": 3.0}, "^--prefill-timeout-s 3: .* no --prefill-address"),
    ],
)
def test_what_is_missing_or_of_no_use_is_named(
    role: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelinePlan.of(_config(role, **options))


@pytest.mark.parametrize(
    ("sections", "flag", "roles"),
    [
        (
            {"device": DeviceOptions(tensor_parallel_size=2)},
            "--tensor-parallel-size 2",
            {"prefill", "decode", "encode"},
        ),
        (
            {"cache": CacheOptions(enable_prefix_caching=False)},
            "--no-enable-prefix-caching",
            {"prefill", "decode"},
        ),
        (
            {"replicas": ReplicaOptions(replicas="2")},
            "--replicas 2",
            {"prefill", "decode", "encode"},
        ),
        (
            {"replicas": ReplicaOptions(ray_address="auto")},
            "--ray-address auto",
            {"prefill", "decode", "encode"},
        ),
        (  # one that decodes may load its model late, and unload it
            {"models": ModelOptions(load="first-use")},
            "--load first-use",
            {"prefill", "encode"},
        ),
        (
            {"models": ModelOptions(idle_unload_s=60.0)},
            "--idle-unload-s 60",
            {"prefill", "encode"},
        ),
    ],
)
def test_what_bars_a_role_is_named(sections: dict[str, object], flag: str, roles: set[str]) -> None:
    for role in _MEETING:
        config = _config(role, sections=sections)
        if role in roles:
            message = f"--pipeline-role {role} cannot be combined with {flag} yet"
            with pytest.raises(ConfigError, match=message):
                PipelinePlan.of(config)
        else:
            PipelinePlan.of(config)


def test_an_encoder_is_of_no_use_to_models_that_do_not_see() -> None:
    args = argparse.Namespace(encoder_address=["host:1"], encoder_timeout_s=3.0)
    resolved = resolve_with_sources(args)
    given = r"--encoder-address.* --encoder-timeout-s.* vision models"
    with pytest.raises(ConfigError, match=given):
        check_relevance(resolved, {"chat"})
    check_relevance(resolved, {"chat", "vision"})
