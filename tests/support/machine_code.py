"""The machine code of attention kernels, compiled in a process that does not interpret them.

The process imports this module by its name, which it cannot do with a module of tests.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from triptych.core.runtime.kernels.triton.compile import CompileTarget


def machine_code(target: CompileTarget, folder: Path) -> dict[str, str]:
    """The code of the loops over bfloat16 of Llama 3 8B, by variant."""
    from triton import knobs

    from triptych.core.runtime.kernels.triton import compile as command
    from triptych.core.runtime.kernels.triton import paged_decode, paged_prefill

    code = {}
    for variant in (*paged_decode.variants(), *paged_prefill.variants()):
        if variant.name in {"split", "causal"} and target.takes(variant):
            file = folder / variant.name
            file.write_bytes(command._call_compiler(variant, target).asm["cubin"])
            nvdisasm = [knobs.nvidia.nvdisasm.path, "-c", str(file)]
            code[variant.name] = subprocess.run(
                nvdisasm, check=True, capture_output=True, text=True
            ).stdout
    return code
