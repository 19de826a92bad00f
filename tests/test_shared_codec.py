"""Replicas whose objects are coded: what a session that is taken over answers, who finds it, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ca_jax
from ca_jax.engine import Engine
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.storage.codec import KVCodec
from ca_jax.storage.objects import parts
from ca_jax.storage.objects.manifest import Manifest
from ca_jax.storage.transform import GroupCodec
from tests import engine_kit as kit
from tests.replica_kit import GREEDY, RUN_BLOCKS, SAID, claimed, make_replica, say, say_and_publish
from tests.storage.codec_kit import decoded_by_numpy


def make_codec(step: float, seed: int = 0, fingerprint: str = "") -> KVCodec:
    """Of the tiny model, by any matrices: numbers are rounded to so many of their standard deviations."""
    model, rng = kit.tiny_model(), np.random.default_rng(seed)
    kv = kit.full_pass(kit.prompt(64, 9), model)[1]
    means = kv.mean(2)
    num_layers, width = len(kv), means[0].size
    turns = np.linalg.qr(rng.normal(size=(num_layers, 3, 1, width, width)))[0]
    group = GroupCodec(
        means=means,
        forward=turns[:, 0] / (step * kv.std()),
        spread=np.full((num_layers, 1, width), 1 / step),
        earlier=0.3 * turns[:, 1:],
    )
    steps = group.coded(kv)
    usual = 4 * np.square(steps).sum(2).mean(-1)  # No token is unlike the others.
    return KVCodec(
        groups=[dataclasses.replace(group, energy=usual)], fingerprint=fingerprint or model.fingerprint, bits=4.0
    )


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "RUN_BYTES", RUN_BLOCKS * kit.BLOCK_TOKENS * kit.TOKEN_BYTES)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coarse one."""
    path = tmp_path_factory.mktemp("codecs") / "codec.npz"
    make_codec(1.0).save(path)
    return path


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines that share a directory."""
    made = []

    def make(codec: object, **changes: object) -> Engine:
        made.append(make_replica(tmp_path, codec=codec, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def likeliest(history: np.ndarray, token_ids: list[int]) -> list[int]:
    """The likeliest token behind each of some, which stand behind a history's KV `[L, 2, T, K, H]`."""
    model, num_tokens = kit.tiny_model(), history.shape[2]
    layers = tuple(LayerKV(*(jnp.asarray(part, jnp.float32)[None] for part in layer)) for layer in history)
    positions = num_tokens + jnp.arange(len(token_ids))[None]
    cache = KVCache(layers, jnp.array([num_tokens]))
    logits = model.model.apply(model.params, jnp.asarray(token_ids)[None], positions, cache)[0]
    return np.asarray(logits)[0].argmax(-1).tolist()


def test_a_session_that_is_taken_over_answers_over_the_kv_that_was_coded(replica, codec, tmp_path) -> None:
    first, second = replica(codec), replica(codec)
    session = first.session(session_id="s")
    for text in SAID[:2]:
        say_and_publish(first, session, text)
    plain = kit.stored_kv(first, session)
    there = claimed(second)
    num_stored = len(there.token_ids) - 1
    say_and_publish(second, there, SAID[2])
    assert there.usage.cached_tokens == {"objects": num_stored}
    assert first.metrics.failed_publishes == second.metrics.failed_restores == 0

    coded = decoded_by_numpy(KVCodec.load(codec), [plain[:, :, :num_stored]])[0]
    found = kit.stored_kv(second, there)[:, :, :num_stored]
    same = np.abs(found - coded).max((0, 1, 3, 4)) < 1e-3
    assert same.mean() > 0.8, "numbers that are nearly halfway may be rounded either way"
    answer = there.token_ids[-GREEDY.max_tokens :]
    behind = there.token_ids[num_stored:-1]
    assert likeliest(coded, behind)[-len(answer) :] == answer
    assert likeliest(plain[:, :, :num_stored], behind)[-len(answer) :] != answer, "the codec is coarse enough to tell"

    [path] = [path for path in (tmp_path / "shared").rglob("*") if path.is_file() and "/sessions/" in str(path)]
    manifest = Manifest.from_bytes(path.read_bytes())
    assert manifest.num_bytes < 0.5 * manifest.num_tokens * kit.TOKEN_BYTES


def test_a_conversation_that_overflows_goes_on_at_each_replica_in_turn(replica, codec) -> None:
    """What is cut, repaired and published again is what was decoded."""
    overflow = dataclasses.replace(kit.SMALL.overflow, truncation_ratio=0.5, anchor_tokens=8)
    engines = [replica(codec, context_window=192, overflow=overflow) for _ in range(2)]
    said = (*SAID, "And then? Say more of it, if you please, and do not stop so early.", "Go on.")
    for number, text in enumerate(said):
        session = claimed(engines[number % 2])
        say_and_publish(engines[number % 2], session, text)
    assert session.conversation.lineage
    assert session.usage.cached_tokens["objects"] > 0
    assert sum(engine.metrics.truncations for engine in engines) >= 1
    for engine in engines:
        assert engine.metrics.failed_restores == engine.metrics.failed_publishes == engine.metrics.failed_loads == 0


def test_replicas_of_other_codecs_do_not_meet(replica, codec, tmp_path) -> None:
    make_codec(0.5).save(tmp_path / "other.npz")
    first = replica(codec)
    say_and_publish(first, first.session(session_id="s"), SAID[0])
    for other in (tmp_path / "other.npz", None):
        engine = replica(other)
        assert not claimed(engine).token_ids
        fresh = engine.session(session_id="t")
        say(fresh, SAID[0])
        assert fresh.usage.cached_tokens == {"dram": 0}
    assert claimed(replica(codec)).token_ids


def test_what_cannot_be_coded_is_refused(replica, codec, tmp_path) -> None:
    with pytest.raises(ValueError, match="as it is computed, got int8"):
        replica(codec, kv_rest_dtype="int8")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        replica(tmp_path / "nowhere.npz")
    make_codec(1.0, fingerprint="another").save(tmp_path / "another.npz")
    with pytest.raises(ValueError, match="must be of the model with fingerprint"):
        replica(tmp_path / "another.npz")
    with pytest.raises(ValueError, match=r"objects_codec must have an objects_url, got none beside 'codec\.npz'"):
        ca_jax.StoreConfig(objects_codec="codec.npz")
