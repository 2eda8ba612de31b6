"""What the API process needs to know of a model that sees, read by a process of its own.

Owns the question. transformers knows the defaults of every configuration, but loads torch where it
finds it, which the API process must not: `processing.probe`, run as a program, reads folders' names
as JSON, answers, and is gone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.typed import decode_json
from triptych.modalities.vlm.prepared import FactsReply, VisionFacts

_TIMEOUT_S = 120.0


def ask_facts(folders: Sequence[str]) -> tuple[VisionFacts, ...]:
    """The facts of each folder, in order. Raises as `read_facts` does."""
    try:
        done = subprocess.run(
            (sys.executable, "-P", "-m", "triptych.modalities.vlm.processing.probe"),
            input=msgspec.json.encode(folders),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError("A model that sees takes too long to be read.") from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").splitlines() or ["no reason given"]
        raise WeightsError(f"A model that sees cannot be read: {lines[-1][-300:]}")
    answer = decode_json(done.stdout, FactsReply)
    if answer.error:
        raise WeightsError(answer.error)
    return answer.facts
