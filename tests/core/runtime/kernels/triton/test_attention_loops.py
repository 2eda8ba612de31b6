"""The machine code of the attention loops: loads overlap products, and nothing is spilled."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from support.machine_code import machine_code
from support.tiers import first
from triptych.core.runtime.kernels.triton.compile import CompileTarget, _prepare_process

pytest.importorskip("triton")

LOADS_IN_FLIGHT = re.compile(r"\bDEPBAR\.LE SB0, 0x([0-9a-f]+)")


@pytest.mark.parametrize("target", first(["cuda:90", "cuda:80"]))
def test_loads_of_the_next_block_are_in_flight_during_products(target: str, tmp_path: Path) -> None:
    """A loop that loads page ids and keys in one turn waits for all its loads: group 0."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_prepare_process, initargs=(None,)
    ) as pool:
        job = pool.submit(machine_code, CompileTarget.parse(target), tmp_path)
        code = job.result()
    assert code.keys() == {"split", "causal"}
    for text in code.values():
        waits = [int(count, 16) for count in LOADS_IN_FLIGHT.findall(text)]
        assert max(waits) >= 2  # keys and values of one block at least
        assert "LDL" not in text
    if target == "cuda:90":  # a wait after every product means that the assembler serialized them
        num_waits = len(re.findall(r"WARPGROUP\.DEPBAR", code["causal"]))
        assert num_waits * 3 < code["causal"].count("HGMMA")
