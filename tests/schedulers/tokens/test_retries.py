"""Rows that begin again after a lack of memory: the size of their steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from triptych.schedulers.tokens.retries import Retries


def piece(num_tokens: int) -> Any:
    return SimpleNamespace(
        unit=Mock(is_paused=False), start=0, num_tokens=num_tokens, known_end=num_tokens
    )


def test_rows_begin_again_in_steps_of_half_the_tokens() -> None:
    retries = Retries()
    retries.restart([piece(4096), piece(64)])
    assert retries.max_tokens == 2080
    assert len(retries.restarts) == 2


def test_a_step_that_depended_on_the_failed_one_changes_nothing() -> None:
    retries = Retries()
    retries.restart([piece(4096)])
    retries.restart([])
    assert retries.max_tokens == 2048


def test_decoding_rows_compute_their_contexts_in_more_than_single_tokens() -> None:
    retries = Retries()
    retries.restart([piece(1), piece(1)])
    assert retries.max_tokens == 64
