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
from typing import Annotated, Any

import pydantic
import pydantic.dataclasses
from pydantic import Field

from ca_jax.storage.config import GIB

_BEST_PRIORITY = -1000  # That a body may name.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"strict": True})
class Tenant:
    """Users of a store who share KV with each other and with no other tenant."""

    name: str = ""
    """As the server's file has it."""
    salt: str = ""
    """Of its keys: what was stored under another salt is not found any more."""
    quota_gib: Annotated[float, Field(gt=0)] | None = None
    """Most it may hold in DRAM, and on SSD, GiB; None: as the store's config says."""
    max_requests: Annotated[int, Field(gt=0)] | None = None
    """Most answers of it that are generated at a time, a request of `n` answers being n; None: no limit but the
    server's."""
    best_priority: Annotated[int, Field(ge=_BEST_PRIORITY)] = 0
    """Lowest, and so best, `priority` that its requests may name; 0 is that of requests that name none."""
    max_pinned: Annotated[int, Field(ge=0)] | None = 0
    """Most sessions that it may pin in the store; None: no limit."""
    metrics: bool = False
    """Whether its keys read `/metrics`, which counts what all tenants do."""
    adapters: bool = False
    """Whether its keys load and unload adapters, which all tenants may use then."""

    @property
    def domain(self) -> str:
        """The engine's name of it."""
        return f"{self.name}.{hashlib.sha256(self.salt.encode()).hexdigest()[:16]}" if self.salt else self.name


EVERYBODY = Tenant(best_priority=_BEST_PRIORITY, max_pinned=None, metrics=True, adapters=True)
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
        # All of them, so that time does not tell which.
        found = [tenant for known, tenant in self._keys if hmac.compare_digest(known, digest)]
        return found[-1] if found else None

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
            adapters = true              # may load and unload adapters

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
        if len(dict(keys)) < len(keys):
            raise ValueError(f"{path}: each key must be there once, got one twice")
        return cls(keys)


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """The `Authorization` of a request's headers; of Anthropic's clients, what `x-api-key` says in its place."""
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")


class _Keys(pydantic.BaseModel):
    """The keys of a tenant's table."""

    model_config = pydantic.ConfigDict(strict=True)

    keys: list[Annotated[str, Field(min_length=8)]] = []
    keys_sha256: list[Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")]] = []


def _keys_of(name: str, table: Any) -> list[tuple[bytes, Tenant]]:
    if not isinstance(table, Mapping):
        raise ValueError(f"there must be a table for each tenant, got {name} = {table!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(f"a tenant's name must be 1 to 64 letters, digits, _, . or -, got {name!r}")
    known = {*_Keys.model_fields, *(field.name for field in dataclasses.fields(Tenant))} - {"name"}
    if unknown := sorted(table.keys() - known):
        raise ValueError(f"tenant {name}: fields must be of {', '.join(sorted(known))}; got {', '.join(unknown)}")
    try:
        found = _Keys(**{field: table[field] for field in _Keys.model_fields if field in table})
        tenant = Tenant(name=name, **{field: table[field] for field in table if field not in _Keys.model_fields})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field, *place = first["loc"]
        where = f"{field} number {int(place[0]) + 1}" if place else field
        got = "" if str(field).startswith("keys") else f", got {first['input']!r}"  # No log shows keys.
        raise ValueError(f"tenant {name}: {where} must {first['msg'].partition(' should ')[2]}{got}") from None
    digests = [hashlib.sha256(key.encode()).digest() for key in found.keys]
    return [(digest, tenant) for digest in (*digests, *map(bytes.fromhex, found.keys_sha256))]
