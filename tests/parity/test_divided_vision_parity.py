"""A model that sees, divided over ranks, tower and decoder: logits are those of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from support.decoder_rig import CPU
from support.kernel_levels import LEVELS
from support.rank_threads import PlanQueue, following_runner, lead_and_follow
from support.tiers import among
from support.vision_models import MODELS, pixels, save_model
from support.vision_rig import VisionRig, VisionRow
from triptych.core.engine_api.plan import Runner
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.engine.rank_sampler import FollowingSampler
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.vlm.engine.blueprint import VisionBlueprint
from triptych.modalities.vlm.engine.encoder import open_cache
from triptych.modalities.vlm.engine.head import VisionHead
from triptych.modalities.vlm.engine.runner import VisionRunner
from triptych.modalities.vlm.engine.step_features import FollowingFeatures
from triptych.modalities.vlm.plan import SharedPlan

FAMILIES = [name for name in MODELS if not name.startswith("qwen3_5")]
TOWERS = {*FAMILIES} - {"llava_next", "mistral3", "qwen2_vl", "smolvlm"}
"""A family of each tower."""
HELLO, THEN, WHAT = (1, 5, 9, 12), (13, 14), (20, 21, 22)


def drive(rig: VisionRig) -> list[VisionRow]:
    """Images of two sizes in one batch, and text beside them where the family allows it."""
    rows = [
        rig.look(HELLO, pixels(40, 60, 1), WHAT),
        rig.look(pixels(20, 24, 3), THEN, pixels(90, 30, 2), WHAT),
    ]
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=3)
    return rows


def drive_divided(
    folder: Path, num_ranks: int, native: NativeKernels | None = None
) -> list[VisionRow]:
    def lead(ranks: PlanQueue) -> list[VisionRow]:
        return drive(VisionRig(folder, ranks=ranks, native=native))

    def follow(group: RankGroup) -> Runner:
        with Checkpoint.open(folder) as checkpoint:
            blueprint = VisionBlueprint(
                checkpoint, max_length=0, dtype=torch.float32, device=CPU, native=native
            )
            blueprint.text.join(group)
            assert blueprint.share_encoder(group)
            decoder, encoder = blueprint.build(lambda _: None)
        features = FollowingFeatures(group, blueprint.feature_layout, CPU)
        sampler = FollowingSampler(group)
        head_type = partial(VisionHead, decoder, sampler, features, blueprint.traits)
        layout = blueprint.text.kv_layout(4, torch.float32)
        tokens = following_runner(head_type, layout, max_length=256, native=native)
        return VisionRunner(tokens, encoder, open_cache(0, 0), CPU, tokens.stream)

    return lead_and_follow(num_ranks, lead, follow, SharedPlan)


def assert_same(found: list[VisionRow], expected: list[VisionRow]) -> None:
    for row, wanted in zip(found, expected, strict=True):
        assert row.tokens == wanted.tokens
        for position, logits_V in row.logits.items():
            torch.testing.assert_close(logits_V, wanted.logits[position], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", among(FAMILIES, TOWERS))
def test_two_ranks_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    assert_same(drive_divided(tmp_path, 2), drive(VisionRig(tmp_path)))


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_a_head_for_two_of_three_ranks_stays_whole(family: str, tmp_path: Path) -> None:
    """The towers' MLPs are divided all the same."""
    save_model(family, tmp_path)
    assert_same(drive_divided(tmp_path, 3), drive(VisionRig(tmp_path)))


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_on_the_native_kernels(
    family: str, tmp_path: Path, kernels_of: Callable[[str | None], NativeKernels]
) -> None:
    save_model(family, tmp_path)
    native = kernels_of(LEVELS[0])
    assert_same(drive_divided(tmp_path, 2, native), drive(VisionRig(tmp_path, native=native)))
