"""A replica is given up for an engine that stands still while it runs itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.reports import Heartbeat
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import EngineDown
from triptych.core.router.replica import Replica
from triptych.core.transport.messages import MessageCodec

CODEC = MessageCodec(request=TokenRequest, payload=TokenDelta)


def beat() -> Heartbeat:
    return Heartbeat(
        turn=1,
        phase="idle",
        stall_budget_s=10.0,
        num_jobs=0,
        models=(),
        gauges={},
        counters={},
        histograms={},
    )


class Still:
    """A client whose engine is as its status says."""

    def __init__(self) -> None:
        self.now = EngineStatus(
            is_ready=True,
            is_alive=True,
            is_draining=False,
            beat_age_s=0.0,
            num_restarts=0,
            models=(),
            last_beat=beat(),
        )

    def status(self) -> EngineStatus:
        return self.now

    def change(self, **fields: Any) -> None:
        self.now = replace(self.now, **fields)


@pytest.fixture
def client() -> Still:
    return Still()


@pytest.fixture
def replica(client: Still) -> Replica:
    return Replica("a", client, CODEC, page_size=16, end_process=lambda: None)  # type: ignore[arg-type]


def test_silence_between_two_checks_is_the_engines(client: Still, replica: Replica) -> None:
    replica.check()
    client.change(beat_age_s=60.0)  # perhaps the whole machine was asleep
    replica.check()
    with pytest.raises(EngineDown, match="no progress"):
        replica.check()


def test_an_engine_that_goes_on_is_kept(client: Still, replica: Replica) -> None:
    for _ in range(3):
        client.change(beat_age_s=60.0)
        replica.check()
        client.change(beat_age_s=0.1, last_beat=beat())
        replica.check()


def test_an_engine_that_is_gone_is_gone_at_once(client: Still, replica: Replica) -> None:
    client.change(is_alive=False, reason="It fell.")
    with pytest.raises(EngineDown, match="It fell"):
        replica.check()
