"""Objects at a URL, read whole or in part and written on a condition, each within a deadline.

Any of TensorStore's key-value stores will do: `s3://`, `gs://`, `file://` on a file system that replicas share,
`memory://`. What is written on a condition is how replicas agree, so a store that ignores conditions is refused.

Not here: what the objects are (manifest, parts), who may write them (ownership).
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import tensorstore as ts

from ca_jax.errors import CaJaxError

# Of files: one that waits for a lock, which another replica holds as it writes, must not keep all others from theirs.
_IO_THREADS = 64
_ENDPOINT = "AWS_ENDPOINT_URL"
T = TypeVar("T")


class ObjectsError(CaJaxError):
    """The store of objects did not do what it was asked: it cannot be reached, refuses, or takes too long."""


class ObjectsUnfitError(CaJaxError, ValueError):
    """The store of objects cannot be used; the message says why."""


@dataclasses.dataclass(frozen=True)
class Read:
    """Asks what an object is now."""

    name: str


@dataclasses.dataclass(frozen=True)
class Write:
    """Asks to write an object if it is of a generation still."""

    name: str
    value: bytes
    replaces: bytes
    """The generation that it must be of."""


@dataclasses.dataclass(frozen=True)
class Found:
    """An object as it was read."""

    value: bytes | None
    """None: there is none."""
    generation: bytes
    """Names this state of it; that there is none is a state too."""


Steps = Generator[Read | Write, Any, T]
"""A protocol, as the reads and writes it makes. It is sent a `Found` for a read, and for a write the new generation, or
None where another state was found; where it is not known what became of one, an `ObjectsError` is thrown into it."""


class ObjectStore:
    """A TensorStore key-value store. Any thread may call; each call waits, for as long as the deadline at most.

    Args:
      url: of TensorStore, or its JSON spec. Names of objects go behind it.
      deadline_s: longest wait, seconds.

    Raises:
      ObjectsUnfitError: the URL is none of TensorStore's, or cannot be opened.
    """

    def __init__(self, url: str, deadline_s: float) -> None:
        self.url = url
        """As it was given."""
        self._deadline_s = deadline_s
        try:
            opening = ts.KvStore.open(
                _spec_of(url), context=ts.Context({"file_io_concurrency": {"limit": _IO_THREADS}})
            )
            self._store = opening.result(timeout=deadline_s)
        except (ValueError, OSError) as error:  # A TimeoutError among them.
            raise ObjectsUnfitError(
                f"objects_url must be a URL that TensorStore can open, got {url!r}: {error}"
            ) from error

    def read(self, name: str, start: int = 0, stop: int | None = None, *, may_be_short: bool = False) -> Found:
        """An object, or its bytes from `start` to `stop`.

        Args:
          may_be_short: gives all of an object that has no such bytes.

        Raises:
          ObjectsError: it cannot be read, or has no such bytes.
        """
        return self.begin_read(name, start, stop, may_be_short=may_be_short)()

    def begin_read(
        self, name: str, start: int = 0, stop: int | None = None, *, may_be_short: bool = False
    ) -> Callable[[], Found]:
        """Begins what `read` does, and does not wait. What is returned waits for it, and raises as `read` does."""
        part = None if stop is None and not start else slice(start, stop)
        reading = self._store.read(name, byte_range=part)

        def wait() -> Found:
            try:
                found = reading.result(timeout=self._deadline_s)
            except (ValueError, OSError) as error:
                if may_be_short and "OUT_OF_RANGE" in str(error):
                    return self.read(name)
                raise self._failed("read", name, error) from error
            return Found(None if found.state == "missing" else found.value, found.stamp.generation)

        return wait

    def write(self, name: str, value: bytes | None, *, replaces: bytes | None = None) -> bytes | None:
        """Writes an object, or deletes it (None).

        Args:
          replaces: the generation that it must be of; None: whatever is there.

        Returns:
          Its new generation; None where it is of another one than `replaces`, and was left as it is.

        Raises:
          ObjectsError: it is not known whether it was written.
        """
        if replaces == b"":  # To TensorStore that is no condition.
            raise ValueError("replaces must name a generation, got an empty one")
        try:  # TensorStore itself tries again after 409, 429 and 503.
            stamp = self._store.write(name, value, if_equal=replaces).result(timeout=self._deadline_s)
        except (ValueError, OSError) as error:
            raise self._failed("written", name, error) from error
        return stamp.generation or None

    def names(self, prefix: str) -> list[str]:
        """Names of all objects that begin so, sorted.

        Raises:
          ObjectsError: they cannot be listed.
        """
        keys = ts.KvStore.KeyRange(prefix, _behind(prefix))
        try:
            return sorted(key.decode() for key in self._store.list(keys).result(timeout=self._deadline_s))
        except (ValueError, OSError) as error:
            raise self._failed("listed", prefix, error) from error

    def run(self, steps: Steps[T]) -> T:
        """Does what a protocol asks until it has its answer.

        Raises:
          Exception: whatever the protocol raises; an ObjectsError where it knows no way on.
        """
        try:
            asked = next(steps)
            while True:
                try:
                    answer = self._do(asked)
                except ObjectsError as error:
                    asked = steps.throw(error)
                else:
                    asked = steps.send(answer)
        except StopIteration as end:
            return end.value

    def probe(self) -> None:
        """Finds out, by two writes of which the second must be refused, whether the store holds to conditions.

        Raises:
          ObjectsUnfitError: it does not, or it cannot be written to.
        """
        name = f"v1/probes/{uuid.uuid4().hex}"
        try:
            absent = self.read(name)
            first = self.write(name, b"1", replaces=absent.generation)
            second = self.write(name, b"2", replaces=absent.generation)
            found = self.read(name)
            stale = self.write(name, b"3", replaces=absent.generation)
            self.write(name, None)
        except (ObjectsError, ValueError) as error:
            raise ObjectsUnfitError(
                f"objects_url must be one that can be written to, got {self.url!r}: {error}"
            ) from error
        if first is None:
            raise ObjectsUnfitError(
                f"objects_url must be one that can be written to, got {self.url!r}: it takes nothing"
            )
        if second is not None or stale is not None or found.value != b"1":
            raise ObjectsUnfitError(
                f"objects_url must be of a store that writes on a condition, got {self.url!r}, which writes in any "
                "case: two replicas would own one session"
            )

    def _do(self, asked: Read | Write) -> Found | bytes | None:
        if isinstance(asked, Read):
            return self.read(asked.name)
        return self.write(asked.name, asked.value, replaces=asked.replaces)

    def _failed(self, what: str, name: str, error: Exception) -> ObjectsError:
        why = f"not within {self._deadline_s} s" if isinstance(error, TimeoutError) else str(error)
        return ObjectsError(f"{name or 'objects'} could not be {what} at {self.url}: {why}")


def _spec_of(url: str) -> Any:
    """TensorStore's spec of a URL. S3 that is not Amazon's is used with its conditions too, at `AWS_ENDPOINT_URL`."""
    if url.lstrip().startswith("{"):
        spec = json.loads(url)
    elif url.startswith("s3://"):
        spec = ts.KvStore.Spec(url).to_json()
        if _ENDPOINT in os.environ:
            spec.setdefault("endpoint", os.environ[_ENDPOINT])
    else:
        return url if url.endswith("/") else f"{url}/"
    if spec.get("driver") == "s3":
        spec.setdefault("use_conditional_write", True)
    if spec.get("path") and not spec["path"].endswith("/"):
        spec["path"] += "/"
    return spec


def _behind(prefix: str) -> str:
    """The first name behind all that begin so."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
