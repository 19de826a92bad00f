"""The invariants of the architecture that concern one engine, each by a test of its name; their numbers are its."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ca_jax
from ca_jax.device.slots import DecodeSlots
from ca_jax.device.transfer import to_device, to_host
from ca_jax.kv import costs
from ca_jax.kv import load as layer_loader
from ca_jax.kv.load import LayerLoader, ReadBuffer, StagingInUseError
from ca_jax.kv.save import AsyncSaver, DecodedPart, LayerPart
from ca_jax.models import rope
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import LoadTicket
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.testing import tiny
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit
from tests.storage.store_helpers import as_bits, make_kv
from tests.tolerances import LOGITS_ATOL, PROJECTION_ATOL

ATOL = LOGITS_ATOL["float32"]
PACKAGE = Path(ca_jax.__file__).parent
MESSAGES = ("Hello there.", "Who are you, and what do you do?", "Go on.", "Say that again, but shorter please.")

on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="only on CPU is staging the memory of the device array"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[ca_jax.Engine]:
    with kit.small_engine() as engine:
        yield engine


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package by its path within it, parsed."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


# 1


def test_reuse_equals_recompute(engine, monkeypatch):
    """Every logit the engine drew from, in four turns over stored KV, is that of one pass over the conversation."""
    drawn: list[tuple[int, np.ndarray]] = []

    def run_pass(self, prefill, *args, original=ca_jax.device.runner.Runner.run_pass):
        original(self, prefill, *args)
        if prefill.logits is not None:
            drawn.append((prefill.history_length + len(prefill.tokens), to_host(prefill.logits)[0]))

    def decode(self, tokens, lengths, original=DecodeSlots.decode):
        logits, *rest = original(self, tokens, lengths)
        drawn.append((int(lengths[0]) + 1, to_host(logits)[0]))
        return logits, *rest

    monkeypatch.setattr(ca_jax.device.runner.Runner, "run_pass", run_pass)
    monkeypatch.setattr(DecodeSlots, "decode", decode)
    session = engine.session(system="Answer briefly.")
    for message in MESSAGES:
        num_known = len(session.token_ids)
        answer = kit.say(session, message, 20)
        assert session.usage.num_cached_tokens == max(num_known - 1, 0), "the history was not reused"
        assert answer == kit.greedy_answer(session.token_ids[: session.usage.prompt_tokens], 20)
    expected = kit.full_pass(session.token_ids)[0]
    assert len(drawn) == 20 * len(MESSAGES)
    for num_tokens, logits in drawn:
        np.testing.assert_allclose(logits, expected[num_tokens - 1], atol=ATOL, rtol=0, err_msg=f"{num_tokens} tokens")


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

    np.testing.assert_allclose(stored, kit.full_pass(token_ids)[1], atol=ATOL, rtol=0)


def test_position_enters_in_one_function(monkeypatch):
    """Without `rope.rotate` the model is blind to positions, of new tokens and of history."""
    model = kit.tiny_model()
    tokens = to_device([kit.prompt(9)], np.int32)
    _, history = model.model.apply(model.params, tokens, jnp.arange(9)[None])
    turned = KVCache(tuple(LayerKV(kv.k[:, ::-1], kv.v[:, ::-1]) for kv in history.layers), history.lengths)

    def changes() -> list[float]:
        """Greatest change of a logit when the new tokens, and when those of the history, are placed elsewhere."""
        apply = jax.jit(lambda positions, history: model.model.apply(model.params, tokens, positions[None], history)[0])
        here = apply(jnp.arange(9, 18), history)
        others = (apply(jnp.arange(9, 18) * 3, history), apply(jnp.arange(9, 18), turned))
        return [float(jnp.abs(here - other).max()) for other in others]

    assert min(changes()) > 0.1
    monkeypatch.setattr(rope, "rotate", lambda x, rotation: x)
    assert max(changes()) < ATOL


def test_only_rope_computes_with_angles():
    angles = {"cos", "sin", "tan", "sincos", "polar", "expm1j"}
    found = {
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in angles)
    }
    assert found == {"models/rope.py"}


# 3


def test_only_transfer_crosses_host_and_device():
    """Turns with reuse, sampling and several jobs run where every transfer that is not asked for is an error."""
    with jax.transfer_guard("disallow"), kit.small_engine() as engine:
        session = engine.session()
        kit.converse(session, MESSAGES)
        assert session.usage.num_cached_tokens > 0
        sampling = SamplingParams(
            temperature=0.8,
            top_k=20,
            repetition_penalty=1.2,
            presence_penalty=1.0,
            logit_bias={9: 1.0},
            logprobs=3,
            seed=3,
        )
        kit.drain(session.send("More."), engine.session().send("Hello.", sampling=sampling))
        engine.generate([kit.prompt(100), kit.prompt(5)], SamplingParams(max_tokens=3))


def test_the_guard_sees_a_transfer_that_was_not_asked_for():
    add = jax.jit(lambda x: x + 1)
    add(to_device(1.0))
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device transfer"),
    ):
        add(np.float32(1.0))


OUTSIDE = ("launch/", "testing/")  # They use the engine as anyone does.
TRANSFERS = {"device_put", "device_get", "copy_to_host_async", "item", "tolist", "from_dlpack"}


def crossings(tree: ast.Module) -> Iterator[str]:
    """Calls that may carry an array over, in a module that has arrays of jax."""
    imported = {
        alias.name.split(".")[0] if isinstance(node, ast.Import) else (node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if "jax" not in imported:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            module, _, name = ast.unparse(node.func).rpartition(".")
            of_a_list = bool(node.args) and isinstance(node.args[0], ast.List | ast.ListComp | ast.Tuple)
            if name in TRANSFERS or (module in ("np", "numpy") and name in ("asarray", "array") and not of_a_list):
                yield f"line {node.lineno}: {name}"


def test_no_other_module_asks_for_a_transfer():
    found = {name: list(crossings(tree)) for name, tree in sources() if not name.startswith(OUTSIDE)}
    assert {name for name, calls in found.items() if calls} == {"device/transfer.py"}, found


@pytest.mark.parametrize(
    "source", ["jax.device_put(x)", "np.asarray(kv)", "jax.device_get(x)", "logits.item()", "numpy.array(x)"]
)
def test_a_transfer_elsewhere_is_seen(source):
    assert list(crossings(ast.parse(f"import jax\n{source}")))
    assert not list(crossings(ast.parse(source)))


# 4


def test_no_donated_buffer_is_read_by_a_save(monkeypatch):
    """With all saves held back to the end of a turn, when every slot was donated many times, the same bytes are stored.

    A save that read a donated buffer would find it deleted, or another step's numbers in it.
    """
    gate = threading.Event()

    def held_back(self, ticket, part, original=AsyncSaver._write):
        assert gate.wait(60)
        original(self, ticket, part)

    with kit.small_engine() as engine, contextlib.ExitStack() as opening:
        opening.callback(gate.set)  # Whatever fails, the engine must be able to close.
        prompt_ids = kit.prompt(70)
        session = engine.session()
        kit.say(session, prompt_ids, 30)
        expected = kit.stored_kv(engine, session)
        engine.drop_stored(session)  # Nothing of it is shared.

        monkeypatch.setattr(AsyncSaver, "_write", held_back)
        late = engine.session(tenant="other")  # Whose KV is not what others saved of the same tokens.
        num_saves = engine.store_stats().num_saves
        slots = engine._runner.slots.buffers
        kit.say(late, prompt_ids, 30)
        assert all(buffer.is_deleted() for buffer in jax.tree.leaves(slots)), "no buffer was donated: this says nothing"
        assert engine.store_stats().num_saves == num_saves, "saves were not held back"
        gate.set()
        np.testing.assert_array_equal(kit.stored_kv(engine, late), expected)
        assert engine.metrics.failed_saves == 0


LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=8)


@contextlib.contextmanager
def store_with(layout: KVLayout, **kvs: np.ndarray) -> Iterator[AttentionStore]:
    """A store that holds `kvs`, `[L, 2, T, K, H]` each, under their names and for tokens 0, 1, 2, …."""
    store = AttentionStore(
        layout, StoreConfig(dram_gib=64 * layout.block_bytes / GIB, block_tokens=layout.block_tokens)
    )
    for key, kv in kvs.items():
        ticket = store.prepare_save(key, 0, range(kv.shape[2]))
        ticket.write_all(kv)
        store.complete_save(ticket)
    yield store
    store.close()


def open_load(store: AttentionStore, key: str) -> LoadTicket:
    ticket = store.prepare_load(key, range(64))
    assert ticket is not None
    return ticket


class LateSum:
    """A computation that the device has not come to yet: it reads its array when waited for, or else when asked to."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array
        self.result: float | None = None

    def block_until_ready(self) -> LateSum:
        """Runs now; `jax.block_until_ready` calls it."""
        if self.result is None:
            self.result = float(to_host(self._array.sum()))
        return self

    def is_ready(self) -> bool:
        """Whether it has run."""
        return self.result is not None


LAYER_BYTES = 2 * 16 * 2 * 16 * 4


def open_layers(loader: LayerLoader, store: AttentionStore, key: str, **options: object):
    load = loader.open(open_load(store, key), 16, LAYOUT.num_layers, **options)
    load.begin(lambda layer: None)
    return load


def sum_while_staging_is_reused(loader: LayerLoader) -> float:
    """The mean of a layer of ones that is still to be read when the read buffer, full of it, is wanted for twos.

    Returns:
      1 if the ones were read, 2 if the twos were.
    """
    ones, twos = (np.full((2, 2, 16, 2, 16), value, np.float32) for value in (1, 2))
    with store_with(LAYOUT, ones=ones, twos=twos) as store:
        first = open_layers(loader, store, "ones")
        late = [LateSum(first.layer(layer)) for layer in range(LAYOUT.num_layers)]
        for layer, reader in enumerate(late):
            first.computed(layer, reader)
            first.used(layer, reader)
        first.release()
        second = open_layers(loader, store, "twos")
        for layer in range(LAYOUT.num_layers):
            jax.block_until_ready(second.layer(layer))
        total = late[0].block_until_ready().result
        second.release()
        store.complete_load(first.ticket)
        store.complete_load(second.ticket)
    return total / ones[0].size


def test_no_staging_buffer_is_rewritten_while_in_use():
    assert sum_while_staging_is_reused(LayerLoader(LAYOUT, LAYOUT.num_layers * LAYER_BYTES)) == 1


@on_cpu
def test_a_loader_that_does_not_wait_is_seen_to_corrupt_what_is_still_read(monkeypatch):
    monkeypatch.setattr(layer_loader._Stage, "is_idle", lambda stage: True)
    assert sum_while_staging_is_reused(LayerLoader(LAYOUT, LAYOUT.num_layers * LAYER_BYTES)) == 2


def test_staging_that_nothing_will_free_is_refused():
    with store_with(LAYOUT, a=make_kv(LAYOUT, 16)) as store:
        loader = LayerLoader(LAYOUT, LAYOUT.num_layers * LAYER_BYTES)
        held = open_layers(loader, store, "a")
        held.layer(1)
        next_one = open_layers(loader, store, "a")
        with pytest.raises(StagingInUseError, match="and other loads hold all of it"):
            next_one.layer(0)
        held.release()
        next_one.layer(0)


def test_the_engine_gives_staging_back_only_when_the_slots_have_what_was_loaded(monkeypatch):
    """A region is free once both its readers, prefill and insertion into the slot, are done."""
    freed: list[layer_loader._Stage] = []

    def give_back(self, region, original=ReadBuffer.give_back):
        _, stage = loader.staged_before
        freed.append(stage)
        original(self, region)

    def free(self, original=LayerLoader._free):
        while self.staged:
            loader.staged_before = self.staged[0]
            if not loader.staged_before[1].is_idle():
                return
            original(self)

    with kit.small_engine() as engine:
        loader = engine._kv._loader
        sessions = [engine.session(), engine.session()]
        kit.drain(*(session.send("Hello.", max_tokens=5) for session in sessions))
        engine.wait_for_saves()  # What is being saved is not preloaded: what was, behind it, would be given up.
        monkeypatch.setattr(ReadBuffer, "give_back", give_back)
        monkeypatch.setattr(LayerLoader, "_free", free)
        kit.drain(*(session.send("And now?", max_tokens=5) for session in sessions))
        assert [session.usage.num_cached_tokens > 0 for session in sessions] == [True, True]
    num_layers = kit.tiny_model().config.num_layers
    assert freed
    assert len(freed) <= 2 * num_layers
    assert all(stage.computed is not None and stage.used is not None for stage in freed)


# 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_hbm_to_dram_to_hbm_is_bit_exact(dtype):
    """Prefilled and decoded KV of every bit pattern, NaNs with payload included, in parts that cross blocks."""
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype=dtype, block_tokens=8)
    kv = make_kv(layout, 45)  # 30 tokens prefilled in passes of 20 and 10, then two groups of 8 and 7 decoded ones
    on_device = to_device(kv)
    np.testing.assert_array_equal(as_bits(to_host(on_device)), as_bits(kv))
    with store_with(layout) as store:
        saver = AsyncSaver()
        passes = ((0, 20, 24), (20, 10, 16))  # first token, tokens, padded tokens
        prefilled = [
            LayerPart(layer, to_device(kv[layer, :, start : start + padded]), num_tokens, start)
            for start, num_tokens, padded in passes
            for layer in range(layout.num_layers)
        ]
        saver.submit(store.prepare_save("a", 0, range(30)), prefilled)
        for start, stop in ((30, 38), (38, 45)):
            steps = tuple(to_device(np.stack([kv[:, :, i]] * 3, axis=2)) for i in range(start, stop))
            rows = tuple(i % 3 for i in range(start, stop))
            saver.submit(store.prepare_save("a", start, range(start, stop)), [DecodedPart(steps, rows)])
        for result in saver.poll(wait=True):
            assert result.error is None
            assert store.complete_save(result.ticket)
        saver.close()

        loader = LayerLoader(layout, layout.num_layers * 64 * layout.token_bytes // layout.num_layers)
        ticket = open_load(store, "a")
        assert ticket.num_tokens == 45
        load = loader.open(ticket, 64, depth=1)
        load.begin(lambda layer: None)
        for layer in range(layout.num_layers):
            loaded = load.layer(layer)
            assert (loaded.shape, loaded.dtype) == ((2, 64, 2, 16), layout.numpy_dtype)
            np.testing.assert_array_equal(as_bits(to_host(loaded)[:, :45]), as_bits(kv[layer]))
            load.computed(layer, loaded)
            load.used(layer, loaded)
        load.release()
        store.complete_load(ticket)


# 8


def engine_like_no_other(directory: Path, head_dim: int, *, num_layers: int = 1, **changes: object) -> ca_jax.Engine:
    """Its head dim is no other test's: functions compiled for another engine would hide that one is compiled here."""
    config = tiny.tiny_config(num_layers=num_layers, head_dim=head_dim, max_positions=kit.WINDOW)
    tiny.write_tiny_hf(directory, config, tiny.tiny_params(config))
    model = ca_jax.load_model(str(directory), dtype="float32")
    return ca_jax.Engine(model, dataclasses.replace(kit.SMALL, **changes))


def test_compiles_are_bounded_by_the_buckets_and_none_comes_after_warmup(tmp_path):
    with engine_like_no_other(tmp_path, head_dim=12) as engine:
        with CompileCounter() as during:
            engine.warmup()
        runner = engine._runner
        num_new, num_history = len(runner.new_token_buckets), len(runner.history_buckets)
        # A layer for each pair; embedding, head, insertion and growth of history for each length; decode and draws.
        pairs, lengths = num_new * num_history, num_new + num_history
        assert during.count <= pairs + 4 * lengths + 8 * len(runner.batch_buckets)
        sampling = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, max_tokens=4)
        others = [
            SamplingParams(max_tokens=4, logprobs=3),
            dataclasses.replace(sampling, logprobs=20),
            SamplingParams(max_tokens=4, presence_penalty=0.5, logprobs=0),
            SamplingParams(max_tokens=4, logit_bias={65: 5.0}),
        ]
        with CompileCounter() as after:
            for length in (1, 7, 8, 9, 63, 64, 65, 129, 200, 256, 257, 300, 449, 500):
                engine.generate([kit.prompt(length)], SamplingParams(max_tokens=4, ignore_eos=True))
            session = engine.session()
            for length in (100, 40, 100, 1, 70, 100):
                kit.say(session, kit.prompt(length), 6)
            kit.drain(*(engine.session().send("Hello.", sampling=sampling) for _ in range(11)))
            engine.generate([kit.prompt(3), kit.prompt(400)] * 4, [sampling, SamplingParams(max_tokens=9)] * 4)
            engine.generate([kit.prompt(3)] * 4, others)
            for other in others:
                engine.generate([kit.prompt(3)], other)
        assert after.count == 0


def test_none_comes_after_warmup_where_passes_are_short_and_histories_are_loaded_in_part(tmp_path, monkeypatch):
    """Passes of every length, in any order, over nothing, over a loaded history and over part of one."""
    taken: list[int] = []
    num_plans = itertools.count()

    def any_pass(rates, history_tokens, sizes, budget_s):
        taken.append(sizes[len(taken) * 2 % len(sizes)])
        return taken[-1]

    def any_plan(rates, history_tokens, new_tokens, *, block_tokens, **options):
        wanted = (0, block_tokens, history_tokens)[next(num_plans) % 3]
        load_tokens = min(wanted, history_tokens)
        return costs.HistoryPlan(
            load_tokens=load_tokens, recompute_tokens=history_tokens - load_tokens, predicted_s=1.0
        )

    with engine_like_no_other(
        tmp_path, head_dim=28, max_batch_size=2, max_tpot_ms=1.0, recompute_if_faster=True
    ) as engine:
        engine.warmup()
        assert engine.rates is not None
        monkeypatch.setattr(costs, "largest_pass", any_pass)
        monkeypatch.setattr(costs, "choose_history", any_plan)
        with CompileCounter() as after:
            decoding = engine.session().send("Go on and on.", max_tokens=400)
            next(decoding)  # Beside it no prefill is alone.
            sessions = [engine.session() for _ in range(3)]
            for turn, length in enumerate((200, 15, 77, 31)):
                kit.drain(*(s.send_ids(kit.prompt(length + 9 * i, turn), max_tokens=3) for i, s in enumerate(sessions)))
            decoding.close()
        assert after.count == 0
        assert set(taken) == {16, 32, 64}
        assert engine.metrics.prefill_passes > 2 * engine.metrics.prefill_steps
        metrics = engine.metrics
        assert min(metrics.loaded_histories, metrics.mixed_histories, metrics.recomputed_histories) > 0


@pytest.mark.parametrize(("rest_dtype", "head_dim"), [("model", 20), ("int8", 36)])
def test_none_comes_after_warmup_where_contexts_are_cut_and_repaired(tmp_path, rest_dtype, head_dim):
    """Before messages of any length, in the middle of an answer, and by hand."""
    with engine_like_no_other(tmp_path, head_dim, num_layers=2, kv_rest_dtype=rest_dtype) as engine:
        engine.warmup()
        with CompileCounter() as after:
            session = engine.session()
            for length, max_tokens in ((400, 6), (150, 6), (300, 6), (33, 200), (5, 6), (3, 150), (80, 6)):
                kit.say(session, kit.prompt(length), max_tokens)
            session.discard(range(10, 40))
            kit.say(session, kit.prompt(20), 6)
        assert after.count == 0
        assert engine.metrics.truncations > 4
        assert engine.metrics.repaired_tokens > 4 * 32


@pytest.mark.parametrize(("rest_dtype", "head_dim"), [("model", 44), ("int8", 52)])
def test_none_comes_after_warmup_for_contexts_of_chunks_of_the_lengths_it_was_told(tmp_path, rest_dtype, head_dim):
    blend = ca_jax.BlendConfig(recompute_ratio=0.5)
    with engine_like_no_other(tmp_path, head_dim, num_layers=4, blend=blend, kv_rest_dtype=rest_dtype) as engine:
        engine.warmup()
        with CompileCounter() as of_contexts:
            engine.warmup(contexts=[(90, 70, 101)])
        assert of_contexts.count > 0
        chunks = [kit.prompt(length, length) for length in (90, 70, 101)]
        with CompileCounter() as after:
            engine.precompute(chunks)
            kit.say(engine.session(), kit.prompt(20), 3, context=chunks)
        assert engine.metrics.blended_turns == 1
        assert after.count == 0


def test_none_comes_after_warmup_where_decode_is_compiled_for_its_extent_as_on_a_gpu(tmp_path):
    with engine_like_no_other(tmp_path, head_dim=20) as engine:
        engine._runner._needs_static_extent = True
        engine.warmup(max_new_tokens=8)
        with CompileCounter() as after:
            for num_jobs in (1, 8):
                engine.generate([kit.prompt(8)] * num_jobs, SamplingParams(max_tokens=kit.WINDOW, ignore_eos=True))
        assert after.count == 0


# 9, as far as it goes with one tier


def test_the_store_on_or_off_with_unused_memory_full_of_nan_the_tokens_are_the_same():
    """Eight conversations at once, a piece of each in turn."""
    openings = [f"Conversation {i}: {'hello ' * i}" for i in range(8)]

    def answers(engine: ca_jax.Engine, num_cached: bool) -> list[list[int]]:
        sessions = [engine.session(system=f"You are number {i}.") for i in range(8)]
        for turn in range(3):
            kit.drain(*(s.send(f"{o} {turn}", max_tokens=10) for s, o in zip(sessions, openings, strict=True)))
        assert [s.usage.num_cached_tokens > 0 for s in sessions] == [num_cached] * 8
        return [session.token_ids for session in sessions]

    with kit.small_engine(store=kit.STORE_OFF) as engine:
        expected = answers(engine, num_cached=False)
    with kit.small_engine() as engine:
        engine._kv.store._dram.slab[...] = np.nan
        engine._kv._loader.buffer.memory.view(np.float32)[...] = np.nan
        engine._runner.slots.buffers = jax.tree.map(
            lambda slot: jnp.full_like(slot, jnp.nan), engine._runner.slots.buffers
        )
        assert answers(engine, num_cached=True) == expected
