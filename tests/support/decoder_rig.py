"""Drives the real decoder, cache and runner by hand, and keeps every logit they produce."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec import structs

from triptych.core.engine_api.plan import StepResult, TokenPlan, TokenRow
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.decoders.expert_names import names_of
from triptych.core.runtime.decoders.families.table import read_decoder_config
from triptych.core.runtime.decoders.layer_names import LAYER_NAMES
from triptych.core.runtime.decoders.tensor_names import decoder_targets, is_unused
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.engine.token_runner import TokenHead, TokenRunner
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache, KvLayout, PagedStep
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.sampling.sampler import Sampler
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import load_tensors
from triptych.core.runtime.tensors.renamed import renamed
from triptych.core.runtime.tensors.stacked import split_experts

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def small_decoder(folder: Path, **heads: int) -> Decoder:
    """A Llama of two layers and 67 tokens with random weights, saved in `folder`."""
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        **heads,
    )
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return load_decoder(folder)


def load_decoder(
    folder: Path,
    *,
    max_length: int = 0,
    dtype: torch.dtype = torch.float32,
    native: NativeKernels | None = None,
    device: torch.device = CPU,
) -> Decoder:
    with Checkpoint.open(folder) as checkpoint:
        config = read_decoder_config(checkpoint.config, max_length=max_length)
        decoder = Decoder(config, dtype=dtype, device=device)
        split = split_experts(checkpoint, names_of(config.moe).stacked)
        split = renamed(split, LAYER_NAMES[config.naming].stored)
        load_tensors(split, decoder_targets(decoder), ignored=is_unused)
    decoder.prepare(native)
    return decoder


class Recorder:
    """A model that remembers the logits it gave."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.last_logits_RV = torch.empty(0)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        return self.model.forward(ids, positions, step)

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        self.last_logits_RV = self.model.logits(hidden_RC)
        return self.last_logits_RV


@dataclass
class Row:
    """One row by hand: its tokens so far, how many are cached, and the logits it was given."""

    slot: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams = GREEDY
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    num_bound_pages: int = 0
    is_bound: bool = False
    logits: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # by position of the token sampled
    frames: list[tuple[int, ...]] = field(default_factory=list)  # codes of frame ids in `tokens`
    adapter: int = -1


def decoder_rig(decoder: Decoder, **options: Any) -> Rig:
    return Rig(decoder, decoder.config.kv_layout(4, decoder.dtype), **options)


class Rig:
    """A runner with pages to give away. Nothing here is clever, so the runner must be right."""

    head_type: Callable[..., TokenHead] = TextHead

    def __init__(
        self,
        model: Any,
        layout: KvLayout,
        *,
        max_batch_size: int = 16,
        max_length: int = 96,
        recorder: Callable[[Any], Any] = Recorder,
        native: NativeKernels | None = None,
        graphs: DecodeGraphs | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.page_size = layout.page_size
        num_pages = max_batch_size * -(-max_length // self.page_size)
        self.free_pages = torch.randperm(
            num_pages, generator=torch.Generator().manual_seed(7)
        ).tolist()
        self.free_slots = list(range(max_batch_size))
        num_more = int(graphs is not None)  # for padding
        self.kv = KvCache(
            *(layout, num_pages + num_more, device, native), num_slots=max_batch_size + num_more
        )
        self.recorder = recorder(model)
        size = self.recorder.vocab_size
        num_slots = max_batch_size + (graphs is not None)
        sampler = Sampler(vocab_size=size, max_batch_size=num_slots, device=device)
        rows = getattr(model, "adapter_rows", None)
        adapted = {} if rows is None else {"adapter_rows": rows}
        head = self.head_type(
            self.recorder, sampler, max_batch_size=max_batch_size, device=device, **adapted
        )
        self.runner = TokenRunner(
            head,
            self.kv,
            max_batch_size=max_batch_size,
            max_length=max_length,
            device=device,
            graphs=graphs,
        )
        self.num_steps = 0

    def open(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        frames: Sequence[tuple[int, ...]] = (),
    ) -> Row:
        row = Row(self.free_slots.pop(), list(prompt), len(prompt), sampling)
        row.frames += frames
        return row

    def share(self, sequence: Row, donor: Row, num_pages: int) -> None:
        """A prefix hit: the donor's first pages, whose tokens are not computed again."""
        num_tokens = num_pages * self.page_size
        assert sequence.tokens[:num_tokens] == donor.tokens[:num_tokens]
        sequence.pages = donor.pages[:num_pages]
        sequence.num_cached = num_pages * self.page_size

    def preempt(self, sequence: Row) -> None:
        """Take everything away; the tokens so far are computed again from the start."""
        self.free_pages += sequence.pages
        self.free_slots.append(sequence.slot)
        sequence.slot = self.free_slots.pop()
        sequence.pages, sequence.num_cached = [], 0
        sequence.num_bound_pages, sequence.is_bound = 0, False

    def step(self, *work: tuple[Row, int]) -> StepResult:
        """Run the next `n` tokens of each sequence; `0` decodes from the last token sampled."""
        work = tuple(sorted(work, key=lambda item: item[1] > 0))
        rows = tuple(self._row(sequence, count) for sequence, count in work)
        plan = TokenPlan(step_id=self.num_steps, model="m", kind="t", rows=rows)
        self.recorder.last_logits_RV = torch.empty(0)
        result = self.runner.launch(plan).result()
        assert isinstance(result, StepResult)
        self.num_steps += 1
        sampled = [s for (s, _), row in zip(work, rows, strict=True) if row.is_sampled]
        for (sequence, _), row, out in zip(work, rows, result.rows, strict=True):
            sequence.num_cached += row.num_tokens
            sequence.tokens += out.token_ids
            sequence.frames += [out.codes] if out.codes else []
        logits_RV = self.recorder.last_logits_RV[: len(sampled)]  # those of padding come last
        for sequence, logits_V in zip(sampled, logits_RV, strict=True):
            sequence.logits[len(sequence.tokens) - 1] = logits_V
        return result

    def prefill(self, *sequences: Row) -> None:
        self.step(*((s, len(s.tokens) - s.num_cached) for s in sequences))

    def decode(self, *sequences: Row, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.step(*((s, 0) for s in sequences))

    def _bound(self, sequence: Row, row: TokenRow) -> TokenRow:
        sequence.is_bound = True
        return structs.replace(
            row,
            sampling=sequence.sampling,
            history_ids=tuple(sequence.tokens),
            num_prompt_tokens=sequence.num_prompt_tokens,
            frames=tuple(sequence.frames),
            adapter=sequence.adapter,
        )

    def _row(self, sequence: Row, count: int) -> TokenRow:
        start, num_tokens = sequence.num_cached, count or 1
        end = start + num_tokens
        while len(sequence.pages) * self.page_size < end:
            sequence.pages.append(self.free_pages.pop())
        new_pages = tuple(sequence.pages[sequence.num_bound_pages :])
        sequence.num_bound_pages = len(sequence.pages)
        row = TokenRow(
            job_id=str(sequence.slot),
            slot=sequence.slot,
            start=start,
            num_tokens=num_tokens,
            token_ids=tuple(sequence.tokens[start:end]) if count else (),
            new_page_ids=new_pages,
            is_sampled=end == len(sequence.tokens),
        )
        return row if sequence.is_bound else self._bound(sequence, row)


class RoundedReference:
    """A reference with its weights rounded to bfloat16: in float32 arithmetic, and in bfloat16.

    Keeps what it computed: decoders that gave the same tokens are held to the same logits.
    """

    def __init__(self, reference: Any) -> None:
        self._exact, self._rounded = copy.deepcopy(reference), copy.deepcopy(reference)
        parameters = zip(self._exact.parameters(), self._rounded.parameters(), strict=True)
        for kept, cast in parameters:
            cast.data = cast.data.bfloat16()  # parameters alone have the type of a model
            kept.data = cast.data.float()
        self._logits: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def assert_errs_no_more(self, rows: Sequence[Row]) -> None:
        """The error of the rows' logits is at most 1.5 times that of bfloat16 arithmetic.

        Both against float32 arithmetic, relative to all logits.
        """
        both = [self._both(row) for row in rows]
        wanted_NV, theirs_NV = (torch.cat(each) for each in zip(*both, strict=True))
        ours_NV = torch.stack([logits_V for row in rows for logits_V in row.logits.values()])
        ours, theirs = (float((x_NV - wanted_NV).norm()) for x_NV in (ours_NV, theirs_NV))
        assert ours <= 1.5 * theirs, f"relative: {ours / float(wanted_NV.norm()):.2g}"

    def _both(self, row: Row) -> tuple[torch.Tensor, ...]:
        """Exact and rounded, of every position that the row was given logits for: `[N, V]`."""
        ids = tuple(row.tokens[:-1])
        if ids not in self._logits:
            with torch.inference_mode():
                tokens_1T = torch.tensor([ids])
                exact_TV = self._exact(tokens_1T).logits[0].float()
                self._logits[ids] = exact_TV, self._rounded(tokens_1T).logits[0].float()
        places = [position - 1 for position in row.logits]
        return tuple(logits_TV[places] for logits_TV in self._logits[ids])


def assert_errs_no_more_than_in_bfloat16(rows: Sequence[Row], reference: Any) -> None:
    """The error of the rows' logits is at most 1.5 times that of `reference` run in bfloat16."""
    RoundedReference(reference).assert_errs_no_more(rows)
