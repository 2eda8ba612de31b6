"""The policy of image generation: which images the next step takes, from the state alone.

Owns the choice; changes nothing.

1. A finished image is decoded first, then new ones are admitted, then all are denoised: a new image
   joins at the next step, and a finished one waits for no other (`choose_step`).
2. Rows of different sizes are separate runs. Each size fills its run by `batching`, most urgent
   first, until the step has `max_rows` rows (`_batches`). Spans that compute nothing are taken at
   once (`_denoise`).
3. While other models have work, a step is one image's text or pixels, or as many rows of one size
   as fit the step's budget; at least one guidance branch (`_take_within`, `_run_s`).
4. Where several clients generate, the one that received the least goes first, in admission and in
   runs; deadlines order the images of each (`_urgency`).
5. Images are admitted in order of arrival. An image for which there is no room may be overtaken by
   smaller ones, at most `_MAX_OVERTAKEN` times. Paused jobs are left out (`_find_admissible`).
6. Tokens of images are written a few at a time, as many as fit the budget, by all images that
   lack some, while the most urgent image does (`_write`).
7. A step that ran out of memory halves the bound of later ones of its kind, until enough images
   were finished (`DenoiseState.max_size`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any

from triptych.modalities.diffusion.scheduling.batching import fill_batch, run_table, urgency
from triptych.modalities.diffusion.scheduling.state import DenoiseState, ImageState
from triptych.schedulers.batcher import ScheduledStep
from triptych.schedulers.cost import UNKNOWN_COST_S, CostModel
from triptych.schedulers.shares import ServiceShares, none_running

_MAX_OVERTAKEN = 8  # times that smaller images overtake a waiting one
_MAX_LOOKAHEAD = 64  # waiting images considered for one step
_MAX_TOKENS = 32  # written of one image in a step
_MAX_PIXELS = 1 << 20  # decoded together: beyond this one image keeps a decoder busy


@dataclass(slots=True, kw_only=True)
class DenoiseStep(ScheduledStep):
    """A step of `kind` for the images in `rows`, which overtake the images in `overtaken`.

    `size` is how much the step holds at once, in images, tokens or pixels by its kind. With
    `evaluates_ahead` one guidance branch of the only image's step is computed, without taking the
    step. `num_tokens` are written of each image that lacks so many.
    """

    size: float = 0.0
    overtaken: tuple[ImageState, ...] = ()
    evaluates_ahead: bool = False
    num_tokens: int = 0


SKIPPING = MappingProxyType({"skips": 1.0})
"""The work of a denoising step that computes nothing; it has its own prediction."""


def denoise_work(num_rows: int, num_tokens: float) -> dict[str, float]:
    """The features that predict a denoising step; `num_tokens` is the sum over its rows."""
    return {"rows": num_rows, "tokens": num_tokens}


@dataclass(frozen=True, slots=True)
class DenoisePolicy:
    """Chooses one step of at most `max_rows` rows, which should end within `budget_s`.

    If it `splits_guidance`, a step of two guidance branches may be split into two plans.
    """

    state: DenoiseState
    shares: ServiceShares
    costs: CostModel
    max_rows: int
    budget_s: float
    splits_guidance: bool = True

    def choose_step(self) -> DenoiseStep | None:
        """The next step; `None` while all images wait for steps in flight or slow readers."""
        ready = [image for image in self.state.running if image.can_step]
        generated = [image for image in ready if not image.num_left]
        ready = [image for image in ready if image.num_left]
        step = self._decode(generated) or self._encode() or self._write(ready)
        written = [image for image in ready if not image.num_unwritten]
        return step or self._denoise(written) or self._release()

    @property
    def _is_shared(self) -> bool:
        return math.isfinite(self.budget_s)

    def _decode(self, generated: list[ImageState]) -> DenoiseStep | None:
        ordered = sorted(generated, key=lambda image: (image.due_s, image.place))
        images = tuple(self._take_within("decode", ordered, _MAX_PIXELS))
        if not images:
            return None
        size = sum(_size("decode", image) for image in images)
        return DenoiseStep(kind="decode", work={"pixels": size}, rows=images, size=size)

    def _encode(self) -> DenoiseStep | None:
        able, overtaken = self._find_admissible()
        images = tuple(self._take_within("encode", able, self.max_rows))
        if not images:
            return None
        return DenoiseStep(
            kind="encode",
            work={"images": len(images)},
            rows=images,
            size=len(images),
            overtaken=tuple(
                image for image in overtaken if self._counts_overtaking(image, images[-1])
            ),
        )

    def _take_within(
        self, kind: str, images: Iterable[ImageState], max_size: float
    ) -> Iterator[ImageState]:
        """The first of `images`, and the next ones that fit into the step."""
        left = min(max_size, self.state.max_size.get(kind, math.inf))
        for index, image in enumerate(images):
            left -= _size(kind, image)
            if index and (left < 0 or self._is_shared):
                return
            yield image

    def _find_admissible(self) -> tuple[list[ImageState], list[ImageState]]:
        """Images that may begin, in order, and those that they overtake."""
        able: list[ImageState] = []
        overtaken: list[ImageState] = []
        num_left = self.state.max_images - len(self.state.running)
        bytes_left = self.state.max_state_bytes - self.state.state_bytes
        queue = self.shares.in_turn(p for p in self.state.waiting if not p.entry.is_paused)
        for image in islice(queue, _MAX_LOOKAHEAD if num_left else 0):
            if image.entry.cost.state_bytes <= bytes_left:
                bytes_left -= image.entry.cost.state_bytes
                able.append(image)
            elif image.num_times_overtaken < _MAX_OVERTAKEN:
                overtaken.append(image)
            else:
                break
            if len(able) == num_left:
                break
        return able, overtaken

    def _counts_overtaking(self, image: ImageState, other: ImageState) -> bool:
        """Whether it counts for `image` that `other` overtakes it.

        It always does within a client; across clients only while none of its client's images runs.
        """
        if image.client == other.client:
            return image.place < other.place
        return none_running(image.client, self.state.running)

    def _urgency(self, image: ImageState) -> tuple[float, tuple[Any, ...]]:
        received = self.shares.service_of(image.client) if self.shares.is_contended else 0.0
        return received, urgency(image)

    def _write(self, ready: list[ImageState]) -> DenoiseStep | None:
        if not ready or not min(ready, key=self._urgency).num_unwritten:
            return None
        writing = sorted((image for image in ready if image.num_unwritten), key=self._urgency)
        rows = tuple(self._take_within("write", writing, self.max_rows))
        most = max(image.num_unwritten for image in rows)
        sizes = [1 << power for power in range(_MAX_TOKENS.bit_length()) if 1 << power < 2 * most]
        fitting = takewhile(lambda size: self._fits("write", _write_work(size)), sizes[1:])
        num_tokens = max(fitting, default=1)
        return DenoiseStep(
            kind="write",
            work=_write_work(num_tokens * len(rows)),
            rows=rows,
            size=len(rows),
            num_tokens=num_tokens,
        )

    def _fits(self, kind: str, work: Mapping[str, float]) -> bool:
        """Whether a step of this work ends within the budget, as far as is known."""
        if not self._is_shared:
            return True
        return self.costs.is_known(kind) and self.costs.predict(kind, work) <= self.budget_s

    def _denoise(self, ready: list[ImageState]) -> DenoiseStep | None:
        if not ready:
            return None
        if skipping := [image for image in ready if not image.num_rows]:
            rows = tuple(sorted(skipping, key=self._urgency))
            return DenoiseStep(kind="denoise", work=SKIPPING, rows=rows)
        images = tuple(self._batches(sorted(ready, key=self._urgency)))
        first = images[0]
        is_long = self._is_shared and first.num_rows > len(
            self._run_s(first.num_tokens, self.max_rows)
        )
        if self.splits_guidance and is_long and first.num_rows > 1:
            work = denoise_work(1, first.num_tokens)
            return DenoiseStep(
                kind="denoise", work=work, rows=images, size=first.num_tokens, evaluates_ahead=True
            )
        size = sum(image.num_rows * image.num_tokens for image in images)
        work = denoise_work(sum(image.num_rows for image in images), size)
        return DenoiseStep(kind="denoise", work=work, rows=images, size=size)

    def _batches(self, ready: list[ImageState]) -> list[ImageState]:
        """Runs of one size each; the first image is included even if it exceeds all bounds."""
        chosen: list[ImageState] = []
        rows_left = self.max_rows
        tokens_left = self.state.max_size.get("denoise", math.inf)
        for num_tokens in dict.fromkeys(image.num_tokens for image in ready):
            if chosen and self._is_shared:
                break
            most = int(min(rows_left, tokens_left / num_tokens))
            members = [image for image in ready if image.num_tokens == num_tokens]
            batch = fill_batch(members, self._run_s(num_tokens, most))
            num_rows = sum(image.num_rows for image in batch)
            if chosen and num_rows > most:
                continue
            chosen += batch
            rows_left -= num_rows
            tokens_left -= num_rows * num_tokens
        return chosen

    def _run_s(self, num_tokens: int, max_rows: int) -> list[float]:
        """The durations of the runs that fit the budget, by their rows."""
        works = (denoise_work(rows, rows * num_tokens) for rows in range(1, self.max_rows + 1))
        measured = [self.costs.measured_s("denoise", work) for work in works]
        # The trend of other sizes predicts a new size badly: it must not seem too short.
        alone_s = max(UNKNOWN_COST_S, self.costs.predict("denoise", denoise_work(1, num_tokens)))
        run_s = run_table(measured, alone_s)[: max(0, max_rows)]
        return list(takewhile(lambda seconds: seconds <= self.budget_s, run_s))

    def _release(self) -> DenoiseStep | None:
        return DenoiseStep(kind="release") if self.state.dropped else None


def _write_work(num_tokens: float) -> dict[str, float]:
    return {"tokens": num_tokens}


def _size(kind: str, image: ImageState) -> float:
    return image.entry.cost.num_pixels if kind == "decode" else 1.0
