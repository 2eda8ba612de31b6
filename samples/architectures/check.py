"""Judge every architecture that the installed transformers and diffusers know.

python samples/architectures/check.py               # all; writes results.json, in ten minutes
python samples/architectures/check.py olmo2 bloom   # these causal types; writes nothing
python samples/architectures/page.py > docs/architectures.md

Owns the loop over the catalog and the file of results.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from catalog import catalog, versions
from judge import judge

RESULTS = Path(__file__).with_name("results.json")


def check_kind(kind: str, types: dict[str, str]) -> dict[str, dict[str, str]]:
    """Judge some types of a kind, and print each verdict. One that fails is printed in full."""
    found = {}
    for name, architecture in types.items():
        try:
            verdict = asdict(judge(kind, name, architecture))
        except Exception:  # the others are judged all the same
            traceback.print_exc()
            verdict = {"runs": "FAILED", "reason": ""}
        print(f"{kind:12}{name:32}{verdict['runs']:14}{verdict['reason']}", flush=True)
        found[name] = {"class": architecture, **verdict}
    return found


def main() -> int:
    """Judge the types that are named, or all; 1 if one failed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    known = catalog()
    if names := sys.argv[1:]:
        found = {"chat": check_kind("chat", {name: known["chat"][name] for name in names})}
    else:
        found = {kind: check_kind(kind, types) for kind, types in known.items()}
        RESULTS.write_text(json.dumps({"versions": versions(), **found}, indent=1) + "\n", "utf-8")
    return int(any(each["runs"] == "FAILED" for types in found.values() for each in types.values()))


if __name__ == "__main__":
    sys.exit(main())
