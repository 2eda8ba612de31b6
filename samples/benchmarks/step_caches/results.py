"""The results so far, as a file: a run continues where the last one ended.

Owns the format. Knows no torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from triptych.core.process.atomic_files import write_whole

FEWER_STEPS = "fewer steps"
"""The comparison without a cache."""
_LEAST = 3


class Terms(msgspec.Struct, frozen=True):
    """The conditions of a measurement. A file has one set of terms."""

    steps: list[int]
    shares: list[float]
    num_images: int
    num_tuning: int
    num_trials: int
    guidance: float | None = None
    note: str = ""

    def __str__(self) -> str:
        scale = "the model's own" if self.guidance is None else f"{self.guidance:g}"
        return (
            f"{self.note or 'A model'}: {self.num_images} images, {self.num_trials} trials with"
            f" {self.num_tuning} others for each method and budget, guidance scale {scale}."
        )

    def changed(self, other: Terms) -> list[str]:
        """Names of the fields that differ in `other`."""
        return [
            name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)
        ]

    def budgets(self, num_steps: int) -> list[int]:
        """The numbers of computed steps, from few to many."""
        return sorted({max(_LEAST, round(share * num_steps)) for share in self.shares})


class Reference(msgspec.Struct, frozen=True):
    """Uncached images: the share named right, and how far those of another seed are."""

    right: float
    seeds_psnr_db: list[float]
    seeds_features: list[float]


class Cell(msgspec.Struct, frozen=True):
    """A method at its best settings, image by image.

    `cpu_share`: processor time by that of uncached images; `None` where there is no cache.
    """

    setting: dict[str, str | float]
    num_runs: list[float]
    psnr_db: list[float]
    ssim: list[float]
    features: list[float]
    right: float
    cpu_share: float | None


class _Document(msgspec.Struct):
    terms: Terms
    digest: str = ""
    references: dict[str, Reference] = {}
    cells: dict[str, dict[str, dict[int, Cell | None]]] = {}


class Results:
    """The file; it is written after each cell."""

    def __init__(self, path: Path, document: _Document) -> None:
        self._path = path
        self._document = document

    @classmethod
    def read(cls, path: Path) -> Results:
        """The results in the file, with their terms. Raises `FileNotFoundError` without one."""
        return cls(path, msgspec.json.decode(path.read_bytes(), type=_Document))

    @classmethod
    def open(cls, path: Path, terms: Terms) -> Results:
        """The results in the file, or empty ones. Raises `SystemExit` for other terms."""
        if not path.exists():
            return cls(path, _Document(terms=terms))
        found = cls.read(path)
        if changed := found.terms.changed(terms):
            raise SystemExit(f"{path} is of other terms ({', '.join(changed)}): {found.terms}")
        return found

    @property
    def terms(self) -> Terms:
        """The terms of the measurement."""
        return self._document.terms

    @property
    def samplings(self) -> dict[str, dict[str, dict[int, Cell]]]:
        """Cells by sampling, method and computed steps; without those that no setting reached."""
        return {
            sampling: {
                method: {count: cell for count, cell in sorted(cells.items()) if cell is not None}
                for method, cells in methods.items()
            }
            for sampling, methods in self._document.cells.items()
        }

    def reference(self, sampling: str) -> Reference:
        """The reference of the uncached images."""
        return self._document.references[sampling]

    def of_model(self, digest: str) -> None:
        """The cells are of this model. Raises `SystemExit` if they are of another."""
        if self._document.digest not in ("", digest):
            raise SystemExit(f"{self._path} is of another model: name another folder.")
        self._document.digest = digest

    def has(self, sampling: str, method: str, num_computed: int) -> bool:
        """Whether the cell is finished."""
        return num_computed in self._document.cells.get(sampling, {}).get(method, {})

    def put(self, sampling: str, method: str, num_computed: int, cell: Cell | None) -> None:
        """Write a finished cell; `None` if no setting computes so few steps."""
        methods = self._document.cells.setdefault(sampling, {})
        methods.setdefault(method, {})[num_computed] = cell
        self._write()

    def put_reference(self, sampling: str, reference: Reference) -> None:
        """Write the reference of the uncached images."""
        self._document.references[sampling] = reference
        self._write()

    def _write(self) -> None:
        write_whole(self._path, (msgspec.json.encode(self._document), b"\n"))
