"""Invariants of the architecture that concern one engine, by their numbers; the others: WORKSPACE.md."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ca_jax
from benchmarks.compiles import CompileCounter
from ca_jax.device.runner import Runner
from ca_jax.device.transfer import to_device, to_host
from ca_jax.device.warmup import Shapes, compile_all
from ca_jax.kv import costs
from ca_jax.kv.async_saver import AsyncSaver
from ca_jax.kv.layer_loader import LayerLoader
from ca_jax.kv.save import TurnKV, TurnSaver
from ca_jax.models import rope
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import Owner
from ca_jax.storage.store import AttentionStore
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests.storage.store_helpers import as_bits, make_kv
from tests.tolerances import PROJECTION_ATOL

PACKAGE = Path(ca_jax.__file__).parent
MESSAGES = ("Hello there.", "Who are you, and what do you do?", "Go on.", "Say that again, but shorter please.")


@functools.cache
@functools.cache
def sources() -> list[tuple[str, list[ast.AST]]]:
    """Every module of the package by its path within it, as the nodes that it has."""
    return [
        (str(path.relative_to(PACKAGE)), list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


# 1


def test_reuse_equals_recompute(engine):
    """Every logit the engine drew from, in four turns over stored KV, is that of one pass over the conversation."""
    drawn: list[tuple[int, np.ndarray]] = []
    session = engine.session(system="Answer briefly.")
    for message in MESSAGES:
        num_known = len(session.token_ids)
        with ok.recorded_logits(engine) as logits:
            answer = kit.say(session, message, 20)
        assert session.usage.num_cached_tokens == max(num_known - 1, 0), "the history was not reused"
        assert answer == kit.greedy_answer(session.token_ids[: session.usage.prompt_tokens], 20)
        drawn += zip(kit.last_answer(session), logits, strict=True)
    expected = kit.full_pass(session.token_ids)[0]
    for place, logits in drawn:
        np.testing.assert_allclose(logits, expected[place - 1], atol=kit.ATOL, rtol=0, err_msg=f"{place} tokens")


# 2


def test_stored_keys_are_unrotated(engine):
    """At every position, prefilled or decoded, the store holds the plain projection of the token, never rotated."""
    session = engine.session()
    kit.converse(session, MESSAGES[:2], 20)
    stored = kit.stored_kv(engine, session)
    token_ids = session.token_ids[: stored.shape[2]]
    assert len(token_ids) == len(session.token_ids) - 1, "all but the last token, which was never run, is stored"

    model = kit.tiny_model()
    params = jax.tree.map(np.asarray, model.params)["params"]
    x = params["embed"]["embedding"][token_ids]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.norm_eps) * params["layer_0"]["attn_norm"]["scale"]
    for index, name in enumerate(("wk", "wv")):
        plain = np.einsum("tf,fkh->tkh", x, params["layer_0"]["attn"][name])
        np.testing.assert_allclose(stored[0, index], plain, atol=PROJECTION_ATOL["float32"], rtol=0)

    np.testing.assert_allclose(stored, kit.full_pass(token_ids)[1], atol=kit.ATOL, rtol=0)


def test_position_enters_in_one_function(monkeypatch):
    """Without `rope.rotate` the model is blind to positions, of new tokens and of history."""
    model = kit.tiny_model()
    tokens = to_device([kit.prompt(9)], np.int32)
    _, history = jax.jit(model.model.apply)(model.params, tokens, jnp.arange(9)[None])
    turned = KVCache(tuple(LayerKV(kv.k[:, ::-1], kv.v[:, ::-1]) for kv in history.layers), history.lengths)

    def changes() -> list[float]:
        """Greatest change of a logit when the new tokens, and when those of the history, are placed elsewhere."""
        apply = jax.jit(lambda positions, history: model.model.apply(model.params, tokens, positions[None], history)[0])
        here = apply(jnp.arange(9, 18), history)
        others = (apply(jnp.arange(9, 18) * 3, history), apply(jnp.arange(9, 18), turned))
        return [float(jnp.abs(here - other).max()) for other in others]

    assert min(changes()) > 0.1
    monkeypatch.setattr(rope, "rotate", lambda x, rotation: x)
    assert max(changes()) < kit.ATOL


def test_only_rope_computes_with_angles():
    angles = {"cos", "sin", "tan", "sincos", "polar", "expm1j"}
    found = {
        name
        for name, nodes in sources()
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in angles
    }
    assert found == {"models/rope.py"}


# 3


def test_only_transfer_crosses_host_and_device():
    """Turns with reuse, sampling and several jobs run where every transfer that is not asked for is an error."""
    with jax.transfer_guard("disallow"), kit.small_engine() as engine:
        session = engine.session()
        kit.converse(session, MESSAGES)
        assert session.usage.num_cached_tokens > 0
        drawn = {"temperature": 0.8, "top_k": 20, "logprobs": 3, "seed": 3}
        sampling = SamplingParams(repetition_penalty=1.2, presence_penalty=1.0, logit_bias={9: 1.0}, **drawn)
        kit.drain(session.send("More."), engine.session().send("Hello.", sampling=sampling))
        engine.generate([kit.prompt(100), kit.prompt(5)], SamplingParams(max_tokens=3))
        with pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device transfer"):
            jax.jit(lambda x: x + 1)(np.float32(1.0))


OUTSIDE = ("launch/", "testing/")  # They use the engine as anyone does.
TRANSFERS = {"device_put", "device_get", "copy_to_host_async", "item", "tolist", "from_dlpack"}


def crossings(nodes: list[ast.AST]) -> Iterator[str]:
    """Calls that may carry an array over, in a module that has arrays of jax."""
    imported = {
        alias.name.split(".")[0] if isinstance(node, ast.Import) else (node.module or "").split(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if "jax" not in imported:
        return
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            module, _, name = ast.unparse(node.func).rpartition(".")
            of_a_list = bool(node.args) and isinstance(node.args[0], ast.List | ast.ListComp | ast.Tuple)
            if name in TRANSFERS or (module in ("np", "numpy") and name in ("asarray", "array") and not of_a_list):
                yield f"line {node.lineno}: {name}"


def test_no_other_module_asks_for_a_transfer():
    found = {name: list(crossings(nodes)) for name, nodes in sources() if not name.startswith(OUTSIDE)}
    assert {name for name, calls in found.items() if calls} == {"device/transfer.py"}, found
    for source in ("jax.device_put(x)", "np.asarray(kv)", "jax.device_get(x)", "logits.item()", "numpy.array(x)"):
        assert list(crossings([*ast.walk(ast.parse(f"import jax\n{source}"))])), "it would not be seen"


# 4


def test_no_donated_buffer_is_read_by_a_save(monkeypatch):
    """With all saves held back to the end of a turn, when all pages were donated many times, the same bytes are stored.

    A save that read a donated buffer would find it deleted, or another step's numbers in it.
    """
    gate = threading.Event()

    def held_back(self, ticket, part, original=AsyncSaver._write):
        assert gate.wait(60)
        original(self, ticket, part)

    with kit.small_engine() as engine, contextlib.ExitStack() as opening:
        opening.callback(gate.set)  # Else it could not close.
        prompt_ids = kit.prompt(70)
        session = engine.session()
        kit.say(session, prompt_ids, 30)
        expected = kit.stored_kv(engine, session)
        engine.drop_stored(session)  # Nothing of it is shared.

        monkeypatch.setattr(AsyncSaver, "_write", held_back)
        late = engine.session(tenant="other")  # Whose KV is not what others saved of the same tokens.
        num_saves = engine.store_stats().num_saves
        pages = engine._runner.pool.buffers
        kit.say(late, prompt_ids, 30)
        assert all(buffer.is_deleted() for buffer in pages), "no buffer was donated: this says nothing"
        assert engine.store_stats().num_saves == num_saves, "saves were not held back"
        gate.set()
        np.testing.assert_array_equal(kit.stored_kv(engine, late), expected)
        assert engine.metrics.failed_saves == 0


# 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_hbm_to_dram_to_hbm_is_bit_exact(dtype):
    """Prefilled and decoded KV of every bit pattern, NaNs with payload included, in parts that cross blocks."""
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype=dtype, block_tokens=8)
    kv = make_kv(layout, 45)  # 30 tokens prefilled in passes of 20 and 10, then two groups of 8 and 7 decoded ones
    on_device = to_device(kv)
    np.testing.assert_array_equal(as_bits(to_host(on_device)), as_bits(kv))
    config = StoreConfig(dram_gib=64 * layout.block_bytes / GIB, block_tokens=layout.block_tokens)
    with contextlib.closing(AttentionStore(layout, config)) as store, contextlib.closing(AsyncSaver()) as saver:
        turn = TurnSaver(store, saver, TurnKV(key="a", owner=Owner(), start_token=0), group_tokens=8)
        for start, stop, padded in ((0, 20, 24), (20, 30, 36)):
            turn.begin_pass(range(start, stop), start)
            for layer in range(layout.num_layers):
                turn.add_layer(layer, to_device(kv[layer, :, start:padded]))
            turn.end_pass()
        for token in range(30, 45):
            turn.add_decoded(token, (to_device(np.stack([kv[:, :, token]] * 3, axis=2)),), token % 3)
        turn.end()
        for result in saver.poll(wait=True):
            assert result.error is None
            assert store.complete_save(result.ticket)

        loader = LayerLoader(layout, layout.num_layers * 64 * layout.token_bytes // layout.num_layers)
        ticket = store.prepare_load("a", range(64))
        assert ticket.num_tokens == 45
        load = loader.open(ticket, 64, depth=1)
        load.begin()
        for layer in range(layout.num_layers):
            loaded = load.layer(layer)
            assert (loaded.shape, loaded.dtype) == ((2, 64, 2, 16), layout.numpy_dtype)
            np.testing.assert_array_equal(as_bits(to_host(loaded)[:, :45]), as_bits(kv[layer]))
            load.computed(layer, loaded)
        load.release()
        store.complete_load(ticket)


# 8


SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, max_tokens=4)
ASKED = [
    SamplingParams(max_tokens=4, logprobs=3),
    dataclasses.replace(SAMPLED, logprobs=20),
    SamplingParams(max_tokens=4, presence_penalty=0.5, logprobs=0),
    SamplingParams(max_tokens=4, logit_bias={65: 5.0}),
]


@pytest.mark.parametrize(
    ("rest_dtype", "selection", "layers"),
    [
        ("model", "hkvd", {"head_dim": 12}),
        ("int8", "query", {"head_dim": 36, "sliding_window": 20, "full_layers": (0,)}),
    ],
)
def test_compiles_are_bounded_by_the_buckets_and_none_comes_after_warmup(rest_dtype, selection, layers):
    """Prompts and batches of any size, draws of any kind, contexts cut and repaired, chunks of the lengths it was told.

    Layers of another window are compiled too.

    The head dim is no other test's: functions compiled for another engine would hide that one is compiled here.
    """
    model = kit.model_of(num_layers=2, **layers)
    blend = ca_jax.BlendConfig(recompute_ratio=0.5, selection=selection)
    sizes = {"context_window": 256, "max_batch_size": 2}
    with kit.small_engine(model, blend=blend, kv_rest_dtype=rest_dtype, **sizes) as engine:
        with CompileCounter() as during:
            engine.warmup()
        runner = engine._runner
        # A layer for each number of tokens; what is brought and repaired of a history; decode and draws. No pairs.
        buckets = runner.token_buckets, runner.history_buckets, runner.batch_buckets
        assert during.count <= 5 * sum(map(len, buckets))
        with CompileCounter() as of_contexts:
            engine.warmup(contexts=[(60, 40, 71)])
        assert of_contexts.count > 0
        chunks = [kit.prompt(length, length) for length in (60, 40, 71)]
        with CompileCounter() as after:
            for length in (1, 7, 8, 9, 63, 64, 65, 129, 200, 250):
                engine.generate([kit.prompt(length)], SamplingParams(max_tokens=4, ignore_eos=True))
            kit.drain(*(engine.session().send_ids([65], sampling=SAMPLED) for _ in range(5)))
            engine.generate([kit.prompt(3), kit.prompt(200)] * 2, [SAMPLED, SamplingParams(max_tokens=9)] * 2)
            engine.generate([kit.prompt(3)] * 4, ASKED)
            for params in ASKED:
                engine.generate([kit.prompt(3)], params)
            session = engine.session()
            for length, max_tokens in ((50, 6), (150, 6), (75, 6), (150, 6), (33, 120), (5, 6), (3, 150), (80, 6)):
                kit.say(session, kit.prompt(length), max_tokens)
            session.discard(range(10, 40))
            kit.say(session, kit.prompt(20), 6)
            engine.precompute(chunks)
            kit.say(engine.session(), kit.prompt(20), 3, context=chunks)
        assert after.count == 0
        assert engine.metrics.truncations > 4
        assert engine.metrics.repaired_tokens > 4 * 32
        assert engine.metrics.blended_turns == 1


class Counted(Shapes):
    """Counts functions by what they are asked for, and compiles none."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.asked: set[str] = set()

    def compiled(self, function, *args, **options):
        self.asked.add(f"{function.__name__} {jax.tree.map(str, (args, sorted(options.items())))}")
        return function.eval_shape(*args, **options)


@pytest.mark.parametrize("rest_dtype", ["model", "int8"])
@pytest.mark.parametrize("window", [4096, 8192, 8193, 16384, 131072])
def test_at_most_64_functions_serve_whatever_the_window(window, rest_dtype):
    model = kit.model_of(num_layers=2, max_positions=window)
    sizes = {
        "context_window": window,
        "max_batch_size": 8,
        "max_num_batched_tokens": 512,
        "page_tokens": 128,
        "max_draft_tokens": 15,
    }
    with kit.small_engine(model, kv_rest_dtype=rest_dtype, kv_pool_gib=1.0, **sizes) as engine:
        shapes = Counted(engine._runner)
        compile_all(engine._core._functions(shapes, 512))
    assert 30 < len(shapes.asked) <= 64


def test_none_comes_after_warmup_where_passes_are_short_and_histories_are_loaded_in_part(monkeypatch):
    """Passes of every length, in any order, over nothing, over a loaded history and over part of one."""
    taken: list[int] = []
    num_plans = itertools.count()

    def any_pass(rates, history_tokens, sizes, budget_s):
        taken.append(sizes[len(taken) * 3 % len(sizes)])
        return taken[-1]

    def any_plan(rates, history_tokens, new_tokens, *, block_tokens, **options):
        return min((0, block_tokens, history_tokens)[next(num_plans) % 3], history_tokens)

    model = kit.model_of(head_dim=28, num_layers=1)
    sizes = {"max_batch_size": 2, "overflow": None}
    with kit.small_engine(model, max_tpot_ms=1.0, recompute_if_faster=True, **sizes) as engine:
        engine.warmup()
        assert engine.rates is not None
        monkeypatch.setattr(costs, "largest_pass", any_pass)
        monkeypatch.setattr(costs, "choose_history", any_plan)
        with CompileCounter() as after:
            decoding = engine.session().send_ids(kit.prompt(12), max_tokens=240)
            while not decoding.job.output_ids:  # Beside it no prefill is alone.
                engine.step()
            sessions = [engine.session() for _ in range(3)]
            for turn, length in enumerate((80, 15, 47, 21)):
                kit.drain(*(s.send_ids(kit.prompt(length + 9 * i, turn), max_tokens=3) for i, s in enumerate(sessions)))
            decoding.close()
        assert after.count == 0
        assert set(taken) == {size - 1 for size in engine._runner.token_buckets}, "beside one that decodes"
        metrics = engine.metrics
        assert metrics.prefill_passes > 2 * metrics.prefill_steps
        assert min(metrics.loaded_histories, metrics.mixed_histories, metrics.recomputed_histories) > 0
