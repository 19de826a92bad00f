"""Objects of KV: when one that is there is written anew."""

from __future__ import annotations

import numpy as np
import pytest

from ca_jax.storage.objects import parts
from ca_jax.storage.objects.store import ObjectStore
from tests.storage.objects import shared_kit as kit
from tests.storage.objects.shared_kit import RUN_TOKENS, Replica, short_runs

pytestmark = pytest.mark.usefixtures(short_runs.__name__)


def test_an_object_that_is_marked_is_written_anew_with_other_bytes() -> None:
    """Where generations are hashes of the bytes, a collector must see that it has changed."""
    objects = ObjectStore("memory://", 5.0)
    token_ids = list(range(RUN_TOKENS))
    [name] = kit.orphan(objects, token_ids)
    before = objects.read(name)
    replica = Replica(objects)
    replica.publish("s", token_ids)
    assert objects.read(name) == before, "what is there is named as it is"
    objects.write(parts.doomed_name(name), b"")
    Replica(objects, "b").publish("t", token_ids)
    assert objects.read(name).value != before.value
    np.testing.assert_array_equal(replica.restored("s"), kit.kv_of(token_ids))
