"""Children are kept alive, given up, drained and never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from support import supervised_child
from triptych.core.errors import SetupError
from triptych.core.transport.control import Phase, Ready
from triptych.core.transport.supervisor import ChildSpec, Policy, Supervisor

CHILD = supervised_child.__file__
POLICY = Policy(first_backoff_s=0.01, drain_timeout_s=-4.5)  # a child gets 5 s more than this


class Witness:
    """An observer that remembers, and can be waited for."""

    def __init__(self):
        self.notes = []
        self.gone = []
        self.changed = asyncio.Event()

    def on_note(self, child, note):
        self.notes.append((child, note))
        self.changed.set()

    def on_gone(self, child, reason, restart_in_s):
        self.gone.append((child, reason, restart_in_s))
        self.changed.set()

    def on_drain(self):
        self.is_draining = True

    def num_ready(self, child="child"):
        return sum(1 for name, note in self.notes if isinstance(note, Ready) and name == child)

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()


def spec(behaviour, name="child", **config):
    return ChildSpec(
        name=name,
        argv=(sys.executable, CHILD),
        config=json.dumps({"behaviour": behaviour, **config}).encode(),
    )


def start(*specs, policy=POLICY):
    witness = Witness()
    supervisor = Supervisor(specs, policy, witness)
    return supervisor, witness, asyncio.create_task(supervisor.run())


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_child_starts_reports_and_drains_with_exit_code_0():
    supervisor, witness, run = start(spec("well"))
    await witness.until(lambda w: w.num_ready())
    assert ("child", Phase("think")) in witness.notes
    supervisor.stop()
    assert await run == 0
    assert witness.gone == []


async def test_a_child_that_was_killed_starts_again():
    _, witness, run = start(spec("die"))
    await witness.until(lambda w: len(w.gone) == 2)
    assert witness.gone[0] == ("child", "was killed by SIGKILL", 0.01)
    assert witness.gone[1][2] == 0.04
    with pytest.raises(SetupError):
        await run


async def test_the_third_crash_opens_the_circuit():
    _, witness, run = start(spec("crash"))
    with pytest.raises(SetupError, match=r"code 7\. It is not restarted after 3 crashes"):
        await run
    assert [restart for _, _, restart in witness.gone] == [0.01, 0.04, None]


async def test_what_the_first_start_found_every_later_one_is_given():
    _, witness, run = start(spec("keep", other={"deep": [1]}))
    with pytest.raises(SetupError):
        await run
    starts = [note.name for _, note in witness.notes if isinstance(note, Phase)]
    assert [name for name in starts if name != "think"] == ["start 0", "start 1", "start 1"]


async def test_crashes_long_ago_are_forgiven():
    policy = Policy(first_backoff_s=0.01, crash_window_s=0.0)
    supervisor, witness, run = start(spec("crash"), policy=policy)
    await witness.until(lambda w: len(w.gone) == 5)
    supervisor.stop()
    assert await run == 0
    assert {restart for _, _, restart in witness.gone} == {0.01}


async def test_a_child_that_cannot_start_ends_the_tree_with_its_own_words():
    _, witness, run = start(spec("fail"), spec("well", name="other"))
    with pytest.raises(SetupError, match="made of cheese"):
        await run
    assert witness.gone == []


async def test_a_silent_child_writes_its_stacks_and_is_killed(capfd):
    supervisor, witness, run = start(spec("hang", stall_budget_s=0.2))
    await witness.until(lambda w: w.gone)
    assert witness.gone[0][1] == "hung"
    assert "supervised_child.py" in capfd.readouterr().err
    supervisor.stop()
    await run


async def test_a_machine_that_stood_still_ends_no_child():
    supervisor, witness, run = start(spec("well", stall_budget_s=1.0))
    await witness.until(lambda w: w.num_ready())
    pid = supervisor._children["child"]._process.pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2)  # noqa: ASYNC251 - this process stands still, too
    await asyncio.sleep(0.3)  # and the child needs longer than this one to go on
    os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(1.5)
    assert witness.gone == []
    os.kill(pid, signal.SIGSTOP)  # alone, it is ended
    await witness.until(lambda w: w.gone)
    assert witness.gone[0][1] == "hung"
    supervisor.stop()
    await run


async def test_a_child_that_never_beats_is_killed_after_the_start_budget():
    policy = Policy(start_budget_s=0.3, max_crashes=1)
    _, witness, run = start(spec("starve"), policy=policy)
    with pytest.raises(SetupError, match="hung"):
        await run
    assert witness.gone == [("child", "hung", None)]


async def test_a_child_that_does_not_drain_is_killed():
    supervisor, witness, run = start(spec("stubborn"))
    await witness.until(lambda w: w.num_ready())
    supervisor.stop()
    assert await run == 1


async def test_a_second_signal_ends_at_once():
    supervisor, witness, run = start(spec("stubborn"), policy=Policy())
    await witness.until(lambda w: w.num_ready())
    supervisor.stop()
    supervisor.stop(signal.SIGINT)
    assert await run == 128 + signal.SIGINT


async def test_children_drain_in_order():
    supervisor, witness, run = start(
        spec("stubborn", name="first"), spec("well", name="second"), policy=POLICY
    )
    await witness.until(lambda w: w.num_ready("first") and w.num_ready("second"))
    supervisor.stop()
    await asyncio.sleep(0.2)
    assert "second" in supervisor._children
    await run


async def test_what_a_child_started_goes_with_it(tmp_path):
    pid_file = tmp_path / "pid"
    supervisor, witness, run = start(spec("parent", pid_file=str(pid_file)))
    await witness.until(lambda w: w.num_ready())
    pid = int(pid_file.read_text())
    assert is_running(pid)
    supervisor.stop()
    await run
    async with asyncio.timeout(5):
        while is_running(pid):  # noqa: ASYNC110 (a process sends no event)
            await asyncio.sleep(0.01)


async def test_a_cancelled_supervisor_leaves_no_child():
    supervisor, witness, run = start(spec("well"))
    await witness.until(lambda w: w.num_ready())
    pid = supervisor._children["child"]._process.pid
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not is_running(pid)
