"""Steps of a turn at which a process can be killed or stopped: the product's own functions tell of them.

Not here: what happens at one (replica, mortal).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ca_jax.device.runner import Runner
from ca_jax.kv.object_transfers import SharedKV
from ca_jax.storage.objects import parts
from ca_jax.storage.objects.store import ObjectStore
from ca_jax.storage.store import AttentionStore
from tests import engine_kit as kit

TOLD = ("restore", "load", "prefill", "decode", "object", "manifest", "published")
"""Steps that `tell_steps` tells of, in their order: before KV of objects is read, before KV of DRAM is, behind a pass
of prefill, behind a step of decoding, once an object of KV is written, before a manifest is, and behind that."""


def tell_steps(at: Callable[[str], None]) -> None:
    """Has this process call `at` with a step's name whenever it comes to one, on the thread that does.

    KV is published in objects small enough for turns of tests to have several.
    """
    parts.RUN_BYTES = 2 * kit.BLOCK_TOKENS * kit.TOKEN_BYTES

    def before_write(_: ObjectStore, name: str, *__: object, **___: object) -> None:
        if "/sessions/" in name:
            at("manifest")

    def after_write(_: ObjectStore, name: str, *__: object, **___: object) -> None:
        if "/kv/" in name:
            at("object")
        if "/sessions/" in name:
            at("published")

    _hook(SharedKV, "restore", before=lambda *_, **__: at("restore"))
    _hook(AttentionStore, "prepare_load", before=lambda *_, **__: at("load"))
    _hook(Runner, "run_pass", after=lambda *_, **__: at("prefill"))
    _hook(Runner, "decode", after=lambda *_, **__: at("decode"))
    _hook(ObjectStore, "write", before=before_write, after=after_write)


def _hook(
    owner: type,
    name: str,
    before: Callable[..., None] = lambda *_, **__: None,
    after: Callable[..., None] = lambda *_, **__: None,
) -> None:
    method = getattr(owner, name)

    def hooked(*args: Any, **options: Any) -> Any:
        before(*args, **options)
        result = method(*args, **options)
        after(*args, **options)
        return result

    setattr(owner, name, hooked)
