"""Answers of a WebSocket, each followed as a request of its own.

Owns their entries among the recent requests and their spans, so that explanations and traces have
them. The socket is a request, too, with the jobs of all its answers. Knows no messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triptych.core.http.context import Context
from triptych.core.http.disconnect import CLIENT_GONE
from triptych.core.http.errors import to_public
from triptych.core.http.recent_requests import RecentRequests
from triptych.core.http.tracing import RequestTracing


@dataclass(frozen=True, slots=True)
class SocketAnswers:
    """Follows the answers of the sockets of a route; job ids begin with their call ids."""

    recent: RecentRequests
    tracing: RequestTracing | None
    route: str = ""

    @contextmanager
    def follow(self, context: Context, answer_id: str) -> Iterator[None]:
        """Follow an answer while it is made. `context` is its own, `answer_id` is its request id.

        Its status is that of its error, 499 if it was interrupted.
        """
        call_id, status = context.call_id, 200
        entry = self.recent.add(context.principal.owner, answer_id, call_id)
        traced = self.tracing.begin_answer(call_id, answer_id) if self.tracing else None
        try:
            yield
        except Exception as error:
            status = to_public(error).status
            raise
        except BaseException:  # it was cancelled or closed
            status = CLIENT_GONE
            raise
        finally:
            entry.end(self.route, status)
            if self.tracing is not None and traced is not None:
                self.tracing.end(traced, status)

    def rename(self, context: Context, answer_id: str, new_id: str) -> None:
        """Let an answer be found under `new_id`: it was begun before its request had an id.

        The span of an answer that has ended keeps the old one.
        """
        self.recent.rename(context.principal.owner, answer_id, new_id)
        if self.tracing is not None:
            self.tracing.rename(f"{context.call_id}.{answer_id}", new_id)
