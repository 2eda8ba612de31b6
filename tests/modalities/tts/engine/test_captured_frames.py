"""Captured frames: forward passes and samples of models whose steps are frames, as without."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.captured import CountingCalls, verified_steps
from support.decoder_rig import GREEDY
from support.frame_rig import FrameRecorder, FrameRig
from support.speech_models import csm, higgs, setup_of
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.graphs.buckets import DecodeBuckets
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.engine.frame_head import FrameHead
from triptych.modalities.tts.engine.models.csm import CsmBlueprint
from triptych.modalities.tts.engine.models.higgs import HiggsBlueprint

NUM_ROWS = 7
SAMPLING = (
    GREEDY,
    SamplingParams(seed=1, temperature=0.9),
    SamplingParams(seed=2, temperature=1.1, top_k=5, top_p=0.9),
    SamplingParams(seed=3, min_p=0.1),
)
FAMILIES: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "csm": (csm, CsmBlueprint),
    "higgs": (higgs, HiggsBlueprint),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    save, blueprint = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save(folder)

    def load() -> Any:
        with Checkpoint.open(folder) as checkpoint:
            return blueprint(checkpoint.config, setup_of(folder)).build(checkpoint, lambda _: None)

    return load


def rig_of(model: Any, *, captures: bool) -> tuple[FrameRig, CountingCalls]:
    stack = model.backbone if hasattr(model, "backbone") else model.words
    steps, backend = verified_steps()
    buckets = DecodeBuckets.choose(NUM_ROWS, 24)

    class OwnRig(FrameRig):
        head_type = partial(FrameHead, graphs=steps if captures else None)

    rig = OwnRig(
        model,
        stack.config.kv_layout(4, stack.dtype),
        max_batch_size=NUM_ROWS,
        recorder=partial(FrameRecorder, logits=model.head, vocab_size=32),
        graphs=DecodeGraphs(steps, buckets) if captures else None,
    )
    return rig, backend


def spoken(rig: FrameRig) -> list[list[tuple[int, ...]]]:
    """Frames of rows that join one after the other, and are sampled each in its own way."""
    chance, rows = random.Random(4), []
    for step in range(24):
        if step % 4 == 0:
            words = tuple(chance.randrange(3, 29) for _ in range(1 + step % 9))
            rows.append(rig.open(words, SAMPLING[len(rows) % len(SAMPLING)]))
            rig.prefill(rows[-1])
        chosen = chance.sample(rows, chance.randint(1, len(rows)))
        rig.decode(*chosen)
    return [row.frames for row in rows]


def test_frames_are_the_same(family: Callable[[], Any]) -> None:
    captured, backend = rig_of(family(), captures=True)
    eager, _ = rig_of(family(), captures=False)
    heard, wanted = spoken(captured), spoken(eager)
    assert heard == wanted
    assert sum(map(len, wanted)) > 40
    assert backend.num_replays == 24 + 24 + 6  # forward passes, and samples of prompts, too
