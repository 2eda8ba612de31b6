"""The process of one rank of a parallel model: `python -m triptych.rank_process`.

Owns the process around a rank: configuration from the control line, notes to the engine process
that started it, exit codes. The loader does the rank's work (`core.runtime.engine.ranks`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from triptych.core.process import logs
from triptych.core.process.lazy import load
from triptych.core.process.typed import decode_json
from triptych.core.transport.control import ControlLine, Phase, Ready, run_child
from triptych.modalities import registry
from triptych.modalities.modality import modality_of

if TYPE_CHECKING:
    from triptych.core.runtime.engine.ranks import RankLoader, RankSetup

_log = logging.getLogger("triptych.rank_process")


def main() -> None:
    """Run the rank's process. Never returns."""
    line = ControlLine.open()
    config = line.read_config()
    setup: RankSetup = decode_json(config, load("triptych.core.runtime.engine.ranks:RankSetup"))
    logs.configure(setup.config.server)
    run_child(line, lambda: _run(line, setup), _log)


def _run(line: ControlLine, setup: RankSetup) -> None:
    from triptych.core.runtime.devices.device import open_device
    from triptych.core.runtime.engine.ranks import Plans

    device, ledger = open_device(setup.config.device)
    opener = load(modality_of(setup.model, registry.MODALITIES).engine)
    loader: RankLoader = opener(setup.model, setup.config, device, ledger)
    line.send(Phase("opened"))
    group = setup.join(device)
    loader.follow(Plans(setup.plans_fd), group, lambda: line.send(Ready()))


if __name__ == "__main__":
    main()
