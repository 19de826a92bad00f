"""Which kinds of traces there are."""

TRACE_FORMATS = ("sharegpt", "mooncake", "agents", "arrivals")
"""Conversations; requests with hashes of their prompts; calls of agents with their whole prompts; requests of which
lengths alone are known. A module of this package reads each."""
