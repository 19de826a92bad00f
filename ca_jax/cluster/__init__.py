"""Replicas of the server on Ray Serve, and an ingress that sends each conversation to the replica that holds it.

    client --> Ingress --> HolderRouter --> EngineReplica   the whole server (`ca_jax.server`), with an engine,
               (keys)      (choice)         EngineReplica   DRAM and SSD of its own
                                            EngineReplica

    keys         which conversation a request is of, as a key
    choice       which replica a key is sent to; which keys a replica holds
    router       that choice as Ray Serve asks for it
    ingress      reads requests and passes answers on
    replica      one server; its directory of the SSD tier (`directories`)
    deployment   all of it as one application of Ray Serve

Ray is needed by `router` and `deployment` alone. Nothing but `launch.cluster` imports this room.

Not here: flags (`launch.cluster`), what a request does (`ca_jax.server`).
"""
