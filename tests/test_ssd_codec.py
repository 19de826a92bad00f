"""A model's codec is made, and an engine serves conversations whose KV is coded on SSD."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ca_jax
from ca_jax.recompute.codec_fit import fit_codecs, layout_block
from ca_jax.storage.codec import KVCodec
from ca_jax.storage.layout import KVLayout
from tests import engine_kit as kit

TEXT = [token for seed in range(24) for token in kit.prompt(64, seed)]


@pytest.fixture(scope="module")
def codec() -> KVCodec:
    return made(6.0)[0]


def made(*bits: float, text: Sequence[int] = TEXT, **options: int) -> tuple[KVCodec, ...]:
    options |= {"block_tokens": kit.BLOCK_TOKENS, "history_tokens": 32}
    return fit_codecs(kit.tiny_model(), text, bits=bits, **options)


def fineness(codec: KVCodec) -> float:
    """How many steps numbers are, log2, mean: what layers that predict others leave as it is."""
    return float(np.mean([np.linalg.slogdet(each.forward)[1] / each.width for each in codec.groups]) / np.log(2))


@pytest.fixture
def store(codec: KVCodec, tmp_path: Path) -> ca_jax.StoreConfig:
    codec.save(tmp_path / "codec.npz")
    return kit.ssd_store(tmp_path / "kv", ssd_codec=str(tmp_path / "codec.npz"))


def layout_of(model) -> KVLayout:
    (shape,) = set(model.config.kv_shapes)
    return KVLayout.uniform(
        num_layers=len(model.config.kv_shapes),
        num_kv_heads=shape[1],
        head_dim=shape[2],
        dtype="float32",
        block_tokens=kit.BLOCK_TOKENS,
    )


def round_trip(codec: KVCodec, kv: np.ndarray) -> np.ndarray:
    """KV `[L, 2, T, K, H]` of whole blocks as it comes back."""
    layout, found = layout_of(kit.tiny_model()), []
    for start in range(0, kv.shape[2], kit.BLOCK_TOKENS):
        block = layout_block(layout, [kv[:, :, start : start + kit.BLOCK_TOKENS]])
        data, sums = codec.encode(block, layout)
        codec.decode(data, layout, into := np.empty_like(block), sums)
        found.append(into)
    return np.concatenate(found, axis=2)


def test_it_is_of_the_model_and_takes_the_bits_that_were_asked_for(codec):
    model = kit.tiny_model()
    assert codec.fingerprint == model.fingerprint
    layout, sizes = layout_of(model), []
    for seed in range(50, 60):
        kv = kit.full_pass(kit.prompt(kit.BLOCK_TOKENS * 2, seed), model)[1][:, :, kit.BLOCK_TOKENS :]
        sizes.append(len(codec.encode(np.ascontiguousarray(kv), layout)[0]))
    assert 0.8 < 8 * np.mean(sizes) / (layout.block_bytes // 4) / codec.bits < 1.2
    same, finer = made(6.0, 10.0)
    assert same.name == codec.name != finer.name
    assert (np.concatenate([g.spread.ravel() for g in finer.groups])).mean() > 2 * codec.groups[0].spread.mean()


def test_layers_that_predict_others_leave_room_for_finer_steps(codec):
    """Where blocks of text that no matrix was made from take the same bytes."""
    assert fineness(codec) > fineness(made(6.0, num_earlier=0)[0]) + 0.1
    (group,) = codec.groups
    assert group.earlier.shape[1] == 2
    np.testing.assert_array_equal(group.earlier, group.earlier.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("num_windows", [2, 3])
def test_a_codec_of_very_little_text_is_no_worse_than_one_that_predicts_nothing(num_windows):
    text = TEXT[: 64 * num_windows]
    found, plain = (made(6.0, text=text, num_earlier=number)[0] for number in (2, 0))
    assert fineness(found) > fineness(plain) - 0.02
    kv = kit.full_pass(kit.prompt(kit.BLOCK_TOKENS * 2, 90), kit.tiny_model())[1][:, :, kit.BLOCK_TOKENS :]
    gap = found.groups[0].coded(round_trip(found, kv)) - found.groups[0].coded(kv)
    assert np.abs(gap).max() < 4  # Rounded more coarsely, since other text takes more.


def test_an_error_costs_less_than_by_rounding_all_alike(codec):
    """At as many bits, the logits behind a coded history are nearer than behind one rounded with a single step."""
    import jax.numpy as jnp

    from ca_jax.models.kv import KVCache, LayerKV

    model = kit.tiny_model()
    gaps: dict[str, list[float]] = {"coded": [], "rounded": []}
    for seed in range(70, 76):
        token_ids = kit.prompt(4 * kit.BLOCK_TOKENS + 8, seed)
        logits, kv = kit.full_pass(token_ids, model)
        split = 4 * kit.BLOCK_TOKENS
        exact = kv[:, :, :split]
        coded = round_trip(codec, exact)
        step = np.abs(exact - coded).std() * np.sqrt(12)
        rounded = np.rint(exact / step) * step
        for name, history in (("coded", coded), ("rounded", rounded)):
            cache = KVCache(
                tuple(LayerKV(*(jnp.asarray(part)[None] for part in layer)) for layer in history), jnp.array([split])
            )
            behind = jnp.asarray(token_ids[split:])[None]
            found = model.model.apply(model.params, behind, split + jnp.arange(behind.shape[1])[None], cache)[0]
            gaps[name].append(float(np.square(np.asarray(found)[0] - logits[split:]).mean()))
    assert np.mean(gaps["coded"]) < np.mean(gaps["rounded"])


def test_a_conversation_goes_on_over_restarts_with_what_was_coded(codec, store):
    """What the next process has is what the codec gives of it, and twice the same tokens follow."""
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="one")
        kit.say(session, kit.prompt(5 * kit.BLOCK_TOKENS + 3), 8)
        plain = kit.stored_kv(engine, session)
        token_ids = session.token_ids
        np.testing.assert_allclose(plain, kit.full_pass(token_ids[: plain.shape[2]])[1], atol=kit.ATOL)
    answers = []
    for number in range(2):
        with kit.small_engine(store=store) as engine:
            session = engine.session(session_id="one")
            assert session.token_ids == token_ids
            answers.append(kit.say(session, kit.prompt(9, 1), 12))
            assert session.usage.cached_tokens == {"ssd": len(token_ids) - 1 + number}
            whole = plain.shape[2] // kit.BLOCK_TOKENS * kit.BLOCK_TOKENS
            found = kit.stored_kv(engine, session)[:, :, :whole]
            np.testing.assert_allclose(found, round_trip(codec, plain[:, :, :whole]), atol=1e-4)
            assert engine.metrics.failed_loads == engine.metrics.failed_saves == 0
            session.rewind(len(token_ids))
    assert answers[0] == answers[1]


def test_what_overflows_and_is_forked_is_served_from_coded_kv(store):
    with kit.small_engine(store=store, context_window=128) as engine:
        session = engine.session(session_id="one")
        for turn in range(4):
            kit.say(session, kit.prompt(40, turn), 6)
        assert engine.metrics.truncations >= 1
        kept = session.token_ids
    with kit.small_engine(store=store, context_window=128) as engine:
        session = engine.session(session_id="one")
        assert session.token_ids == kept
        kit.say(session, kit.prompt(9, 9), 4)
        assert session.usage.cached_tokens.get("ssd", 0) > 0
        fork = engine.fork(session)
        kit.say(fork, kit.prompt(7, 8), 4)
        assert engine.metrics.failed_loads == engine.metrics.failed_saves == 0


def test_what_no_codec_is_made_for_or_served_with_is_refused(store):
    with pytest.raises(ValueError, match="as it is computed, got int8"):
        kit.small_engine(store=store, kv_rest_dtype="int8")
    with pytest.raises(ValueError, match="must be of the model with fingerprint"):
        kit.small_engine(kit.model_of(seed=2, fingerprint="another"), store=store)
    with pytest.raises(ValueError, match="the text must be at least 128 tokens"):
        fit_codecs(kit.tiny_model(), TEXT[:100], bits=[3], history_tokens=32)
