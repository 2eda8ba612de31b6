"""Which pictures the next step takes: the policy of drawing, from the state alone.

Owns the choice; changes nothing.

- A finished picture goes out first, then new ones are let in, then all are denoised: so whoever
  comes joins at the next step, and who is done waits for nobody.
- Rows of unlike size are separate runs. Each size fills its own by `staggering`, most urgent first,
  until the step has `max_rows` rows. Strides that compute nothing are taken at once.
- In company (other models have work) a step is one picture's text or pixels, or as many rows of
  one size as are over within the time that the others leave; one guidance branch at least. Where
  text or pixels are too long for that time, rows wait behind them: it is not known here.
- Pictures are let in as they came. One for which there is no room may be passed by smaller ones,
  but only so often. Paused jobs stand aside.
- A step that ran out of memory makes later ones of its kind half as large at most, until enough
  pictures were done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from triptych.modalities.diffusion.scheduling.batching import fill_batch, urgency
from triptych.modalities.diffusion.scheduling.state import DenoiseState, PictureState
from triptych.modalities.diffusion.scheduling.times import RunTimes

_MAX_PASSED = 8  # times a waiting picture is passed by smaller ones
_MAX_LOOKAHEAD = 64  # waiting pictures looked at for one step
_CAUTION = 0.85  # of a gap is drafted for: the timeline predicts less boldly than `RunTimes`
_MAX_PIXELS = 1 << 20  # decoded together: beyond, a decoder is busy with one picture


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiseDraft:
    """What booking will do: `kind` to `pictures`. `passed` waited for room longer than they.

    With `asks_ahead` the only picture's step is asked of one guidance branch, and not taken.
    """

    kind: str
    pictures: tuple[PictureState, ...] = ()
    passed: tuple[PictureState, ...] = ()
    asks_ahead: bool = False

    @property
    def num_rows(self) -> int:
        """Guidance branches that compute."""
        return 1 if self.asks_ahead else sum(picture.num_rows for picture in self.pictures)

    @property
    def size(self) -> float:
        """How much the step holds at once: pictures, tokens or pixels, as its kind is."""
        if self.asks_ahead:
            return self.pictures[0].num_tokens
        return sum(size_of(self.kind, picture) for picture in self.pictures)

    @property
    def work(self) -> dict[str, float]:
        """What the step's cost is predicted from."""
        if self.kind == "denoise":
            return {"rows": self.num_rows, "tokens": self.size}
        return {"size": self.size} if self.pictures else {}


def size_of(kind: str, picture: PictureState) -> float:
    """What a picture adds to the size of a step."""
    if kind == "denoise":
        return picture.num_rows * picture.num_tokens
    return picture.entry.cost.num_pixels if kind == "decode" else 1.0


class Drafter:
    """Drafts steps of at most `max_rows` rows.

    In company they take about `gap_s`, which the owner sets; infinity where nobody else has work.
    """

    def __init__(self, state: DenoiseState, times: RunTimes, max_rows: int) -> None:
        self.gap_s = math.inf
        self._state = state
        self._times = times
        self._max_rows = max_rows

    def draft(self) -> DenoiseDraft | None:
        """The next step; none while all depends on steps in flight or on slow readers."""
        return self._decode() or self._encode() or self._denoise() or self._release()

    @property
    def _has_company(self) -> bool:
        return math.isfinite(self.gap_s)

    def _decode(self) -> DenoiseDraft | None:
        drawn = [picture for picture in self._state.running if picture.can_decode]
        ordered = sorted(drawn, key=lambda picture: (picture.due_s, picture.place))
        pictures = tuple(self._together("decode", ordered, _MAX_PIXELS))
        return DenoiseDraft(kind="decode", pictures=pictures) if pictures else None

    def _encode(self) -> DenoiseDraft | None:
        able, passed = self._admissible()
        pictures = tuple(self._together("encode", able, self._max_rows))
        if not pictures:
            return None
        last = pictures[-1].place
        return DenoiseDraft(
            kind="encode",
            pictures=pictures,
            passed=tuple(picture for picture in passed if picture.place < last),
        )

    def _together(
        self, kind: str, pictures: Iterable[PictureState], max_size: float
    ) -> Iterator[PictureState]:
        """The first of `pictures`, and the next as far as they fit into one step."""
        left = min(max_size, self._state.max_size.get(kind, math.inf))
        for index, picture in enumerate(pictures):
            left -= size_of(kind, picture)
            if index and (left < 0 or self._has_company):
                return
            yield picture

    def _admissible(self) -> tuple[list[PictureState], list[PictureState]]:
        """Who may begin, in line, and who has to let others pass."""
        able: list[PictureState] = []
        passed: list[PictureState] = []
        num_left = self._state.max_pictures - len(self._state.running)
        bytes_left = self._state.max_state_bytes - self._state.state_bytes
        in_line = (picture for picture in self._state.waiting if not picture.entry.is_paused)
        for picture in islice(in_line, _MAX_LOOKAHEAD if num_left else 0):
            if picture.entry.cost.state_bytes <= bytes_left:
                bytes_left -= picture.entry.cost.state_bytes
                able.append(picture)
            elif picture.num_times_passed < _MAX_PASSED:
                passed.append(picture)
            else:
                break
            if len(able) == num_left:
                break
        return able, passed

    def _denoise(self) -> DenoiseDraft | None:
        ready = sorted((p for p in self._state.running if p.can_step), key=urgency)
        if not ready:
            return None
        if skipping := [picture for picture in ready if not picture.num_rows]:
            return DenoiseDraft(kind="denoise", pictures=tuple(skipping))
        pictures = tuple(self._batches(ready))
        is_long = self._has_company and pictures[0].num_rows > self._most_rows(pictures[0])
        asks_ahead = is_long and pictures[0].num_rows > 1
        return DenoiseDraft(kind="denoise", pictures=pictures, asks_ahead=asks_ahead)

    def _most_rows(self, picture: PictureState) -> int:
        """How many rows like a picture's make a run that may be made now."""
        return len(self._run_s(picture.num_tokens, self._max_rows))

    def _batches(self, ready: list[PictureState]) -> list[PictureState]:
        """Runs of one size each, the first of which may have a picture that exceeds all bounds."""
        chosen: list[PictureState] = []
        rows_left = self._max_rows
        tokens_left = self._state.max_size.get("denoise", math.inf)
        for num_tokens in dict.fromkeys(picture.num_tokens for picture in ready):
            if chosen and self._has_company:
                break
            most = int(min(rows_left, tokens_left / num_tokens))
            members = [picture for picture in ready if picture.num_tokens == num_tokens]
            batch = fill_batch(members, self._run_s(num_tokens, most))
            num_rows = sum(picture.num_rows for picture in batch)
            if chosen and num_rows > most:
                continue
            chosen += batch
            rows_left -= num_rows
            tokens_left -= num_rows * num_tokens
        return chosen

    def _run_s(self, num_tokens: int, max_rows: int) -> list[float]:
        """How long runs take that may be made now."""
        run_s = self._times.table(num_tokens)[: max(0, max_rows)]
        return list(takewhile(lambda seconds: seconds <= _CAUTION * self.gap_s, run_s))

    def _release(self) -> DenoiseDraft | None:
        return DenoiseDraft(kind="release") if self._state.dropped else None
