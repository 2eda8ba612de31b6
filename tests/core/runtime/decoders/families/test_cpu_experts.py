"""Mixtures that are computed on a CPU alone go to transformers on a GPU."""

from __future__ import annotations

import pytest
import torch
import transformers

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.families.table import is_native
from triptych.core.runtime.decoders.native import NativeBlueprint


@pytest.mark.parametrize(("kind", "is_native_there"), [("NemotronH", False), ("GptOss", True)])
def test_a_mixture_on_a_gpu(kind: str, is_native_there: bool) -> None:
    config = getattr(transformers, f"{kind}Config")().to_dict()
    config["architectures"] = [f"{kind}ForCausalLM"]
    assert is_native(config)
    assert is_native(config, on_gpu=True) is is_native_there
    options = {"max_length": 64, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    if is_native_there:
        assert NativeBlueprint(config, **options).max_length == 64
    else:
        with pytest.raises(WeightsError, match="--model-impl transformers"):
            NativeBlueprint(config, **options)
