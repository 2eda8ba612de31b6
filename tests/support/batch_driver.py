"""A model with batch mates: the real scheduler, runner and sampler, turned by hand in virtual time.

`BatchDriver` keeps every row of logits that a token was sampled from, by job and position. `alone`
is what it is compared with: one request, its prompt in one piece, nothing cached.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from support.driver import SchedulerDriver
from support.schedules import schedule_of
from support.shadow_drafts import draft_model
from triptych.core.engine_api.plan import DraftPlan, Plan, StepResult, TokenPlan
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import TriptychError
from triptych.core.kv.pages import PagePool
from triptych.core.kv.windows import WindowSize
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.decoders.heads.eagle import EagleHead
from triptych.core.runtime.engine.cache_size import CacheSize
from triptych.core.runtime.engine.draft_runner import DraftingRunner
from triptych.core.runtime.engine.head_tokens import HeadTokens
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.engine.token_runner import TokenRunner
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.altup_layer import AltUpLayer
from triptych.core.runtime.layers.attention import KvCache, KvLayout
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig, DecoderLayer
from triptych.core.runtime.layers.delta_net import GatedDeltaNet
from triptych.core.runtime.layers.hidden_rows import HiddenShape
from triptych.core.runtime.layers.latent_attention import LatentAttention
from triptych.core.runtime.sampling.sampler import SampledTokens, Sampler
from triptych.schedulers.tokens.draft_model import DraftModel
from triptych.schedulers.tokens.prompt_lookup import LookupRule
from triptych.schedulers.tokens.scheduler import TokenScheduler

CPU = torch.device("cpu")
MODEL = "model"
MAX_LENGTH = 160


def random_decoder(
    config: DecoderConfig,
    dtype: torch.dtype,
    native: NativeKernels | None,
    layer_scale: float = 1.0,
) -> Decoder:
    """A decoder of random weights whose activations neither fade nor grow.

    With a small `layer_scale` its layers add little.
    """
    decoder, source = Decoder(config, dtype=dtype, device=CPU), torch.Generator().manual_seed(3)

    def fill(tensor: torch.Tensor | None, mean: float, std: float) -> None:
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=source) * std + mean)

    for linear in decoder.linears():
        scale = layer_scale ** (linear.num_outputs == config.hidden_size)
        fill(linear.weight_OI, 0.0, scale * linear.weight_OI.shape[1] ** -0.5)
        fill(linear.bias_O, 0.0, 0.3)
    for weight in _norms(decoder):
        fill(weight, 1.0 - config.has_centred_norms, 0.2)
    for layer in decoder.layers:
        for tensor, mean, std in _own_tensors(layer):
            fill(tensor, mean, std)
    if decoder.layer_inputs is not None:
        fill(decoder.layer_inputs.table.weight_OI, 0.0, 1.0)
    if not config.has_tied_embeddings:
        fill(decoder.embedding.weight_OI, 0.0, 1.0)
    decoder.prepare(native)
    return decoder


def _own_tensors(layer: DecoderLayer) -> Iterator[tuple[torch.Tensor | None, float, float]]:
    """The tensors of a layer that are neither projections nor norms over the hidden size."""
    yield layer.scale_1, 0.8, 0.1
    yield getattr(layer.attention, "sinks_H", None), 0.0, 1.0
    if isinstance(layer, AltUpLayer):
        part = layer.altup
        for tensor in (part.router_NC, part.predict_SN, part.correct_NN, part.scale_C):
            yield tensor, 0.0, 0.5
    if isinstance(net := layer.attention, GatedDeltaNet):
        for tensor in (net.convolution_X1K, net.decay_log_H, net.dt_bias_X, net.norm_E):
            yield tensor, 0.0, 0.5
    if isinstance(latents := layer.attention, LatentAttention):
        yield latents.kv_norm.weight_C, 1.0, 0.2


def _norms(decoder: Decoder) -> Iterator[torch.Tensor | None]:
    norms = [decoder.norm]
    if decoder.layer_inputs is not None:
        norms.append(decoder.layer_inputs.norm)
    for layer in decoder.layers:
        norms += layer.norms
        if isinstance(layer, AltUpLayer):
            norms += [layer.altup.router_norm, layer.altup.laurel.norm]
        if (heads := getattr(layer.attention, "norm", None)) is not None:
            yield from (heads.query, heads.key)
    for norm in norms:
        yield from norm.parameters.values()


class LogitsKeeper(Sampler):
    """A sampler that remembers what it was given since it was last asked: slot, position, row."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._given: list[tuple[int, int, torch.Tensor]] = []

    def sample(
        self,
        logits_BV: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        allowed: Sequence[bytes] = (),
        drafts: Sequence[int] = (),
        relaxed: Sequence[bool] = (),
    ) -> SampledTokens:
        self._given += zip(slots, positions, logits_BV.clone(), strict=True)
        return super().sample(logits_BV, slots, positions, allowed, drafts, relaxed)

    def take(self) -> list[tuple[int, int, torch.Tensor]]:
        given, self._given = self._given, []
        return given


class Drafts(NamedTuple):
    """Drafts of a job from position `first` on, and the logits of each."""

    job_id: str
    first: int
    token_ids: tuple[int, ...]
    logits: list[torch.Tensor]


class BatchDriver(SchedulerDriver):
    """Jobs of one model, up to `depth` steps in flight. Fresh pages and states hold NaN."""

    def __init__(
        self,
        model: CausalModel,
        layout: KvLayout,
        native: NativeKernels | None,
        *,
        num_pages: int,
        enable_prefix_caching: bool = True,
        depth: int = 1,
        graphs: DecodeGraphs | None = None,
        max_length: int = MAX_LENGTH,
        num_snapshots: int = 12,
        lookup_rule: LookupRule | None = None,
        draft: CausalModel | EagleHead | None = None,
        windows: WindowSize | None = None,
        **options: Any,
    ) -> None:
        schedule, head = schedule_of(**options), draft if isinstance(draft, EagleHead) else None
        if head is not None:
            layout = replace(
                layout, hidden=HiddenShape(head.config.layer.hidden_size, layout.dtype)
            )
        num_slots = schedule.max_batch_size
        self.pool = PagePool(
            num_pages=num_pages,
            page_size=layout.page_size,
            enable_prefix_caching=enable_prefix_caching,
            num_snapshots=num_snapshots if layout.states else None,
            windows=windows,
        )
        scheduler = TokenScheduler(
            model=MODEL, pool=self.pool, options=schedule, max_length=max_length, namespace=b"w"
        )
        scheduler.tokens.drafting.lookup_rule = lookup_rule
        self.drafter: DraftModel | None = None
        size = CacheSize(num_pages, num_slots, num_snapshots, windows)
        if graphs is not None:
            size = size.with_padding()
        kv = KvCache(
            *(size.layout_of(layout), size.num_pages, CPU, native),
            num_slots=size.num_slots + (0 if lookup_rule is None else num_slots),
            num_snapshots=num_snapshots,
        )
        for tensor in kv.tensors:
            tensor[:-1].fill_(math.nan if tensor.is_floating_point() else 77)
        for state in () if kv.states is None else chain.from_iterable(kv.states.layers):
            state.fill_(math.nan if state.is_floating_point() else 77)
        self._sampler = LogitsKeeper(
            vocab_size=model.vocab_size, max_batch_size=num_slots, device=CPU, native=native
        )
        runner = TokenRunner(
            TextHead(model, self._sampler, max_batch_size=num_slots, device=CPU),
            kv,
            max_batch_size=num_slots,
            max_length=max_length,
            device=CPU,
            graphs=graphs,
        )
        whole: Any = runner
        if draft is not None:
            self.drafter = draft_model(
                num_pages,
                layout.page_size,
                model.vocab_size,
                max_length=max_length,
                reads_states=head is not None,
            )
            scheduler.draft_with(self.drafter)
            sampler = LogitsKeeper(
                vocab_size=draft.vocab_size, max_batch_size=num_slots, device=CPU, native=native
            )
            own: KvLayout = layout
            tokens: TextHead
            if isinstance(draft, EagleHead):
                own = draft.config.layer.kv_layout(layout.page_size, layout.dtype)
                tokens = HeadTokens(draft, sampler, runner, max_batch_size=num_slots)
            else:
                tokens = TextHead(draft, sampler, max_batch_size=num_slots, device=CPU)
            self.draft_sampler = sampler
            drafting = TokenRunner(
                tokens,
                KvCache(own, num_pages, CPU, native),
                max_batch_size=num_slots,
                max_length=max_length,
                device=CPU,
            )
            whole = DraftingRunner(runner, drafting)
        super().__init__(scheduler, whole, model=MODEL, depth=depth)
        self.num_mixed_steps = 0  # parts of prompts beside answers
        self.logits: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        self.drafts: list[Drafts] = []

    def _note_drafts(self, plan: DraftPlan, outcome: StepResult) -> None:
        """Keep what the head drafted, and from which logits."""
        given: dict[int, list[torch.Tensor]] = defaultdict(list)
        firsts: dict[int, int] = {}
        for slot, position, logits_V in self.draft_sampler.take():
            firsts.setdefault(slot, position)
            given[slot].append(logits_V)
        for row, found in zip(plan.rows, outcome.rows, strict=True):
            if row.slot in firsts:
                drafts = Drafts(row.job_id, firsts[row.slot], found.token_ids, given[row.slot])
                self.drafts.append(drafts)

    def launch(self, plan: Plan) -> StepResult | TriptychError:
        self.clock.advance(0.01)
        outcome = super().launch(plan)
        assert isinstance(outcome, StepResult)
        if isinstance(plan, DraftPlan):
            self._note_drafts(plan, outcome)
            return outcome
        assert isinstance(plan, TokenPlan)
        self.num_mixed_steps += {bool(row.token_ids) for row in plan.rows} == {True, False}
        job_ids = {row.slot: row.job_id for row in plan.rows}
        for slot, position, logits_V in self._sampler.take():
            self.logits[job_ids[slot]][position] = logits_V
        return outcome

    def deltas(self, job_id: str) -> list[TokenDelta]:
        """What a job that did not fail was sent."""
        assert all(output.error is None for output in self.outputs[job_id])
        return self.payloads(job_id)

    def run(self, max_steps: int = 20_000) -> None:
        super().run(max_steps)
        assert self.pool.num_leased == 0


def alone(
    model: CausalModel, layout: KvLayout, native: NativeKernels | None, request: TokenRequest
) -> tuple[dict[int, torch.Tensor], list[TokenDelta]]:
    """Logits by position and deltas of a request that has the engine to itself."""
    driver = BatchDriver(
        model,
        layout,
        native,
        num_pages=-(-MAX_LENGTH // layout.page_size),
        enable_prefix_caching=False,
    )
    driver.submit("alone", request)
    driver.run()
    return driver.logits["alone"], driver.deltas("alone")


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit: unlike `==`, NaN equals itself and the zeros differ."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
