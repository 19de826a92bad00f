"""HAProxy of Ray Serve asking a deployment which replica a request goes to. Ray has no public name for it yet.

Private: `Application._with_ingress_request_router`, by which an application says which deployment is asked; the
argument `_reserve` of `DeploymentHandle.choose_replica`, false where the request comes by another way; and that HAProxy
knows a replica by `ReplicaID.to_full_id_str`. Ray 2.60 has them. Without them `cluster --direct` is refused, and
requests pass through an ingress as they do without it.

Not here: how HAProxy is switched on (`launch.cluster`), who is asked what (`cluster.direct`).
"""

from __future__ import annotations

from typing import Any


def with_chooser(engines: Any, chooser: Any) -> Any:
    """The application of bound engines, whose replicas HAProxy asks a bound deployment to choose among.

    Raises:
      ValueError: this Ray cannot.
    """
    if not hasattr(engines, "_with_ingress_request_router"):
        import ray

        raise ValueError(f"direct must be false with ray {ray.__version__}, whose HAProxy asks nobody for a replica")
    return engines._with_ingress_request_router(chooser)


async def choose(handle: Any, asked: Any) -> str:
    """The replica that a handle's router gives a request to, which is not sent there; as HAProxy knows it.

    Args:
      asked: what the router is told of the request.
    """
    from ray.serve.request_router import ReplicaID

    async with handle.choose_replica(asked, _reserve=False) as selection:
        return ReplicaID(unique_id=selection.replica_id, deployment_id=handle.deployment_id).to_full_id_str()
