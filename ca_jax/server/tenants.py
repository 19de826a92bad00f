"""Whose a request is, by its API key.

A tenant is named by the server's own file, never by a client: its name, with a salt where the file has one, is in every
key of every tier and of the chunk store. Keys are held as SHA-256 and compared in constant time, each with all.

Not here: what tenants may hold of the store (`storage.quota`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ca_jax.storage.config import GIB

_FIELDS = {"keys", "keys_sha256", "salt", "quota_gib", "max_requests", "best_priority", "max_pinned", "metrics"}
_BEST_PRIORITY = -1000  # That a body may name.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tenant:
    """Who shares a store without meeting others' KV."""

    name: str = ""
    """As the server's file has it."""
    salt: str = ""
    """Of its keys: what was stored under another salt is not found any more."""
    quota_gib: float | None = None
    """Most it may hold in DRAM, and on SSD, GiB; None: as the store's config says."""
    max_requests: int | None = None
    """Most answers of it that are generated at a time, a request of `n` answers being n; None: no limit but the
    server's."""
    best_priority: int = 0
    """Lowest, and so best, `priority` that its requests may name; 0 is that of requests that name none."""
    max_pinned: int | None = 0
    """Most sessions that it may pin in the store; None: no limit."""
    metrics: bool = False
    """Whether its keys read `/metrics`, which counts what all tenants do."""

    @property
    def domain(self) -> str:
        """The engine's name of it."""
        return f"{self.name}.{hashlib.sha256(self.salt.encode()).hexdigest()[:16]}" if self.salt else self.name


EVERYBODY = Tenant(best_priority=_BEST_PRIORITY, max_pinned=None, metrics=True)
"""Whose requests are where keys are not asked for: nobody is there to be protected from."""


class Tenants:
    """Tenants by key.

    Args:
      keys: SHA-256 of each key, and whose it is; none where keys are not asked for.
    """

    def __init__(self, keys: Sequence[tuple[bytes, Tenant]] = ()) -> None:
        self._keys = tuple(keys)

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request without a key is refused."""
        return bool(self._keys)

    @property
    def all(self) -> tuple[Tenant, ...]:
        """Each tenant once."""
        return tuple(dict.fromkeys(tenant for _, tenant in self._keys)) or (EVERYBODY,)

    def quotas(self, given: Mapping[str, int]) -> dict[str, int]:
        """Most bytes of a tier that each may hold who has a quota of its own, by the engine's name of it.

        Args:
          given: bytes by the tenant's own name, beside those that the file gives.

        Raises:
          ValueError: there is no such tenant, or the file gives it a quota too.
        """
        quotas = {tenant.name: int(tenant.quota_gib * GIB) for tenant in self.all if tenant.quota_gib is not None}
        domains = {tenant.name: tenant.domain for tenant in self.all}
        for name in given:
            if name not in domains:
                raise ValueError(f"tenant_quotas must name tenants of the file of API keys, got {name!r}")
            if name in quotas:
                raise ValueError(f"tenant_quotas must leave out tenants that have a quota_gib, got {name!r}")
        return {domains[name]: num_bytes for name, num_bytes in (quotas | dict(given)).items()}

    def of_header(self, authorization: str | None) -> Tenant | None:
        """Whose a request with that `Authorization` header is; None where that says no known key."""
        if not self._keys:
            return EVERYBODY
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            key = ""
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, tenant in self._keys:  # All of them, so that time does not tell which.
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    @classmethod
    def read(cls, path: str | Path) -> Tenants:
        """Tenants of a TOML file, a table each:

            [lab-a]
            keys = ["sk-..."]            # or keys_sha256 = ["<hex>"], so that the file does not tell them
            salt = "any text"            # optional
            quota_gib = 2.0              # optional
            max_requests = 16            # optional: answers at a time
            best_priority = -10          # optional: the lowest `priority` that requests may name, else 0
            max_pinned = 8               # optional: sessions that it may pin, else 0

            [prometheus]
            keys = ["..."]
            metrics = true               # may read /metrics

        Raises:
          ValueError: the file is not like that; the message says where.
          OSError: it cannot be read.
        """
        with open(path, "rb") as file:
            try:
                tables = tomllib.load(file)
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: it must be TOML, got {error}") from error
        keys: list[tuple[bytes, Tenant]] = []
        for name, table in tables.items():
            try:
                keys += _keys_of(name, table)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        if not keys:
            raise ValueError(f"{path}: there must be at least one tenant with a key, got none")
        digests = [digest for digest, _ in keys]
        if len(set(digests)) < len(digests):
            raise ValueError(f"{path}: each key must be there once, got one twice")
        return cls(keys)


def _keys_of(name: str, table: Any) -> list[tuple[bytes, Tenant]]:
    if not isinstance(table, Mapping):
        raise ValueError(f"there must be a table for each tenant, got {name} = {table!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(f"a tenant's name must be 1 to 64 letters, digits, _, . or -, got {name!r}")
    if unknown := sorted(table.keys() - _FIELDS):
        raise ValueError(f"tenant {name}: fields must be of {', '.join(sorted(_FIELDS))}; got {', '.join(unknown)}")
    salt, quota, most = table.get("salt", ""), table.get("quota_gib"), table.get("max_requests")
    if not isinstance(salt, str):
        raise ValueError(f"tenant {name}: salt must be a text, got {salt!r}")
    if quota is not None and not (isinstance(quota, int | float) and quota > 0):
        raise ValueError(f"tenant {name}: quota_gib must be a number above 0, got {quota!r}")
    if most is not None and not (isinstance(most, int) and most > 0):
        raise ValueError(f"tenant {name}: max_requests must be a whole number above 0, got {most!r}")
    priority, pinned, metrics = table.get("best_priority", 0), table.get("max_pinned", 0), table.get("metrics", False)
    if type(priority) is not int or priority < _BEST_PRIORITY:
        raise ValueError(f"tenant {name}: best_priority must be a whole number from {_BEST_PRIORITY}, got {priority!r}")
    if type(pinned) is not int or pinned < 0:
        raise ValueError(f"tenant {name}: max_pinned must be a whole number from 0, got {pinned!r}")
    if not isinstance(metrics, bool):
        raise ValueError(f"tenant {name}: metrics must be true or false, got {metrics!r}")
    tenant = Tenant(
        name=name,
        salt=salt,
        quota_gib=quota,
        max_requests=most,
        best_priority=priority,
        max_pinned=pinned,
        metrics=metrics,
    )
    digests = []
    for key in _texts(name, table, "keys"):
        if len(key) < 8:
            raise ValueError(f"tenant {name}: keys must be at least 8 characters each, got one of {len(key)}")
        digests.append(hashlib.sha256(key.encode()).digest())
    for number, text in enumerate(_texts(name, table, "keys_sha256"), 1):
        if not re.fullmatch("[0-9a-fA-F]{64}", text):
            raise ValueError(f"tenant {name}: keys_sha256 must be 64 hex digits each, got others in number {number}")
        digests.append(bytes.fromhex(text))
    return [(digest, tenant) for digest in digests]


def _texts(name: str, table: Mapping[str, Any], field: str) -> list[str]:
    found = table.get(field, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"tenant {name}: {field} must be a list of texts, got {found!r}")
    return found
