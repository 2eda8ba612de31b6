"""Checks grammars of callers in child processes before jobs are submitted.

Owns the child processes, their limits of time and memory, and a cache of recent results. The event
loop never waits for a check.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestError
from triptych.core.grammar.constraint import Constraint
from triptych.core.limits import MAX_GRAMMAR_BYTES
from triptych.core.media.child import DecodeLimits, DecodePool, FatalInput
from triptych.modalities.llm.api import grammar_child

LIMITS: Final = DecodeLimits(
    memory_bytes=512 * 2**20,
    cpu_s=2,
    wall_s=20.0,
    input_bytes=MAX_GRAMMAR_BYTES,
    output_bytes=16 * 2**20,
    num_waiting=256,
    num_requests_per_child=2**31,
    niceness=10,
)
_NUM_CHILDREN: Final = 2
_MAX_KEPT: Final = 128


class GrammarChecker:
    """Checks grammars over the tokens of one model. Starts nothing before it is used."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._args = {"folder": str(folder), "vocab_size": vocab_size}
        self._pool: DecodePool | None = None
        self._kept: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, constraint: Constraint) -> str:
        """The engine's grammar. Raises a `RequestError` if it is invalid or too costly."""
        constraint.check_size()
        parts = [part.encode() for part in constraint.parts]
        sizes = [*map(len, parts)]
        data = b"".join(parts)
        key = hashlib.sha256(f"{constraint.kind} {sizes} ".encode() + data).digest()
        if key not in self._kept:
            grammar = await self._compile(constraint, data, sizes)
            self._kept[key] = grammar
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def start(self) -> None:
        """Start a child process, so that the first grammar does not wait for it."""
        if self._pool is None:
            self._pool = self._open_pool()
            self._pool.start(1)

    async def close(self) -> None:
        """Stop the child processes."""
        if self._pool is not None:
            await self._pool.close()

    async def _compile(self, constraint: Constraint, data: bytes, sizes: Sequence[int]) -> str:
        if self._pool is None:
            self._pool = self._open_pool()
        try:
            checked = await self._pool.run("check", data, kind=constraint.kind, sizes=sizes)
        except RequestError as error:
            raise _about(error, constraint.param) from error
        return str(checked.data, "utf-8")

    def _open_pool(self) -> DecodePool:
        return DecodePool(
            [grammar_child.__name__],
            num_children=_NUM_CHILDREN,
            limits=LIMITS,
            args=self._args,
            things="grammars",
        )


def _about(error: RequestError, param: str) -> RequestError:
    """The error of a failed or aborted check, about `param`; the child's error is about files."""
    if isinstance(error, FatalInput | PayloadTooLarge):
        return InvalidRequest(
            f"{param} takes over {LIMITS.cpu_s} s or {LIMITS.memory_bytes // 2**20} MiB to"
            " compile: simplify it.",
            param=param,
        )
    return type(error)(error.message, param=param)
