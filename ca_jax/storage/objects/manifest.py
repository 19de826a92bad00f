"""What the shared tier says of one session: whose it is, its conversation, and where its KV lies. One object a session.

    sha256 of what follows, as hex, and a newline
    JSON

Not here: who may write it (ownership), the KV itself (parts).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
from typing import Any

from ca_jax.errors import CaJaxError

FORMAT = 1


class ManifestError(CaJaxError, ValueError):
    """An object is no manifest, of another version, or of another session than its name says."""


class ManifestDamagedError(ManifestError):
    """A manifest that does not pass its checksum: nobody's state any more, so that its session begins anew."""


@dataclasses.dataclass(frozen=True)
class PartRef:
    """KV of some tokens of a session, as one object."""

    name: str
    """Of the object."""
    first: int
    """Its first token, counted from the first one that the session's KV is kept of."""
    num_tokens: int
    tokens: str
    """SHA-256 of the ids of all tokens up to its last, as hex."""
    sums: tuple[int, ...]
    """crc32c of each layer's bytes, `[L]`."""
    layer_bytes: tuple[int, ...] = ()
    """Of each layer, `[L]`, where it is coded. Empty: as many as the layout says."""

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.first + self.num_tokens

    def num_bytes(self, token_bytes: int) -> int:
        """Of its layers, where a token of KV that is not coded has so many in all of them."""
        return sum(self.layer_bytes) if self.layer_bytes else self.num_tokens * token_bytes

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON; of KV that is not coded as they were before any was."""
        fields = {**dataclasses.asdict(self), "sums": list(self.sums), "layer_bytes": list(self.layer_bytes)}
        return fields if self.layer_bytes else {name: value for name, value in fields.items() if name != "layer_bytes"}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PartRef:
        """What `to_dict` gave, also after a way through JSON. Raises KeyError or TypeError where it is another."""
        lists = {name: tuple(fields.get(name, ())) for name in ("sums", "layer_bytes")}
        return cls(**{**fields, **lists})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """One session, in one state."""

    namespace: str
    """Names weights and layout: what has another one is never read."""
    key: str
    """Of the session, in every replica's store."""
    tenant: str
    session_id: str
    epoch: int
    """Counts owners: whoever takes over raises it."""
    owner: str
    """The replica that may write this manifest."""
    write_id: str
    """Names this write, so that a replica that had no answer knows its own."""
    mark: str
    """SHA-256 chained over all writes so far: two writers never have the same one."""
    conversation: bytes | None
    """As `Conversation.to_bytes`; None: it was forgotten, or has expired."""
    chain: str
    """Names all that was said in it, see `turns.conversations.chain_of`."""
    lineage: int = 0
    """The mark of its KV in a replica's store."""
    num_plain: int | None = None
    """First tokens whose KV has seen no token that left; None: all."""
    is_to_repair: bool = False
    """Whether the next turn computes some of that KV anew; what is published then is other KV of the same tokens."""
    parts: tuple[PartRef, ...] = ()
    """Its KV, in token order, without gaps from the first token on."""
    token_bytes: int = 0
    """Of a token in all layers, where it is not coded."""
    used_s: float = 0.0
    """When its last turn ended, by its owner's clock: for times to live and for who goes first, never for ownership."""
    ttl_s: float | None = None
    """How long it is kept after that, seconds; None: while there is room."""
    pinned: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is there."""
        return self.parts[-1].stop if self.parts else 0

    @property
    def num_bytes(self) -> int:
        """Of KV that it names."""
        return sum(part.num_bytes(self.token_bytes) for part in self.parts)

    def written(self, write_id: str, **changes: Any) -> Manifest:
        """The next state of it, by a write of that name."""
        after = dataclasses.replace(self, write_id=write_id, **changes)
        text = f"{self.mark} {after.epoch} {after.owner} {write_id} {after.chain} {after.lineage}"
        return dataclasses.replace(after, mark=hashlib.sha256(text.encode()).hexdigest())

    def to_bytes(self) -> bytes:
        """As an object."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["parts"] = [part.to_dict() for part in self.parts]
        if self.conversation is not None:
            fields["conversation"] = base64.b64encode(self.conversation).decode("ascii")
        body = json.dumps({"format": FORMAT, **fields}).encode()
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, data: bytes, *, namespace: str | None = None, key: str | None = None) -> Manifest:
        """What `to_bytes` gave.

        Args:
          namespace: that it must be of; None: any.
          key: likewise.

        Raises:
          ManifestError: it is damaged (`ManifestDamagedError`), of another version, or of another model, layout or
            session.
        """
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ManifestDamagedError(f"a manifest must pass its checksum, got {len(data)} bytes that do not")
        try:
            fields = json.loads(body)
            if fields.pop("format") != FORMAT:
                raise ManifestError(f"a manifest must be of version {FORMAT}, got another")
            if fields["conversation"] is not None:
                fields["conversation"] = base64.b64decode(fields["conversation"], validate=True)
            parts = tuple(PartRef.from_dict(part) for part in fields.pop("parts"))
            manifest = cls(parts=parts, **fields)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError, binascii.Error) as error:
            raise ManifestError(f"a manifest must have the fields of version {FORMAT}: {error}") from error
        for name, wanted in (("namespace", namespace), ("key", key)):
            if wanted is not None and (found := getattr(manifest, name)) != wanted:
                raise ManifestError(f"a manifest must be of {name} {wanted[:16]}, got {found[:16]}")
        return manifest


def manifest_name(namespace: str, key: str) -> str:
    """The object's name."""
    return f"v1/{namespace[:16]}/sessions/{key}"


def hint_name(namespace: str, tenant: str, chain: str) -> str:
    """Of the object that has the key of a session which stood, at the end of a turn, where a chain says."""
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}{chain}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"v1/{namespace[:16]}/chains/{digest}"
