"""The proof that a vision model of transformers reads images on our pages as its class does.

Owns the comparison at load, in addition to that of text (`modalities.llm.engine.proof`): two images
of invented features between texts, in chunks that cut one unless its positions see each other.
First the masks, which say whether they do, then the hidden states. Knows no checkpoint.

Shapes: T tokens, N features of an image, C hidden, A axes, Q queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from triptych.core.engine_api.prompt_content import ContentSpan
from triptych.core.errors import WeightsError
from triptych.core.runtime.layers.attention import KvCache, PagedStep
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.llm.engine.bridge import BridgedStep, CachePlan, problem, refusal
from triptych.modalities.llm.engine.proof import (
    NARROW_WINDOW,
    PAGE_SIZE,
    BridgedModel,
    causal_mask,
    class_outputs,
    is_near,
    lay_out_rows,
    narrowed,
    states_of,
)
from triptych.modalities.vlm.engine.encoder import FeatureLayout, Features
from triptych.modalities.vlm.engine.head import PlaceholderTraits, find_blocks

_NUM_BEFORE, _NUM_BETWEEN, _NUM_AFTER = 7, 5, 12
_GRIDS = ((3, 4), (2, 6))
"""Rows and columns of the invented images."""
_NUMS_FEATURES: Sequence[Callable[[int, int], int]] = (
    lambda rows, columns: rows * columns,
    lambda rows, columns: rows * (columns + 1),
    lambda rows, columns: rows * (columns + 1) + 2,
)
"""An image's features: those of its grid, in some models also of the ends of rows and image."""
MIN_CONTEXT = 64
"""The shortest context in which images can be compared."""
_FIRST_PLAIN_ID = 5
_WRAPS: Sequence[Callable[[torch.Tensor], Any]] = (lambda x_NC: x_NC, lambda x_NC: [x_NC])
_UNEQUAL = "it reads images otherwise on our pages than in its class"


@dataclass(frozen=True, slots=True)
class SpanMasks:
    """How far the positions of an image see each other.

    In `layers` all do, within windows unless an image `exceeds_windows`.
    """

    layers: tuple[int, ...] = ()
    exceeds_windows: bool = False

    @property
    def sees_whole(self) -> bool:
        """Whether they do so in any layer."""
        return bool(self.layers)


class SeeingModel(BridgedModel, Protocol):
    """A vision model of transformers, as `fallback.FallbackVisionModel`."""

    wrap: Callable[[torch.Tensor], Any]

    def hidden(self, **given: Any) -> torch.Tensor:
        """Run the class's forward: `hidden_TC`."""

    def class_inputs(
        self, ids_1T: torch.Tensor, spans: Sequence[ContentSpan], features: Features
    ) -> dict[str, Any]:
        """The arguments of the class's own forward on a prompt with images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """Two images and three texts in turn."""

    ids_T: torch.Tensor
    features: Features
    positions: torch.Tensor
    spans: tuple[ContentSpan, ...]

    @classmethod
    def invent(
        cls, model: SeeingModel, traits: PlaceholderTraits, layout: FeatureLayout
    ) -> _Prompt:
        """Plain ids, and images whose features are as large as embeddings.

        Raises the errors of `traits.places` if images have features of no known number.
        """
        for count in _NUMS_FEATURES:
            try:
                return cls._around(_spans(count), model, traits, layout)
            except (ValueError, RuntimeError):
                if count is _NUMS_FEATURES[-1]:
                    raise
        raise AssertionError("the last number returns or raises")

    @classmethod
    def _around(
        cls,
        spans: tuple[ContentSpan, ...],
        model: SeeingModel,
        traits: PlaceholderTraits,
        layout: FeatureLayout,
    ) -> _Prompt:
        device, num_tokens = model.body.device, spans[-1].end + _NUM_AFTER
        ids_T = torch.arange(num_tokens) * 3 % (model.vocab_size // 2) + _FIRST_PLAIN_ID
        for span in spans:
            ids_T[span.start : span.end] = traits.input_id
        positions = np.arange(num_tokens)
        if traits.places is not None:
            positions, _ = traits.places(ids_T.numpy(), spans)
        embedding = model.whole.get_input_embeddings()
        scale = embedding(ids_T[:_NUM_BEFORE].to(device)).float().std().cpu()
        num_features = sum(span.num_features for span in spans)
        shape = (layout.num_parts, num_features, layout.hidden_size)
        values_DNC = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
        hidden_NC, *late = values_DNC.to(device, layout.dtype)
        return cls(
            ids_T=ids_T.to(device),
            features=Features(hidden_NC, torch.stack(late) if late else None),
            positions=torch.from_numpy(positions).to(device),
            spans=spans,
        )

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Where the images are: first position and length."""
        return [run for span in self.spans for run in span.runs]

    def parts_of(self, start: int, end: int) -> list[slice]:
        """The texts and the images within a chunk, as slices of it."""
        inner = (border for span in self.spans for border in (span.start, span.end))
        borders = (0, *inner, len(self.ids_T))
        cut = [min(max(border, start), end) - start for border in borders]
        return [slice(low, high) for low, high in pairwise(cut) if low < high]

    def features_at(self, positions_T: torch.Tensor) -> Features | None:
        """The features at some of the prompt's positions."""
        feature_T = torch.full_like(self.ids_T, -1)
        filled = torch.cat([torch.arange(first, first + length) for first, length in self.runs])
        feature_T[filled] = torch.arange(len(filled), device=feature_T.device)
        index_F = feature_T[positions_T]
        index_F = index_F[index_F >= 0]
        late_LNC = self.features.late_LNC
        late_LFC = None if late_LNC is None else late_LNC[:, index_F]
        return Features(self.features.hidden_NC[index_F], late_LFC) if len(index_F) else None


def _spans(count: Callable[[int, int], int]) -> tuple[ContentSpan, ...]:
    """The places of images with `count` features."""
    spans: list[ContentSpan] = []
    for grid in _GRIDS:
        first = spans[-1].end + _NUM_BETWEEN if spans else _NUM_BEFORE
        spans.append(ContentSpan(digest=b"", runs=((first, count(*grid)),), grid=grid))
    return tuple(spans)


def prove_images(
    model: SeeingModel,
    traits: PlaceholderTraits,
    layout: FeatureLayout,
    *,
    max_length: int,
    dtype: torch.dtype,
) -> SpanMasks:
    """Compare a model on our cache with its class; `model.plan` gets the layers with blocks.

    Raises `WeightsError` where masks or
    results differ.
    """
    if max_length < MIN_CONTEXT:
        raise WeightsError(refusal(f"its context of {max_length} tokens holds no image"))
    plan = model.plan
    with torch.inference_mode(), narrowed(model.body):
        with library_errors(problem("its positions on several axes cannot be computed")):
            prompt = _Prompt.invent(model, traits, layout)
        own_TC, masks = _on_its_own(model, prompt)
        model.plan = _narrowed(plan)
        with library_errors(problem("it does not run a step with an image")):
            chunks, windows = _on_pages(model, prompt, dtype, SpanMasks())
            spans = SpanMasks()
            if not plan.by_rows:
                spans = _find_spans(model.plan, prompt.runs, masks, windows)
            if spans.sees_whole:
                model.plan = model.plan.with_blocks_in(spans.layers)
                chunks, _ = _on_pages(model, prompt, dtype, spans)
    model.plan = plan.with_blocks_in(spans.layers)
    for start, hidden_TC in chunks:
        end = start + len(hidden_TC)
        is_near_T = is_near(hidden_TC, own_TC[start:end], dtype)
        for part in prompt.parts_of(start, end):
            # Rounding may send a token to another expert, but not most of them.
            if 2 * int(is_near_T[part].sum()) < len(is_near_T[part]):
                raise WeightsError(refusal(_UNEQUAL))
    return spans


def _narrowed(plan: CachePlan) -> CachePlan:
    """The plan with windows of masks as narrow as those of attention are now."""
    windows = {
        layer: min(one.mask_window, NARROW_WINDOW)
        for layer, one in plan.layers.items()
        if one.mask_window is not None
    }
    return plan.with_mask_windows(windows)


def _on_its_own(
    model: SeeingModel, prompt: _Prompt
) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
    """The `hidden_TC` and the masks of transformers' own model, in the form it takes features."""
    with library_errors(problem("its class does not run with features")):
        for wrap in _WRAPS:
            model.wrap = wrap
            given = model.class_inputs(prompt.ids_T[None], prompt.spans, prompt.features)
            try:
                with class_outputs(model.body) as found:
                    return model.hidden(**given), found.masks
            except (TypeError, AttributeError):
                if wrap is _WRAPS[-1]:
                    raise
    raise AssertionError("the last form returns or raises")


def _on_pages(
    model: SeeingModel, prompt: _Prompt, dtype: torch.dtype, spans: SpanMasks
) -> tuple[list[tuple[int, torch.Tensor]], dict[int, int | None]]:
    """The `hidden_TC` of three chunks, as `(first position, states)`, and attention's windows."""
    device, num_tokens = prompt.ids_T.device, len(prompt.ids_T)
    num_pages = -(-num_tokens // PAGE_SIZE)
    kv = KvCache(model.plan.layout(PAGE_SIZE, dtype), 2 * num_pages, device, num_slots=2)
    blocks_2T = find_blocks(num_tokens, prompt.runs, exceeds_windows=spans.exceeds_windows)
    windows: dict[int, int | None] = {}
    first, length = prompt.runs[0]
    middle = first + (length if spans.sees_whole else length // 2)
    found: list[tuple[int, torch.Tensor]] = []
    for chunks in ([(0, 0, middle)], [(0, middle, num_tokens), (1, 0, middle)]):
        batch, places_T = lay_out_rows(chunks, num_pages, device)
        if spans.sees_whole:
            batch.blocks_2T = torch.from_numpy(blocks_2T).to(device)[:, places_T]
        hidden_TC = model.run_step(
            BridgedStep(PagedStep(kv, batch, states_of(chunks, device)), model.plan, windows),
            prompt.positions[..., places_T],
            input_ids=prompt.ids_T[places_T][None],
            features=prompt.features_at(places_T),
        )
        sizes = batch.host_query_lengths_B.tolist()
        found += zip([start for _, start, _ in chunks], hidden_TC.split(sizes), strict=True)
    return found, windows


def _find_spans(
    plan: CachePlan,
    runs: Sequence[tuple[int, int]],
    masks: Mapping[int, torch.Tensor],
    windows: Mapping[int, int | None],
) -> SpanMasks:
    """The layers in which an image sees itself. Raises `WeightsError` for masks of other forms."""
    if masks.keys() != plan.layers.keys():
        raise WeightsError(refusal("the masks of its layers cannot be read"))
    block_QS = torch.zeros_like(next(iter(masks.values())))
    for first, length in runs:
        block_QS[first : first + length, first : first + length] = True
    layers, forms = [], {False, True}
    for layer, seen_QS in masks.items():
        window = windows.get(layer) or plan.layers[layer].mask_window
        causal_QS = causal_mask(seen_QS, window)
        if bool((seen_QS == causal_QS).all()):
            continue
        cut_QS = block_QS if window is None else block_QS.triu(1 - window)
        masks_by_form = {False: causal_QS | cut_QS, True: causal_QS | block_QS}
        forms &= {form for form, mask in masks_by_form.items() if bool((mask == seen_QS).all())}
        layers.append(layer)
    if not forms:
        raise WeightsError(refusal("its mask of images is neither causal nor whole"))
    return SpanMasks(tuple(layers), exceeds_windows=False not in forms)
