"""The teacher's outputs, on disk: flat arrays and an index, appended to and memory-mapped.

Owns the files of a corpus folder and how an interrupted run resumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from teacher import FRAMES_PER_UNIT, Reading, Teacher

STEP_UNITS = 2
STEP_FRAMES = STEP_UNITS * FRAMES_PER_UNIT
_HIDDEN_SIZE = 256
_FLUSH_EVERY = 200
_MAX_UNITS = 480  # twelve seconds

_FILES = {"ids": np.int16, "units": np.int16, "f0": np.float32, "hidden": np.float16}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Teacher outputs by number. Row i of `index`: (first id, end id, first frame, end frame)."""

    index: NDArray[np.int64]
    ids: NDArray[np.int16]
    units: NDArray[np.int16]
    f0: NDArray[np.float32]
    hidden: NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.index)

    def reading(self, number: int) -> Reading:
        """Views of one sentence's outputs."""
        first_id, end_id, first, end = self.index[number]
        ids, frames = slice(first_id, end_id), slice(first, end)
        return Reading(self.ids[ids], self.units[ids], self.f0[frames], self.hidden[frames])

    def num_steps(self) -> NDArray[np.int64]:
        """Token steps of each sentence."""
        frames = self.index[:, 3] - self.index[:, 2]
        return -(-frames // STEP_FRAMES)


def open_corpus(folder: Path) -> Corpus:
    """Map the files written so far."""
    index = np.asarray(json.loads((folder / "index.json").read_text()), np.int64).reshape(-1, 4)
    arrays = {name: np.memmap(folder / name, dtype, "r") for name, dtype in _FILES.items()}
    hidden = arrays["hidden"][: len(arrays["hidden"]) // _HIDDEN_SIZE * _HIDDEN_SIZE]
    return Corpus(
        index, arrays["ids"], arrays["units"], arrays["f0"], hidden.reshape(-1, _HIDDEN_SIZE)
    )


def read_sentences(folder: Path, sentences: list[str]) -> None:
    """Run the teacher on the sentences in order, after those already in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path, progress = folder / "index.json", folder / "progress.json"
    index: list[list[int]] = json.loads(path.read_text()) if path.exists() else []
    done = json.loads(progress.read_text()) if progress.exists() else 0
    _truncate(folder, index)
    teacher, batch = Teacher(), list[Reading]()
    for number in track(range(done, len(sentences)), "Reading"):
        ids = teacher.symbols(sentences[number])
        if len(ids) > 4:
            reading = teacher.read(ids)
            if reading.units_N.sum() <= _MAX_UNITS:
                batch.append(reading)
        if len(batch) == _FLUSH_EVERY or number + 1 == len(sentences):
            _append(folder, index, batch)
            batch = []
            path.write_text(json.dumps(index))
            progress.write_text(json.dumps(number + 1))


def _append(folder: Path, index: list[list[int]], batch: Iterable[Reading]) -> None:
    with (
        (folder / "ids").open("ab") as ids,
        (folder / "units").open("ab") as units,
        (folder / "f0").open("ab") as f0,
        (folder / "hidden").open("ab") as hidden,
    ):
        for reading in batch:
            first_id, first = index[-1][1::2] if index else (0, 0)
            index.append(
                [first_id, first_id + len(reading.ids_N), first, first + len(reading.f0_F)]
            )
            ids.write(reading.ids_N.tobytes())
            units.write(reading.units_N.tobytes())
            f0.write(reading.f0_F.tobytes())
            hidden.write(reading.hidden_FC.tobytes())


def _truncate(folder: Path, index: list[list[int]]) -> None:
    """Truncate what an interrupted run wrote beyond its index."""
    ends = index[-1][1::2] if index else (0, 0)
    sizes = {"ids": ends[0] * 2, "units": ends[0] * 2, "f0": ends[1] * 4}
    sizes["hidden"] = ends[1] * 2 * _HIDDEN_SIZE
    for name, size in sizes.items():
        with (folder / name).open("ab") as file:
            file.truncate(size)
