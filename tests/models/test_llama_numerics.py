"""The Llama models against what `transformers` says: recorded, from elsewhere, and live; with and without history."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.models import kv
from ca_jax.models.attention import QUERY_BLOCK, attend
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.models.rope import rotation_at
from ca_jax.models.transformer import Layer, Transformer
from ca_jax.testing import tiny
from tests.tolerances import LOGITS_ATOL

ATOL = LOGITS_ATOL["float32"]
ROOM = 160
"""What prompts and answers are padded to where their own length is not what is tested: each length is a compile."""

RECORDED = ("gqa_linear_rope", "gqa_llama3_rope", "gqa_tied", "mha_untied", "wide_heads")

LIVE = {
    "mha": {"num_kv_heads": 4},
    "gqa": {"num_kv_heads": 2, "norm_eps": 1e-6},
    "tied": {"tie_embeddings": True},
    "llama3_rope": {
        "rope": RopeConfig(theta=5000.0, scaling="llama3", factor=8.0, original_max_positions=64),
    },
    "linear_rope": {"num_kv_heads": 1, "rope": RopeConfig(theta=500.0, scaling="linear", factor=2.5)},
    "wide_heads": {"head_dim": 24},
    "many_kv_heads": {"num_heads": 16, "num_kv_heads": 16, "head_dim": 8},
}


@functools.partial(jax.jit, static_argnames=("model",))
def run(model: Transformer, params, tokens, positions, history=None) -> tuple[jax.Array, KVCache]:
    return model.apply(params, tokens, positions, history)


@functools.partial(jax.jit, static_argnames=("model",))
def run_behind(model: Transformer, params, tokens, history: KVCache) -> tuple[jax.Array, KVCache]:
    """Logits of tokens behind a history, and the history with them, of the same capacity."""
    positions = history.lengths[:, None] + jnp.arange(tokens.shape[1])
    logits, new = model.apply(params, tokens, positions, history)
    return logits, kv.take(kv.append(history, new), history.capacity)


def run_pieces(
    model: Transformer, params, prompt: np.ndarray, sizes: tuple[int, ...], capacity: int = 128
) -> np.ndarray:
    """Logits `[T, V]` of a prompt run piece by piece, each piece behind the KV of those before it."""
    history, logits = kv.empty(model.config, 1, capacity), []
    for piece in np.split(prompt[None, : sum(sizes)], np.cumsum(sizes)[:-1], axis=1):
        out, history = run_behind(model, params, piece, history)
        logits.append(np.asarray(out[0]))
    return np.concatenate(logits)


def run_whole(model: Transformer, params, prompt: np.ndarray, room: int | None = None) -> np.ndarray:
    """Logits `[T, V]` of a prompt without any history; with `room`, padded behind to so many tokens."""
    tokens = np.zeros((1, room or len(prompt)), np.int32)
    tokens[0, : len(prompt)] = prompt
    logits, _ = run(model, params, tokens, np.arange(tokens.shape[1])[None])
    return np.asarray(logits[0])[: len(prompt)]


def greedy(model: Transformer, params, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens by a full pass each."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(run_whole(model, params, np.array(ids), ROOM)[-1].argmax()))
    return ids[len(prompt) :]


def load(directory: Path) -> tuple[Transformer, dict]:
    checkpoint = load_checkpoint(str(directory), dtype="float32")
    return Transformer(checkpoint.config), checkpoint.params


@functools.cache
def tiny_llama(**overrides) -> tuple[Transformer, dict]:
    config = tiny.tiny_config(**({"vocab_size": 96, "embed_dim": 32, "mlp_dim": 48, "num_layers": 2} | overrides))
    return Transformer(config), tiny.tiny_params(config, seed=5)


def random_tokens(config: ModelConfig, *shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, config.vocab_size, shape, dtype=np.int32)


# Against expectations that are files.


@pytest.mark.parametrize("name", RECORDED)
def test_logits_and_greedy_tokens_are_those_recorded(recorded_data, name):
    model, params = load(recorded_data / f"llama_{name}")
    expected = np.load(recorded_data / f"llama_{name}" / "expected.npz")
    lengths = sorted(int(key.removeprefix("prompt_")) for key in expected if key.startswith("prompt_"))
    assert lengths == [1, 9, 40, 120]
    for length in lengths:
        logits = run_whole(model, params, expected[f"prompt_{length}"], ROOM)
        np.testing.assert_allclose(logits, expected[f"logits_{length}"], atol=ATOL, rtol=0)
    recorded = json.loads((recorded_data / f"llama_{name}" / "expected_greedy.json").read_text())
    for case in recorded["cases"]:
        assert greedy(model, params, case["prompt"], recorded["max_new_tokens"]) == case["token_ids"]


def test_a_checkpoint_from_elsewhere_gives_its_logits_and_tokens(shared_data):
    directory = shared_data / "models" / "tiny_random" / "llama_mha"
    if not directory.is_dir():
        pytest.skip("wants ../shared/data/models/tiny_random/llama_mha, which is not there")
    model, params = load(directory)
    expected = np.load(directory / "expected_logits.npz")
    cases = json.loads((directory / "expected_greedy.json").read_text())["cases"]
    for index, case in enumerate(cases):
        prompt = expected[f"ids{index}"]
        assert prompt.tolist() == case["ids"]
        logits = run_whole(model, params, prompt)
        np.testing.assert_allclose(logits, expected[f"logits{index}"], atol=ATOL, rtol=0)
        assert greedy(model, params, case["ids"], len(case["greedy"])) == case["greedy"]


# Against transformers, live.


@pytest.mark.parametrize("overrides", LIVE.values(), ids=LIVE)
def test_logits_equal_those_of_transformers_with_and_without_history(tmp_path, overrides):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, params = tiny_llama(**overrides)
    tiny.write_tiny_hf(tmp_path, model.config, params, tokenizer=False)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    prompt = random_tokens(model.config, 120)
    with torch.no_grad():
        expected = reference(torch.from_numpy(prompt.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    assert expected.std() > 0.5, "the logits say too little to compare"
    for length in (1, 9, 40, 120):
        logits = run_whole(model, params, prompt[:length])
        np.testing.assert_allclose(logits, expected[:length], atol=ATOL, rtol=0, err_msg=str(length))
    for sizes in ((1,), (9,), (40,), (1, 9), (9, 40), (40, 1, 40), (40, 40, 40)):
        logits = run_pieces(model, params, prompt, sizes)
        np.testing.assert_allclose(logits, expected[: sum(sizes)], atol=ATOL, rtol=0, err_msg=str(sizes))


# History: rows of a batch, what lies behind their lengths, and dropping.


def test_rows_with_histories_of_different_length_do_not_meet_nor_see_what_is_behind_them():
    model, params = tiny_llama()
    lengths, num_new, capacity = (0, 17, 40), 9, 48
    tokens = random_tokens(model.config, len(lengths), capacity + num_new)
    shape = (len(lengths), capacity, model.config.num_kv_heads, model.config.head_dim)
    layers = [LayerKV(np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)) for _ in range(2)]
    for row, length in enumerate(lengths):
        if length:
            _, old = run(model, params, tokens[row : row + 1, :length], np.arange(length)[None])
            for layer, part in zip(layers, old.layers, strict=True):
                layer.k[row, :length], layer.v[row, :length] = part.k[0], part.v[0]
    history = KVCache(tuple(layers), np.array(lengths, np.int32))
    new = np.stack([row[length : length + num_new] for row, length in zip(tokens, lengths, strict=True)])
    positions = np.array(lengths)[:, None] + np.arange(num_new)
    logits, new_kv = run(model, params, new, positions, history)
    for row, length in enumerate(lengths):
        stop = length + num_new
        alone, alone_kv = run(model, params, tokens[row : row + 1, :stop], np.arange(stop)[None])
        np.testing.assert_allclose(logits[row], alone[0, length:], atol=ATOL, rtol=0)
        for layer, expected in zip(new_kv.layers, alone_kv.layers, strict=True):
            np.testing.assert_allclose(layer.k[row], expected.k[0, length:], atol=ATOL, rtol=0)
            np.testing.assert_allclose(layer.v[row], expected.v[0, length:], atol=ATOL, rtol=0)
    assert np.asarray(new_kv.lengths).tolist() == [num_new] * len(lengths)


def test_what_remains_after_dropping_is_used_at_its_new_positions_as_it_stands():
    """Dropping 9 of 49 equals having only the KV of the last 40, at positions 0 to 39: keys hold no position."""
    model, params = tiny_llama()
    tokens = random_tokens(model.config, 1, 58)
    _, all_kv = run(model, params, tokens[:, :49], np.arange(49)[None])
    dropped = kv.drop_oldest(all_kv, 9)
    slices = tuple(LayerKV(layer.k[:, 9:49], layer.v[:, 9:49]) for layer in all_kv.layers)
    placed = KVCache(slices, jnp.asarray([40], jnp.int32))
    logits, _ = run(model, params, tokens[:, 49:], np.arange(40, 49)[None], dropped)
    expected, _ = run(model, params, tokens[:, 49:], np.arange(40, 49)[None], placed)
    np.testing.assert_array_equal(logits, expected)
    unmoved, _ = run(model, params, tokens[:, 49:], np.arange(49, 58)[None], dropped)
    assert np.abs(np.asarray(unmoved) - np.asarray(logits)).max() > 0.01, "positions do not matter to this model"


def test_keys_of_the_first_layer_do_not_depend_on_positions():
    model, params = tiny_llama()
    tokens = random_tokens(model.config, 1, 9)
    (_, near), (_, far) = (run(model, params, tokens, np.arange(9)[None] * stride) for stride in (1, 13))
    np.testing.assert_array_equal(near.layers[0].k, far.layers[0].k)
    assert np.abs(np.asarray(near.layers[1].k) - np.asarray(far.layers[1].k)).max() > 0.01


# How it is put together.


@pytest.mark.parametrize("num_history", [0, 20])
def test_layers_called_one_by_one_equal_the_whole(num_history):
    model, params = tiny_llama()
    config, num_new = model.config, 9
    tokens = random_tokens(config, 1, num_history + num_new)
    history = run(model, params, tokens[:, :num_history], np.arange(num_history)[None])[1] if num_history else None
    positions = np.arange(num_history, num_history + num_new)[None]
    expected, expected_kv = run(model, params, tokens[:, num_history:], positions, history)
    rotation = rotation_at(config.rope, config.head_dim, jnp.asarray(positions))
    x = model.apply(params, tokens[:, num_history:], method=Transformer.embed)
    lengths = jnp.asarray([num_history], jnp.int32)
    for i in range(config.num_layers):
        old, old_rotation = None, None
        if history is not None:
            old = history.layers[i]
            old_rotation = rotation_at(config.rope, config.head_dim, jnp.arange(num_history))
        x, new = Layer(config).apply(
            {"params": params["params"][f"layer_{i}"]},
            x,
            lambda q, new, old=old, at=old_rotation: (attend(q, new, old, lengths, rotation, at), new),
        )
        np.testing.assert_allclose(new.k, expected_kv.layers[i].k, atol=ATOL, rtol=0)
        np.testing.assert_allclose(new.v, expected_kv.layers[i].v, atol=ATOL, rtol=0)
    np.testing.assert_allclose(model.apply(params, x, method=Transformer.head), expected, atol=ATOL, rtol=0)


def test_a_prompt_of_several_query_blocks_equals_the_same_prompt_in_pieces():
    model, params = tiny_llama()
    prompt = random_tokens(model.config, 2 * QUERY_BLOCK + 40)
    whole = run_whole(model, params, prompt)
    pieces = run_pieces(model, params, prompt, (40, QUERY_BLOCK, QUERY_BLOCK), capacity=384)
    np.testing.assert_allclose(whole, pieces, atol=ATOL, rtol=0)


def test_bfloat16_weights_give_the_logits_of_the_same_weights_in_float32():
    model, params = tiny_llama()
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    tokens, positions = random_tokens(model.config, 1, 40), np.arange(40)[None]
    logits, new = run(model, rounded, tokens, positions)
    assert logits.dtype == jnp.float32
    assert new.layers[0].k.dtype == jnp.bfloat16
    exact, _ = run(model, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded), tokens, positions)
    np.testing.assert_allclose(logits, exact, atol=LOGITS_ATOL["bfloat16"], rtol=0)


def test_every_matrix_product_of_float32_says_it_wants_full_precision():
    """A GPU multiplies f32 in TF32, ten bits of mantissa, unless told not to: no tolerance here would hold then."""
    model, params = tiny_llama()
    history = kv.empty(model.config, 1, 20)
    jaxpr = jax.make_jaxpr(lambda *args: model.apply(*args))(
        params, random_tokens(model.config, 1, 9), np.arange(9)[None], history
    )
    products = [each for each in _equations(jaxpr.jaxpr) if each.primitive.name == "dot_general"]
    assert len(products) >= 7 * model.config.num_layers + 1
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    loose = [str(each.source_info.name_stack) for each in products if each.params["precision"] != highest]
    assert loose == []


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
