"""The HTTP server: OpenAI's API over one engine, with its sessions, tenants and tiers visible.

    EngineLoop      the engine's thread, and the only way to it
    Router          which conversation a request goes on with
    Tenants         whose a request is, by its key
    openai_*        bodies in and out
    app             the routes

Not here: flags (`launch.serve`), serving itself (`ca_jax.engine`).
"""
