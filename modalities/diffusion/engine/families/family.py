"""How a class of denoising models is asked, as data.

Owns what differs between model classes: argument names, the unit of time, the sign of the answer,
where the blocks are. Knows no class by name (`table.py` does) and runs nothing (`model.py` does).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from triptych.modalities.diffusion.wire import AdapterUse


@dataclass(frozen=True, slots=True)
class Blocks:
    """One list of blocks in a model. `streams`: the arguments its blocks return, in that order.

    Empty if they return their first argument alone. The hidden states that the model's head reads
    are the argument `hidden`; empty for the first.
    """

    name: str
    streams: tuple[str, ...] = ()
    hidden: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserFamily:
    """A class of models. The time it is told is the scheduler's over `time_unit`, flipped or not.

    `lists`: arguments passed as lists of rows, not stacked. `ragged`: arguments whose rows may be
    of any length; they are filled up, and the model is told which are real by an argument of that
    name and `_mask`. `axes`: arguments whose rows are not stacked in front. `halves`: the answer's
    second half of channels is a variance, left out. `span`: the lists of blocks, if a row may skip
    them. `tap`: the module whose output TeaCache compares, where it is not what enters the first
    attention.
    """

    sample: str = "hidden_states"
    time: str = "timestep"
    time_unit: float = 1.0
    time_flips: bool = False
    negates: bool = False
    halves: bool = False
    lists: frozenset[str] = frozenset()
    ragged: frozenset[str] = frozenset()
    axes: Mapping[str, int] = field(default_factory=dict)
    span: tuple[Blocks, ...] = ()
    tap: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """What a row's model run is told beside latents and time: one guidance branch's.

    `rows`: tensors of the row, without a batch dimension, by argument name; a dotted name is an
    entry of an argument that is a mapping. `shared`: arguments that are the same for all rows of a
    batch, which `key` stands for: rows with different keys never share a run. `context`: latents
    appended to the row's along the first dimension, whose answer is left out (edited pictures).
    `adapters`: those that change the model for this row, as the model's `adapters` checked them.
    """

    rows: Mapping[str, Tensor]
    shared: Mapping[str, Any] = field(default_factory=dict)
    key: Hashable = ()
    context: Tensor | None = None
    adapters: tuple[AdapterUse, ...] = ()
