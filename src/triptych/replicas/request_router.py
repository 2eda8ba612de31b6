"""Ray Serve's request router, which chooses by predicted seconds.

Owns the translation between Serve's replicas and requests and `core.router`. Runs in the ingress,
on the loop of Serve's routers.
"""

from __future__ import annotations

from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from triptych.core.router.report import LoadReport
from triptych.core.router.request import RouteChoice, RoutedRequest
from triptych.core.router.router import ReplicaRouter, RoutingPolicy


class PredictedSecondsRouter(RequestRouter):
    """Sends each request to the replica that is predicted to finish it first."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Create the router; called once by Serve with the deployment's arguments."""
        policy: RoutingPolicy = kwargs["policy"]
        self._router = ReplicaRouter(policy)
        self._by_name: dict[str, RunningReplica] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the replicas and their load reports; called by Serve."""
        self._by_name = {each.replica_id.unique_id: each for each in replicas}
        self._router.update(self._by_name.keys())
        for name, replica in self._by_name.items():
            if replica.routing_stats:
                self._router.report(name, msgspec.convert(replica.routing_stats, LoadReport))
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Stop using a dead replica before Serve's controller removes it; called by Serve."""
        self._router.remove(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Choose the one replica for a request, which counts as sent from now on.

        Serve calls it again if the replica refused the request.
        """
        if pending_request is None:
            return [candidate_replicas]
        routed: RoutedRequest = pending_request.args[0]
        request_id = pending_request.metadata.internal_request_id
        self._router.end(request_id)
        pending_request.routing_context.should_backoff = True
        choice = self._router.choose(routed)
        if choice is None:
            return []
        _note(choice, routed.choices)
        self._router.begin(request_id, choice, routed)
        pending_request.future.add_done_callback(
            lambda future: self._router.end(request_id) if future.cancelled() else None
        )
        return [[self._by_name[choice.replica]]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record the end of a request; called by Serve."""
        self._router.end(internal_request_id)


def _note(choice: RouteChoice, choices: list[RouteChoice] | None) -> None:
    """Record a choice for explanations; Serve may repeat the same choice many times."""
    if choices and choices[-1].replica == choice.replica:
        choices[-1] = choice
    elif choices is not None:
        choices.append(choice)
