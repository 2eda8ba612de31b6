"""Pages of window layers that hold digests: each row of a `token_world` must read its own past."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.core.engine_api.plan import TokenPlan, TokenRow

GARBAGE = b"garbage"


@dataclass
class Cell:
    """The content of a position."""

    digest: bytes = GARBAGE
    job_id: str = ""
    step_id: int = -1


@dataclass
class WindowSlot:
    """What the shadow device keeps for a batch slot: pages by their number in the row."""

    pages: dict[int, int] = field(default_factory=dict)
    end: int = 0


class ShadowWindows:
    """Pages of layers that see `window` tokens."""

    def __init__(self, window: int, num_pages: int, page_size: int) -> None:
        self.window, self.page_size = window, page_size
        self.cells = [[Cell() for _ in range(page_size)] for _ in range(num_pages)]
        self.slots: dict[int, WindowSlot] = {}
        self.in_flight: dict[int, list[tuple[str, set[int]]]] = {}
        self.num_left = 0

    def begin(self, plan: TokenPlan) -> None:
        """Before the rows of a step are computed: no page in use is written."""
        for row in plan.rows:
            if row.sampling is not None:
                self.slots[row.slot] = WindowSlot(end=row.first_window)
            slot = self.slots[row.slot]
            for page in [page for page in slot.pages if page < row.first_window]:
                del slot.pages[page]
                self.num_left += 1
            for part in row.new_window_ids:
                slot.pages[slot.end] = part
                slot.end += 1
        self.in_flight[plan.step_id] = [
            (row.job_id, {self._part(row, place) for place in self._places(row)})
            for row in plan.rows
        ]
        for row in plan.rows:
            written = {self._part(row, row.start + n) for n in range(row.num_tokens)}
            for entries in self.in_flight.values():
                for job_id, parts in entries:
                    assert job_id == row.job_id or parts.isdisjoint(written), "a page in use"

    def _places(self, row: TokenRow) -> range:
        return range(max(0, row.start - self.window + 1), row.start + row.num_tokens)

    def _part(self, row: TokenRow, position: int) -> int:
        return self.slots[row.slot].pages[position // self.page_size]

    def go_on(
        self, row: TokenRow, written: list[bytes], digests: list[bytes], step_id: int
    ) -> None:
        """Compute a row: `written` are digests of its positions, `digests` right ones."""
        for position in self._places(row):
            cell = self.cells[self._part(row, position)][position % self.page_size]
            if position < row.start:
                assert cell.digest == digests[position], f"{row.job_id} reads another's window"
                is_over = cell.step_id not in self.in_flight
                assert is_over or cell.job_id == row.job_id, "a window was found before its commit"
            else:
                cell.digest = written[position - row.start]
                cell.job_id, cell.step_id = row.job_id, step_id

    def spoil(self, plan: TokenPlan) -> None:
        """The plan raised: what it, and what came after it for its rows, wrote is garbage."""
        job_ids = {row.job_id for row in plan.rows}
        for page in self.cells:
            for cell in page:
                if cell.job_id in job_ids and cell.step_id >= plan.step_id:
                    cell.digest = GARBAGE
