"""What the cases for a GPU find: disagreements, crashes and delays; and a few on an absent GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.dry_run import DryRun
from support.fake_cuda import CUDA, FakeCuda
from support.samples import SAMPLES, importing_samples
from support.tiers import first, nightly
from triptych.core.bundle.resolve import resolve_all
from triptych.core.engine_api.tokens import TokenDelta, TokenLogprob
from triptych.core.ledger import Ledger
from triptych.core.options.table import make_config
from triptych.core.process.lazy import load
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.progress import SilentProgress
from triptych.modalities import registry
from triptych.modalities.modality import modality_of

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _modules_of_the_kit() -> Iterator[None]:
    with importing_samples(SAMPLES / "gpu"):
        yield


def row(*tokens: tuple[int, float], other: int = 9, gap: float = 1.0) -> list[TokenDelta]:
    """A row whose reference finds `other` less likely by `gap`."""
    return [
        TokenDelta(
            token_ids=(token,),
            logprobs=(TokenLogprob(token, value, ((token, value), (other, value - gap))),),
        )
        for token, value in tokens
    ]


WANTED = row((4, -0.5), (5, -2.0), (6, -1.0))


def test_rows_that_are_equal_or_part_where_two_tokens_are_as_likely() -> None:
    from agreement import same_tokens

    assert same_tokens([WANTED], [WANTED], 0.01) == {"tokens": 3, "parted": 0, "logprobs": 0.0}
    even = row((4, -0.5), (5, -2.0), (6, -1.0), other=7, gap=0.001)
    got = row((4, -0.5), (5, -2.0), (7, -1.0), other=6, gap=0.001)
    assert same_tokens([got], [even], 0.01)["parted"] == 1


@pytest.mark.parametrize(
    "got",
    [
        row((4, -0.5), (9, -2.0), (6, -1.0)),
        row((4, -0.5), (3, -2.0), (6, -1.0)),
        row((4, -0.5), (5, -2.4), (6, -1.0)),
        row((4, -0.5), (5, float("nan")), (6, -1.0)),
        row((4, -0.5), (5, -2.0)),
    ],
    ids=["less likely", "unlikely", "other values", "nan", "short"],
)
def test_rows_that_differ(got: list[TokenDelta]) -> None:
    from agreement import Disagreement, same_tokens

    with pytest.raises(Disagreement):
        same_tokens([got], [WANTED], 0.01)


def test_an_error_is_a_share_of_the_spread() -> None:
    from agreement import Disagreement, share_apart

    assert share_apart([1.0, 3.1], [1.0, 3.0]) == pytest.approx(0.1 / 2**0.5)
    for got, wanted in (([1.0], [1.0, 2.0]), ([1.0, 1.0], [2.0, 2.0])):
        with pytest.raises(Disagreement):
            share_apart(got, wanted)


def test_a_type_of_fewer_bits_may_err_as_far_as_on_a_cpu() -> None:
    from agreement import Disagreement, share_apart
    from model_case import in_type

    def ask(device_error: float) -> Any:
        def answers(*, is_reference: bool = False, dtype: str) -> list[float]:
            error = 0.0 if dtype == "float32" else 0.1 if is_reference else device_error
            return [0.0, 1.0 + error]

        return answers

    measure: Any = share_apart
    assert in_type(measure)(ask(0.14))["gpu"] == pytest.approx(0.28 / 2**0.5)
    with pytest.raises(Disagreement, match=r"^gpu: "):
        in_type(measure)(ask(0.2))


CASES = """
import os, time
from model_case import DirectCase, must

CASES = (
    DirectCase("good", lambda bench: {"pid": os.getpid()}),
    DirectCase("slow", lambda bench: time.sleep(600)),
    DirectCase("wrong", lambda bench: must(False, "not so")),
    DirectCase("dead", lambda bench: os._exit(7)),
    DirectCase("unusable", lambda bench: must(False, "CUDA error: an illegal memory access")),
    DirectCase("later", lambda bench: {"pid": os.getpid()}),
)
"""


def test_a_case_that_crashes_or_hangs_ends_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import workers
    from place import Place

    (tmp_path / "few_cases.py").write_text(CASES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(workers, "MAX_PROCESSES", 1)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    place = Place(torch.device("cpu"), False, scratch, time.monotonic() + 150)
    found = {each["name"]: each for each in workers.run_cases(place, ("few_cases", "absent"), 3.0)}
    assert found.keys() == {"absent", "good", "slow", "wrong", "dead", "unusable", "later"}
    errors = {name: each["error"] for name, each in found.items()}
    assert "No module named 'absent'" in errors["absent"]
    assert errors["good"] is None
    assert errors["later"] is None
    assert errors["slow"] == "stopped at its time limit"
    assert errors["wrong"].endswith("Disagreement: not so")
    assert errors["dead"] == "its process died with code 7"
    assert found["good"]["figures"]["pid"] != found["later"]["figures"]["pid"]


@pytest.mark.parametrize(
    ("module", "name", "kernels"),
    [
        *first(
            [
                ("modality_text", "chat, llama, float32", {"paged_prefill", "penalized"}),
                ("modality_text", "chat, qwen3-next, float32", {"delta_rule", "short_conv"}),
                ("modality_text", "chat, moe, fp8 in squares, bfloat16", {"packed_moe_mlp"}),
                ("modality_text", "chat, llama, awq, bfloat16", {"gptq_linear"}),
                ("modality_text", "chat, moe, awq, bfloat16", {"packed_moe_mlp", "gptq_linear"}),
                ("modality_text", "chat, deepseek-v3.2, float32", {"latent_decode", "score_keys"}),
            ],
            2,
        ),
        ("modality_sight", "embeddings, bert", set()),
        nightly("modality_sight", "vision, gemma3, float32", {"paged_prefill", "gated"}),
        ("modality_images", "images, Flux 256 wide, adapters, bfloat16", {"lora_add"}),
        nightly("modality_images", "images, Flux 256 wide, bfloat16, q4_k", {"gguf_linear"}),
    ],
)
def test_cases_run_through_on_an_absent_gpu(
    tmp_path: Path, module: str, name: str, kernels: set[str]
) -> None:
    """Rows with grammars are left out: what compiles them does not wait for a driver by hand."""
    from workers import cases_of

    case: Any = next(each for each in cases_of(module) if each.name == name)
    folder = tmp_path / "model"
    folder.mkdir()
    case.write(folder)
    waves = case.requests(folder)
    dtype = "bfloat16" if "bfloat16" in name else "float32"
    given = {"model": (f"model={folder}",), "cache_dir": str(tmp_path / "cache"), "dtype": dtype}
    config = make_config({**given, **case.options, **case.more(folder)})
    (model,) = resolve_all(config.models, SilentProgress())
    opener = load(modality_of(model, registry.MODALITIES).engine)
    with FakeCuda() as gpu:
        ledger = Ledger(2**34)
        loaded = opener(model, config, Device(CUDA), ledger).load(lambda done: None)
        run = DryRun(gpu, loaded, ledger)
        run.depth = 2
        for number, wave in enumerate(waves):
            plain = [each for each in wave if not getattr(each, "grammar", "")]
            for place, request in enumerate(plain):
                run.submit(f"{number}-{place}", request)
            run.end_well()
    assert gpu.kernels >= kernels
    assert gpu.faults == []
