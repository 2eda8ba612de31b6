"""Which options of roles go together."""

import pytest

from triptych.core.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    PipelineOptions,
    ReplicaOptions,
)
from triptych.core.errors import ConfigError
from triptych.core.options.pipeline import PipelinePlan

_WHOLE = {"pipeline_role": "decode", "prefill_address": ("host:1",), "pipeline_key_file": "key"}


def _config(*, sections: dict[str, object] | None = None, **options: object) -> Config:
    pipeline = PipelineOptions(**_WHOLE | options)  # type: ignore[arg-type]
    return Config(pipeline=pipeline, **sections or {})  # type: ignore[arg-type]


def test_a_role_with_its_address_and_key_is_taken() -> None:
    assert not PipelinePlan.of(_config()).is_whole
    PipelinePlan.of(_config(pipeline_role="prefill"))
    PipelinePlan.of(_config(prefill_address=("host:1", "unix:/run/pages")))
    assert PipelinePlan.of(Config()).is_whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_address": ()}, "decode needs --prefill-address"),
        ({"pipeline_key_file": ""}, "and --pipeline-key-file"),
        ({"pipeline_role": "prefill", "prefill_address": ("a:1", "b:1")}, "listens on one"),
        ({"pipeline_role": "prefill_and_decode"}, "--prefill-address, --pipeline-key-file: for"),
        (
            {"pipeline_role": "prefill_and_decode", "prefill_address": ()},
            "^--pipeline-key-file: for engines of one role",
        ),
    ],
)
def test_what_is_missing_or_of_no_use_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelinePlan.of(_config(**options))


@pytest.mark.parametrize(
    ("sections", "flag"),
    [
        ({"device": DeviceOptions(tensor_parallel_size=2)}, "--tensor-parallel-size 2"),
        ({"cache": CacheOptions(enable_prefix_caching=False)}, "--no-enable-prefix-caching"),
        ({"replicas": ReplicaOptions(replicas="2")}, "--replicas 2"),
        ({"replicas": ReplicaOptions(ray_address="auto")}, "--ray-address auto"),
        ({"models": ModelOptions(load="first-use")}, "--load first-use"),
        ({"models": ModelOptions(idle_unload_s=60.0)}, "--idle-unload-s 60"),
    ],
)
def test_what_bars_a_role_is_named(sections: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--pipeline-role prefill does not go with {flag} yet"):
        PipelinePlan.of(_config(sections=sections, pipeline_role="prefill"))


def test_an_engine_that_decodes_may_load_its_model_late_and_unload_it() -> None:
    models = ModelOptions(load="first-use", idle_unload_s=60.0)
    PipelinePlan.of(_config(sections={"models": models}))
