"""Lines of states: their layout, copies, and the tokens of a step between snapshots."""

import torch

from triptych.core.engine_api.plan import TokenRow
from triptych.core.runtime.engine.step_states import StepStates
from triptych.core.runtime.layers.attention import KvCache, KvLayout, KvShape
from triptych.core.runtime.layers.states import RowStates, StateBatch, StateCut, StateShape

CPU = torch.device("cpu")
LAYERS = (
    (StateShape((3, 5), torch.bfloat16), StateShape((2, 4), torch.float32)),
    (StateShape((7,), torch.float32),),
)


def test_parts_of_all_layers_share_a_line_and_nothing_else() -> None:
    states = RowStates(LAYERS, num_slots=2, num_snapshots=3, device=CPU)
    assert states.num_bytes == 5 * 3 * 64
    parts = [part for layer in states.layers for part in layer]
    assert [part.shape for part in parts] == [(5, 3, 5), (5, 2, 4), (5, 7)]
    for number, part in enumerate(parts):
        part[1] = number + 1
    assert all((part[1] == number + 1).all() for number, part in enumerate(parts))
    assert all((part[[0, 2, 3, 4]] == 0).all() for part in parts)
    states.copy([(1, states.snapshot_line(2)), (1, 0)])
    states.clear([1])
    assert all((part[[0, 4]] == number + 1).all() for number, part in enumerate(parts))
    assert all((part[1:4] == 0).all() for part in parts)


def test_a_cache_of_pages_and_states_has_the_bytes_that_its_layout_states() -> None:
    shape = KvShape(num_heads=2, num_kv_heads=1, head_dim=4)
    layout = KvLayout(shapes=(shape,), page_size=4, dtype=torch.float32, states=LAYERS)
    kv = KvCache(layout, 2, CPU, num_slots=2, num_snapshots=1)
    assert kv.states is not None
    assert kv.states.num_bytes == 3 * layout.state_bytes
    assert sum(tensor.nbytes for tensor in kv.tensors) == 3 * layout.page_bytes
    plain = KvLayout(shapes=(shape,), page_size=4, dtype=torch.float32)
    assert KvCache(plain, 2, CPU, num_slots=2).states is None
    assert str(plain) != str(layout)


def row(slot: int, start: int, num_tokens: int, **given: object) -> TokenRow:
    fields = {"job_id": "", "slot": slot, "start": start, "num_tokens": num_tokens}
    return TokenRow(**fields, **given)  # type: ignore[arg-type]


def test_a_step_brings_states_in_and_keeps_those_that_are_saved() -> None:
    states = RowStates(LAYERS, num_slots=3, num_snapshots=2, device=CPU)
    (part,) = states.layers[1]
    steps = StepStates(states, max_batch_size=2)
    steps.begin([row(1, 0, 9)])
    part[:] = torch.arange(5.0)[:, None]
    rows = (
        row(1, 9, 1),
        row(0, 8, 8, restored_snapshot=1, saved_snapshots=((12, 0), (16, 1))),
    )
    steps.begin(rows)
    assert part[:, 0].tolist() == [4, 1, 2, 3, 4]
    batch = steps.batch((*rows, row(-1, 0, 1)), torch.tensor([1, 0, 2]))
    assert batch.host_slots_B == [1, 0, 2]
    assert batch.cuts == [StateCut(1, 4, 3)]
    part[0] = 7
    steps.end(rows)
    assert part[:, 0].tolist() == [7, 1, 2, 3, 7]
    steps.begin([row(1, 0, 4)])
    assert part[:, 0].tolist() == [7, 0, 2, 3, 7]


def test_a_row_goes_back_to_before_a_wrong_draft() -> None:
    states = RowStates(LAYERS, num_slots=2 + 2, num_snapshots=1, device=CPU)
    (part,) = states.layers[1]
    steps = StepStates(states, max_batch_size=2)
    drafted = row(1, 0, 9, num_drafts=3, saved_snapshots=((4, 0),))
    steps.begin([drafted])
    assert steps.batch([drafted], torch.tensor([1])).cuts == [StateCut(0, 4, 4), StateCut(0, 6, 3)]
    part[:] = torch.arange(5.0)[:, None]
    steps.end([drafted])
    assert part[:, 0].tolist() == [0, 1, 2, 3, 4]
    again = row(1, 6, 4, num_drafts=2, saved_snapshots=((8, 0),))
    steps.begin([again])
    assert part[:, 0].tolist() == [0, 3, 2, 3, 4]
    assert steps.batch([again], torch.tensor([1])).cuts == [StateCut(0, 2, 3)]
    part[3] = 7
    steps.end([again])
    assert part[:, 0].tolist() == [0, 3, 2, 7, 7]
    steps.begin([row(1, 10, 1)])
    assert part[:, 0].tolist() == [0, 3, 2, 7, 7]


def test_segments_end_at_cuts_and_rows() -> None:
    batch = StateBatch(torch.tensor([0]), [0, 1, 2], [StateCut(1, 2, 8), StateCut(1, 5, 9)])
    segments = [tuple(segment) for segment in batch.segments([1, 6, 2])]
    assert segments == [(0, 0, 1, -1), (1, 1, 3, 8), (1, 3, 6, 9), (1, 6, 7, -1), (2, 7, 9, -1)]
