"""What the ranks beside rank 0 make of its plans, and who shares what with whom."""

from __future__ import annotations

import msgspec

from support.rank_threads import on_ranks
from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.plan import RankPlan
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.modalities.diffusion.engine.parallel.division import Division, follower_plan
from triptych.modalities.diffusion.plan import DenoisePlan, ImageKey, ImageRow, ImageStart
from triptych.modalities.diffusion.wire import AdapterUse, ImageRequest, StepCache

KEYS = (ImageKey("a", 0), ImageKey("b", 1))


def plan(kind: str, **fields: object) -> DenoisePlan:
    return DenoisePlan(step_id=3, model="m", kind=kind, **fields)  # type: ignore[arg-type]


def received(sent: DenoisePlan) -> DenoisePlan:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=DenoisePlan)


def test_a_plan_reaches_a_rank_as_it_was_made() -> None:
    request = ImageRequest(
        prompt="a red apple",
        cache=StepCache(name="taylorseer", interval=3),
        adapters=(AdapterUse("ink", 0.5),),
        sources=(Pixels(width=1, height=2, rgb=b"\x00" * 6),),
    )
    rows = tuple(ImageRow(key=key, num_steps=2) for key in KEYS)
    for sent in (
        plan("encode", starts=(ImageStart(key=KEYS[0], request=request),)),
        plan("denoise", rows=rows, dropped=KEYS[:1]),
    ):
        assert received(sent) == sent
        assert follower_plan(sent) == RankPlan(sent)


def test_it_generates_neither_previews_nor_images() -> None:
    shown = plan("denoise", rows=(ImageRow(key=KEYS[0], num_steps=1, has_preview=True),))
    assert follower_plan(shown).plan == plan("denoise", rows=(ImageRow(key=KEYS[0], num_steps=1),))
    finished = plan("decode", rows=(ImageRow(key=KEYS[1]),), dropped=KEYS[:1])
    assert follower_plan(finished) == RankPlan(plan("release", dropped=KEYS), is_shared=False)


def test_neighbours_share_tokens_and_the_others_branches() -> None:
    def work(group: RankGroup) -> tuple[int, int, int]:
        division = Division.of(group, 2)
        assert division.branches is not None
        assert division.tokens is not None
        return group.rank, division.tokens.rank, division.branches.group.rank

    assert on_ranks(4, work) == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
