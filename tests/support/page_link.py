"""A decode and a prefill scheduler with a connection between them that a test moves by hand."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from support.shadow_parts import shadow_memories
from support.token_driver import Driver
from support.token_world import MODEL, VOCAB_SIZE, World
from triptych.core.engine_api.job import Job, Output
from triptych.core.errors import TriptychError, to_info
from triptych.core.kv.parts import PagePart
from triptych.core.kv.transfer.client import PageFetch
from triptych.core.kv.transfer.memory import new_counts
from triptych.core.kv.transfer.messages import FetchPages
from triptych.schedulers.roles.page_exchange import FetchedPages, SentPages


@dataclass(eq=False)
class ManualTransfer:
    """A `PageTransferRequest` whose pages wait for a test to carry them."""

    wanted: FetchPages
    fetch: PageFetch | None = None
    pages: list[PagePart] = field(default_factory=list)
    reason: str = ""

    def add(self, parts: list[PagePart]) -> None:
        self.pages += parts

    def end(self, reason: str) -> None:
        self.reason = reason


class HandLink:
    """Implements `PageSource` and `PageSink`."""

    def __init__(self, decode: World, prefill: World) -> None:
        self.decode, self.prefill = decode, prefill
        self.counts: Counter[str] = new_counts(4)
        self.is_connected = True
        self.open: list[ManualTransfer] = []
        self.transfers: SentPages | None = None
        ends = [shadow_memories(prefill), shadow_memories(decode)]
        self.memories = {kind: (ends[0][kind], ends[1][kind]) for kind in ends[0]}
        decode.scheduler.exchange = FetchedPages(decode.scheduler, self)
        sent = SentPages(prefill.scheduler, self, MODEL)
        prefill.scheduler.exchange = sent
        prefill.scheduler.tokens.vocab_size = VOCAB_SIZE
        sent.attach(self._submit)

    # As the schedulers see it.

    def start(self, what: Any) -> None:
        if isinstance(what, SentPages):
            self.transfers = what
            return
        transfer = ManualTransfer(
            FetchPages(
                fetch_id=what.fetch_id,
                request=what.request,
                first=what.first,
                num_pages=what.num_pages,
                num_parts=len(what.parts),
            ),
            what,
        )
        self.open.append(transfer)
        self.place(transfer)

    def stop(self, fetch: PageFetch) -> None:
        (transfer,) = (transfer for transfer in self.open if transfer.fetch is fetch)
        self.end(transfer)

    def _submit(self, job: Job) -> None:
        world, sink = self.prefill, job.sink

        def both(output: Output) -> None:
            world.outputs(output)
            sink(output)

        job = structs.replace(job, sink=both, feed=both, arrival_s=world.now_s)
        try:
            world.scheduler.submit(job)
        except TriptychError as error:
            sink(Output(job_id=job.job_id, is_final=True, error=to_info(error)))
        else:
            world.requests[job.job_id], world.jobs[job.job_id] = job.request, job

    # As a test moves it.

    def place(self, transfer: ManualTransfer) -> None:
        assert self.transfers is not None
        self.transfers.open(transfer)  # type: ignore[arg-type]

    def carry(self, transfer: ManualTransfer, num_pages: int = 1) -> None:
        """The next pages that are ready reach the other cache."""
        fetch = transfer.fetch
        assert fetch is not None
        for part in transfer.pages[:num_pages]:
            target = fetch.parts[fetch.num_arrived]
            assert (part.key, part.kind) == (target.key, target.kind)
            source, sink = self.memories[part.kind]
            content = memoryview(bytearray(source.page_bytes))
            source.read(part.number, content)
            sink.write(target.number, content)
            fetch.num_arrived += 1
            fetch.arrived(fetch.num_arrived)
        del transfer.pages[:num_pages]
        if fetch.num_arrived == len(fetch.parts):
            self.end(transfer)

    def end(self, transfer: ManualTransfer) -> None:
        """Nothing more of a transfer is carried."""
        self.open.remove(transfer)
        assert self.transfers is not None
        self.transfers.close(transfer)  # type: ignore[arg-type]
        assert transfer.fetch is not None
        transfer.fetch.ended()

    def carry_all(self) -> None:
        """Have prompts computed and pages carried until nothing is left to do."""
        while self.open:
            self.prefill.book()
            self.prefill.commit()
            for transfer in tuple(self.open):
                self.carry(transfer, 99)
                if transfer in self.open and transfer.reason:
                    self.end(transfer)

    def act(self, rng: random.Random) -> None:
        """Something happens to some fetch."""
        if not self.open:
            return
        transfer = rng.choice(self.open)
        if transfer.reason or rng.random() < 0.03:
            self.end(transfer)
        else:
            self.carry(transfer, rng.choice((1, 1, 2, 9)))


def drive_pair(seed: int, num_actions: int, link: HandLink) -> None:
    """Both worlds' lives at random, with a connection that comes and goes."""
    rng = random.Random(seed)
    decode, prefill = Driver(link.decode, rng), Driver(link.prefill, rng)
    for _ in range(num_actions):
        draw = rng.random()
        if draw < 0.45:
            decode.act()
        elif draw < 0.7:
            prefill.act()
        elif draw < 0.98:
            link.act(rng)
        else:
            link.is_connected = not link.is_connected
            for transfer in tuple(link.open):
                link.end(transfer)
        link.decode.check()
        link.prefill.check()
    for transfer in tuple(link.open):
        link.end(transfer)
    decode.finish()
    prefill.finish()
    assert not link.decode.scheduler.tokens.state.in_transfer
    assert not link.decode.scheduler.tokens.state.arriving
    assert not link.prefill.scheduler.tokens.state.in_transfer
