"""Ray Serve's router of requests to engine replicas: their holder, the one that has least to do, or the ring.

One of these is in each process that sends requests. It knows what replicas publish, every second, and where it sent
what itself meanwhile.

Not here: the choice (`choice`).
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RunningReplica

from ca_jax.cluster.choice import Held, Load, order_of
from ca_jax.cluster.direct import Choice
from ca_jax.cluster.keys import Keys
from ca_jax.cluster.replica import WholeRequest

_MOST_SENT = 65_536  # Keys of which it is remembered where they were sent.


class HolderRouter(ConsistentHashRouter):
    """Sends a request to the replica that holds its conversation.

    Of what Ray Serve asks of a router: each rank is one replica, or the shortest queue of a rank would win; `super` has
    requests back off where all are full; and no request is given another one's choice, which first come, first served
    would do.

    Args (`RequestRouterConfig.request_router_kwargs`, beside those of the ring):
      num_slots: jobs that a replica runs at a time.
      may_move: whether a conversation can be gone on with by name on a replica that does not hold it, as replicas with
        a shared store could.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_slots = 1
        self._may_move = False
        self._published: dict[str, tuple[float, ReplicaID]] = {}
        self._sent = Held[ReplicaID](_MOST_SENT)

    def initialize_state(self, *, num_slots: int = 1, may_move: bool = False, **ring: Any) -> None:
        """As Ray Serve says."""
        super().initialize_state(**ring)
        self._num_slots, self._may_move = num_slots, may_move

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """As Ray Serve says: which are there, with what they publish."""
        super().update_replicas(replicas)
        held = (
            (key, (used_s, each.replica_id))
            for each in replicas
            for key, used_s in each.routing_stats.get("held", {}).items()
        )
        self._published = dict(sorted(held, key=lambda each: each[1][0]))  # The latest of several.

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """As Ray Serve says: ranks of one replica each."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        keys = None if pending_request is None else _keys(pending_request)
        if pending_request is None or keys is None or not pending_request.metadata.session_id:
            return ranks
        there = {rank[0].replica_id: rank[0] for rank in ranks}
        there |= {each.replica_id: each for each in candidate_replicas if each.replica_id not in there}
        key = pending_request.metadata.session_id
        known = [each for each in (self._published.get(key), self._sent.get(key)) if each is not None]
        present = [each for each in known if each[1] in there]
        order = order_of(
            list(there),
            {each: self._load(replica) for each, replica in there.items()},
            max(present, key=lambda each: each[0])[1] if present else None,
            was_held=bool(known),
            is_bound=keys.is_bound and not self._may_move,
        )
        if isinstance(pending_request.args[0], Choice) and order:  # It comes there, and is not routed.
            self._note(keys, key, order[0])
        return [[there[each]] for each in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """As Ray Serve says. What is bound to its holder says nothing of who that is."""
        super().on_request_routed(pending_request, replica_id, result)
        if (keys := _keys(pending_request)) is not None:
            self._note(keys, pending_request.metadata.session_id, replica_id)

    def _note(self, keys: Keys, key: str, replica_id: ReplicaID) -> None:
        if not keys.is_bound or self._may_move:
            self._sent.use({keys.key, key, *keys.names}, replica_id, time.time())

    def _load(self, replica: RunningReplica) -> Load:
        stats = replica.routing_stats
        known = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return Load(max(stats.get("share", 0.0), known / self._num_slots), stats.get("free_bytes", 0))


def _keys(pending_request: PendingRequest) -> Keys | None:
    """Of what is routed; None: Ray's own proxy asks, which HAProxy falls back to where it does not know a replica."""
    asked = pending_request.args[0] if pending_request.args else None
    return asked.keys if isinstance(asked, Choice | WholeRequest) else None
