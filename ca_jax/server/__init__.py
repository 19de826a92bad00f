"""The HTTP server: OpenAI's API over one engine, with its sessions, tenants and tiers visible.

    app, *_routes, live     the routes
    bodies                  bodies of requests
    Tenants                 whose a request is, by its key
    Service                 what is admitted, for how long, and what comes of it
    Router                  which conversation a request goes on with
    EngineLoop              the engine's thread, and the only way to it

Not here: flags (`launch.serve`), serving itself (`ca_jax.engine`).
"""
