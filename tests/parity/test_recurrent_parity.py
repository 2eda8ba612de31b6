"""Models of transformers with recurrent layers on our cache, against themselves on their own.

Every row goes through chunks, shared steps, snapshots found by other rows, and preemption.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.batch_driver import CPU, BatchDriver, is_same
from support.captured import verified_steps
from support.kernel_levels import LEVELS
from support.recurrent_models import ALL, OWN_CACHES, RECURRENT, recurrent_model
from support.token_world import token_request
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.graphs.buckets import DecodeBuckets
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvLayout
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.llm.engine.fallback import FallbackBlueprint
from triptych.schedulers.tokens.prompt_lookup import LookupRule

PAGE_SIZE = 16
NUM_NEW = 64
NATIVE = (
    *("qwen3.5", "lfm2", "qwen3.5-moe", "qwen3-next", "lfm2-moe", "granite-hybrid", "bamba"),
    *("kimi-linear", "olmo-hybrid", "nemotron-h", "falcon-h1", "falcon-h1, with norms"),
)
OWN = tuple(OWN_CACHES)
EVERY_LEVEL = ("nemotron-h", "falcon-h1")


@pytest.fixture
def one_kernel(kernels_of: Callable[[str], NativeKernels]) -> NativeKernels:
    """The kernels of the highest level; layers are tested on every level."""
    return kernels_of(LEVELS[0])


OPTIONS = {"max_length": 512, "max_batch_size": 3, "max_batch_input_tokens": 90, "depth": 2}
Built = tuple[CausalModel, KvLayout]


def build(folder: Path, kind: Any, dtype: torch.dtype, **given: Any) -> Built:
    with Checkpoint.open(folder) as checkpoint:
        blueprint = kind(checkpoint.config, max_length=512, dtype=dtype, device=CPU, **given)
        model = blueprint.build(checkpoint, lambda _: None)
    return model, blueprint.kv_layout(PAGE_SIZE, dtype)


def driver(folder: Path, reference: Any) -> BatchDriver:
    reference.save_pretrained(folder)
    model, layout = build(folder, FallbackBlueprint, torch.float32)
    return BatchDriver(model, layout, None, num_pages=30, **OPTIONS)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 97, (length,), generator=generator).tolist())


@pytest.mark.parametrize("name", [name for name in RECURRENT if name != "olmo-hybrid"])
def test_tokens_through_every_path(tmp_path: Path, name: str) -> None:
    reference = recurrent_model(name)
    go_through_every_path(driver(tmp_path, reference), reference)


@pytest.mark.parametrize("name", NATIVE)
def test_tokens_of_our_decoder_through_every_path(
    tmp_path: Path, name: str, one_kernel: NativeKernels
) -> None:
    reference = recurrent_model(name)
    reference.save_pretrained(tmp_path)
    model, layout = build(tmp_path, NativeBlueprint, torch.float32, native=one_kernel)
    assert model._fused is not None
    go_through_every_path(
        BatchDriver(model, layout, one_kernel, num_pages=30, **OPTIONS), reference
    )


@pytest.mark.parametrize("name", OWN)
def test_tokens_with_the_cache_of_the_class_through_every_path(tmp_path: Path, name: str) -> None:
    """Windows and blocks are shorter than the prompt, and longer than some chunks."""
    reference = recurrent_model(name)
    reference.save_pretrained(tmp_path)
    built = build(tmp_path, FallbackBlueprint, torch.float32)
    engine = BatchDriver(*built, None, num_pages=10, **OPTIONS | {"max_batch_input_tokens": 20})
    go_through_every_path(engine, reference, length=90, num_new=10)


def go_through_every_path(
    engine: BatchDriver, reference: Any, *, length: int = 300, num_new: int = NUM_NEW
) -> None:
    long, num_shared = prompt(1, length), length * 2 // 3
    parted = long[:num_shared] + prompt(2, 20)
    prompts = {"a": long, "b": parted, "c": prompt(3, length // 4), "d": long}
    for job, ids in prompts.items():
        engine.submit(job, token_request(ids, max_tokens=num_new, temperature=0.0))
    engine.run()
    counters = engine.scheduler.stats().counters
    assert counters["preemptions_total"] > 0
    assert counters["cached_tokens_total"] >= num_shared
    for job, ids in prompts.items():
        check(engine, reference, job, ids, num_new)
    turn = long + answer(engine, "a") + prompt(4, 20)
    engine.submit("turn", token_request(turn, max_tokens=4, temperature=0.0))
    engine.run()
    check(engine, reference, "turn", turn, num_new=4)
    assert engine.deltas("turn")[-1].num_cached_tokens == (length + num_new - 1) // 16 * 16


class KnownDrafts:
    """The tokens that a text goes on with, every fifth one wrong."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids, self.num_tokens = token_ids, 0

    def take(self, token_ids: Sequence[int], num_rows: int) -> None:
        self.num_tokens += len(token_ids)

    def find(self, most: int, *_: object) -> tuple[int, ...]:
        first = self.num_tokens
        places = range(first, min(first + most, first + 1 + first % 4, len(self._token_ids)))
        return tuple((self._token_ids[place] + (place % 5 == 0)) % 97 for place in places)

    def settle(self, *_: object) -> None: ...


def drafts_of(known: dict[tuple[int, ...], tuple[int, ...]], request: TokenRequest) -> KnownDrafts:
    return KnownDrafts(known[request.prompt_ids])


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, NativeBlueprint) for name in NATIVE[:-1]] + [("qwen3.5", FallbackBlueprint)],
)
def test_drafts_change_no_token(
    tmp_path: Path, one_kernel: NativeKernels, name: str, kind: Any
) -> None:
    """Right and wrong ones, of rows that share steps, find snapshots and are preempted."""
    recurrent_model(name).save_pretrained(tmp_path)
    given = {"native": one_kernel} if kind is NativeBlueprint else {}
    model, layout = build(tmp_path, kind, torch.float32, **given)
    prompts = [prompt(1, length) for length in (90, 75, 60)]
    answers: list[tuple[int, ...]] = []
    for drafts in (False, True):
        rule = LookupRule(min_match=1, max_match=1, max_drafts=1) if drafts else None
        kernels, options = given.get("native"), {**OPTIONS, "depth": 1, "lookup_rule": rule}
        engine = BatchDriver(model, layout, kernels, num_pages=12, **options)
        known = {ids: ids + answer for ids, answer in zip(prompts, answers, strict=False)}
        if drafts:
            tokens = engine.scheduler.tokens
            tokens.drafting.lookup = partial(drafts_of, known)  # type: ignore[assignment]
        for job, ids in enumerate(prompts):
            sampling = {"temperature": 0.7, "seed": 5} if job == 1 else {"temperature": 0.0}
            engine.submit(str(job), token_request(ids, max_tokens=40, **sampling))
        engine.run()
        found = [answer(engine, str(job)) for job in range(3)]
        assert not answers or found == answers
        answers = found
    counters = engine.scheduler.stats().counters
    assert 10 < counters["accepted_draft_tokens_total"] < counters["draft_tokens_total"]
    assert counters["preemptions_total"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "is_slow"), [("mamba", True), ("mamba-2", False)])
def test_a_class_that_loses_a_state_of_small_effect_goes_on_one_by_one(
    tmp_path: Path, name: str, is_slow: bool, dtype: torch.dtype
) -> None:
    """As transformers begins Mamba's training, a lost state changes a token by a few hundredths."""
    family, extra = RECURRENT[name]
    kind, sizes = getattr(transformers, f"{family}Config"), ALL | extra
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(kind(**sizes)).to(dtype)
    model.save_pretrained(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        blueprint = FallbackBlueprint(checkpoint.config, max_length=512, dtype=dtype, device=CPU)
        built = blueprint.build(checkpoint, lambda _: None)
    assert built.recurrence.is_slow is is_slow


@pytest.mark.parametrize(
    ("name", "level"),
    [(name, LEVELS[0]) for name in NATIVE] + [*product(EVERY_LEVEL, LEVELS[1:])],
)
def test_logits_are_bitwise_those_of_a_row_alone(
    tmp_path: Path, name: str, level: str, kernels_of: Callable[[str], NativeKernels]
) -> None:
    """In chunks, next to others, after a prefix hit and after preemption; in bfloat16."""
    one_kernel = kernels_of(level)
    recurrent_model(name, torch.bfloat16).save_pretrained(tmp_path)
    model, layout = build(tmp_path, NativeBlueprint, torch.bfloat16, native=one_kernel)
    engine = BatchDriver(model, layout, one_kernel, num_pages=15, **OPTIONS)
    first = prompt(1, 150)
    prompts = {"a": first, "b": first[:100] + prompt(2, 9), "c": prompt(3, 33), "d": first}
    for job, ids in prompts.items():
        engine.submit(job, token_request(ids, max_tokens=30, temperature=0.0))
    engine.run()
    assert engine.scheduler.stats().counters["preemptions_total"] > 0
    assert engine.scheduler.stats().counters["cached_tokens_total"] > 0
    for job, ids in prompts.items():
        single = BatchDriver(
            *(model, layout, one_kernel), num_pages=30, enable_prefix_caching=False, max_length=512
        )
        single.submit(job, token_request(ids, max_tokens=30, temperature=0.0))
        single.run()
        assert engine.logits[job].keys() == single.logits[job].keys()
        for position, logits_V in single.logits[job].items():
            assert is_same(engine.logits[job][position], logits_V)


IN_BFLOAT16 = [
    *((name, FallbackBlueprint) for name in ("qwen3.5", "lfm2", "granite-hybrid", *OWN[:1])),
    *((name, NativeBlueprint) for name in ("granite-hybrid", "nemotron-h", "falcon-h1")),
    *((name, NativeBlueprint) for name in ("kimi-linear", "olmo-hybrid")),
]


@pytest.mark.parametrize(("name", "kind"), IN_BFLOAT16)
def test_it_errs_no_more_than_its_class_in_bfloat16(
    tmp_path: Path, name: str, kind: Any, one_kernel: NativeKernels
) -> None:
    model = recurrent_model(name, torch.bfloat16)
    model.save_pretrained(tmp_path)
    rounded = type(model).from_pretrained(tmp_path, dtype=model.dtype, attn_implementation="eager")
    native = {"native": one_kernel} if kind is NativeBlueprint else {}
    built = build(tmp_path, kind, torch.bfloat16, **native)
    engine = BatchDriver(*built, native.get("native"), num_pages=30, **OPTIONS)
    ids = prompt(1, 90 if name in OWN else 200)
    engine.submit("a", token_request(ids, max_tokens=20, temperature=0.0))
    engine.run()
    tokens = torch.tensor([(ids + answer(engine, "a"))[:-1]])
    ours_TV = torch.stack([*engine.logits["a"].values()]).float()
    with torch.inference_mode():
        theirs_TV = rounded(tokens).logits[0, len(ids) - 1 :].float()
        exact_TV = copy.deepcopy(rounded).float()(tokens).logits[0, len(ids) - 1 :]
    assert (ours_TV - exact_TV).norm() <= 1.5 * (theirs_TV - exact_TV).norm()


def answer(engine: BatchDriver, job: str) -> tuple[int, ...]:
    return tuple(token for delta in engine.deltas(job) for token in delta.token_ids)


def check(
    engine: BatchDriver, reference: Any, job: str, ids: tuple[int, ...], num_new: int = NUM_NEW
) -> None:
    """The job was given the reference's logits, and therefore its tokens."""
    tokens = ids + answer(engine, job)
    assert len(tokens) == len(ids) + num_new
    with torch.inference_mode():
        expected_TV = reference(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    found_TV = torch.stack(
        [engine.logits[job][position] for position in range(len(ids), len(tokens))]
    )
    torch.testing.assert_close(found_TV, expected_TV[len(ids) - 1 :], atol=2e-4, rtol=2e-4)
    assert expected_TV[len(ids) - 1 :].argmax(1).tolist() == list(tokens[len(ids) :])


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("name", NATIVE[:2])
def test_captured_steps_follow_the_slots_of_their_rows(
    tmp_path: Path, name: str, one_kernel: NativeKernels, *, has_kernels: bool
) -> None:
    recurrent_model(name).save_pretrained(tmp_path)
    native = one_kernel if has_kernels else None
    model, layout = build(tmp_path, NativeBlueprint, torch.float32, native=native)
    steps, backend = verified_steps()
    graphs = DecodeGraphs(steps, DecodeBuckets.choose(3, 512 // PAGE_SIZE))
    engines = [
        BatchDriver(model, layout, native, num_pages=30, graphs=each, **OPTIONS)
        for each in (graphs, None)
    ]
    for engine in engines:
        for job in range(7):
            ids = prompt(job, 20 + 9 * job)
            engine.submit(f"{job}", token_request(ids, max_tokens=5 + 7 * job, temperature=0.0))
        engine.run()
    assert backend.num_replays > 20
    captured, eager = engines
    for job in range(7):
        assert answer(captured, f"{job}") == answer(eager, f"{job}")
