"""An engine on meshes of eight virtual devices, against one on one device. `tests/test_mesh.py` starts the process."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ca_jax
from benchmarks.compiles import CompileCounter
from ca_jax import backend
from ca_jax.device import page_steps, steps, transfer
from ca_jax.device.transfer import params_to_device
from ca_jax.kv import layout as device_memory
from ca_jax.kv.layer_loader import LayerLoad
from ca_jax.kv.save import TurnSaver
from ca_jax.models import int4_product
from ca_jax.models.config import ModelConfig
from ca_jax.models.paged_attention import Rows
from ca_jax.models.random_weights import random_params
from ca_jax.models.sharding import model_sharding
from ca_jax.models.small_weights import Int4Matrix
from ca_jax.models.weights import parameter_slots
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel
from ca_jax.serving import drafts
from ca_jax.storage.config import GIB
from ca_jax.storage.layout import KVLayout
from ca_jax.testing import tiny
from ca_jax.turns.requests import SamplingParams
from tests import adapters_kit as ak
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests.models.test_int4_product import weights_of
from tests.storage.store_helpers import as_bits, make_kv

WINDOW = 256
BLEND = ca_jax.BlendConfig(recompute_ratio=0.4)
TURNS = [(60, 9), (120, 9), (59, 9), (50, 9), (40, 9)]
"""New tokens and tokens of the answer of each; the second takes two passes, the third overflows."""
SHORT = [(60, 8), (50, 8)]

SIZES = {"num_layers": 2, "embed_dim": 32, "mlp_dim": 64, "num_heads": 8, "head_dim": 8, "max_positions": kit.WINDOW}


def config_of(num_kv_heads: int = 8, **changes: object) -> ModelConfig:
    return tiny.tiny_config(**{**SIZES, "num_kv_heads": num_kv_heads, **changes})


def model_of(num_kv_heads: int = 8, **changes: object) -> LoadedModel:
    """A model on one device."""
    return kit.model_of(**{**SIZES, "num_kv_heads": num_kv_heads, **changes})


def engine_of(data: int, tensor: int, model: LoadedModel | None = None, **changes: object) -> ca_jax.Engine:
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor, "context_window": WINDOW, "max_batch_size": 4}
    return kit.small_engine(model or model_of(), **{**sizes, **changes})


def talk(engine: ca_jax.Engine, turns: list[tuple[int, int]] = TURNS, start: int = 0) -> list[list[int]]:
    """Goes on with a conversation: the answers."""
    session = engine.session(session_id="one")
    return [kit.say(session, kit.prompt(n, start + i), max_tokens) for i, (n, max_tokens) in enumerate(turns)]


def expect_greedy(answers: list[list[int]], model: LoadedModel, turns: list[tuple[int, int]]) -> None:
    """What a model on one device answers, by a pass over all tokens: no engine, no reuse."""
    ids, places = [], []
    for turn, ((num_new, max_tokens), answer) in enumerate(zip(turns, answers, strict=True)):
        ids += [*kit.prompt(num_new, turn), *answer]
        places.append(range(len(ids) - max_tokens, len(ids)))
    assert kit.num_wrong(ids, places, model) == 0


@functools.cache
def answers_of_one_device() -> list[list[int]]:
    with engine_of(1, 1) as engine:
        answers = talk(engine)
        expect_greedy(answers[:2], model_of(), TURNS[:2])  # Up to where its context is cut.
        assert engine.metrics.truncations == 1
        assert engine.sessions[0].usage.num_cached_tokens > 0
    return answers


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> None:
    assert len(jax.devices()) == 8, "there must be eight devices: this file is run by tests/test_mesh.py"


# Single arrays: sharded KV on its way to four of the devices and back.


LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=4, head_dim=8, dtype="bfloat16", block_tokens=4)
KV = make_kv(LAYOUT, 16)
SPECS = {
    "by heads": PartitionSpec(None, None, "model", None),
    "by both": PartitionSpec(None, "data", "model", None),
    "by all devices": PartitionSpec(None, None, ("data", "model"), None),
    "replicated": PartitionSpec(),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_each_device_gets_its_part_of_staging_and_no_other_and_each_part_is_read_once(spec, monkeypatch):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model")), spec)
    put: dict[jax.Device, np.ndarray] = {}

    def device_put(part: np.ndarray, device: jax.Device, original=jax.device_put) -> jax.Array:
        put[device] = part
        return original(part, device)

    monkeypatch.setattr(jax, "device_put", device_put)
    array = transfer.staging_to_device(KV[0].copy(), sharding)
    assert array.sharding == sharding
    indices = sharding.devices_indices_map(KV[0].shape)
    assert put.keys() == indices.keys() == set(jax.devices()[:4])
    for device, part in put.items():
        np.testing.assert_array_equal(as_bits(part), as_bits(KV[0][indices[device]]))
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(as_bits(np.asarray(shard.data)), as_bits(KV[0][shard.index]))
    pinned = transfer.to_host_memory(array, transfer.PINNED_HOST)
    assert pinned.sharding.memory_kind == "pinned_host"
    assert (pinned.sharding.spec, pinned.sharding.device_set) == (spec, array.sharding.device_set)
    for each in (array, pinned):
        num_read = []

        def asarray(data: jax.Array, num_read: list[int] = num_read) -> np.ndarray:
            num_read.append(data.nbytes)
            return np.asarray(data)

        monkeypatch.setattr(transfer, "np", types.SimpleNamespace(asarray=asarray, empty=np.empty))
        np.testing.assert_array_equal(as_bits(transfer.host_view(each)), as_bits(KV[0]))
        assert sum(num_read) == KV[0].nbytes, "replicas are read once"


# Tokens.


@pytest.fixture
def passing(monkeypatch) -> dict[str, list[jax.Array]]:
    """A history's layers on their way in, and KV on its way out, prefilled, repaired and decoded."""
    seen: dict[str, list[jax.Array]] = {"loaded": [], "prefilled": [], "repaired": [], "decoded": []}

    def layer(self, index, original=LayerLoad.layer):
        seen["loaded"].append(original(self, index))
        return seen["loaded"][-1]

    def add_layer(self, index, kv, first, original=TurnSaver.add_layer):
        seen["prefilled"].append(kv)
        original(self, index, kv, first)

    def add_pass(self, *args, original=TurnSaver.add_pass):
        prefilled, seen["prefilled"] = seen["prefilled"], seen["repaired"]
        original(self, *args)
        seen["prefilled"] = prefilled

    def add_decoded(self, token, kv, row, original=TurnSaver.add_decoded):
        seen["decoded"] += kv
        original(self, token, kv, row)

    for owner, method in ((LayerLoad, layer), *((TurnSaver, each) for each in (add_layer, add_pass, add_decoded))):
        monkeypatch.setattr(owner, method.__name__, method)
    return seen


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (1, 8)])
def test_the_tokens_are_those_of_one_device_and_each_holds_its_share(data, tensor, passing):
    """Turns with reuse, one of which overflows, where every transfer that is not asked for is an error."""
    expected = answers_of_one_device()
    for arrays in passing.values():
        arrays.clear()
    with jax.transfer_guard("disallow"), engine_of(data, tensor) as engine:
        assert talk(engine) == expected
        assert engine.metrics.truncations == 1
        assert engine.sessions[0].usage.num_cached_tokens > 0
        assert engine.metrics.failed_saves == engine.metrics.failed_loads == 0
        pool, params = engine._runner.pool, engine.model.params
        num_bytes = 2 * 2 * 4 * 8 * WINDOW * 8 * 4
        assert pool.num_bytes == num_bytes // (data * tensor)
        shares = {
            "pages": (pool.buffers, data * tensor),
            "weights": ([leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1], tensor),
            "loaded": (passing["loaded"], tensor),
            "prefilled": (passing["prefilled"], data * tensor),
            "repaired": (passing["repaired"], data * tensor),
            "decoded": (passing["decoded"], data * tensor),
        }
        for name, (arrays, num_parts) in shares.items():
            assert arrays, name
            for array in arrays:
                shards = array.addressable_shards
                assert len(shards) == data * tensor, name
                assert {shard.data.nbytes for shard in shards} == {array.nbytes // num_parts}, name


@pytest.mark.parametrize(
    ("num_kv_heads", "meshes", "rest"),
    [(8, [(2, 2), (1, 8), (1, 1), (2, 2), (1, 8)], "model"), (2, [(2, 4), (1, 1), (2, 4)], "int8")],
    ids=["as computed", "int8, heads shared by devices"],
)
def test_what_one_mesh_stored_on_ssd_others_go_on_from(tmp_path, num_kv_heads, meshes, rest):
    """One conversation, a turn on each mesh, each in an engine of its own over the same directory."""
    model, store = model_of(num_kv_heads), kit.ssd_store(tmp_path)
    if rest == "model":
        expected = answers_of_one_device()
    else:
        with engine_of(1, 1, model, kv_rest_dtype=rest) as engine:
            expected = talk(engine, TURNS[: len(meshes)])
    for turn, (data, tensor) in enumerate(meshes):
        with jax.transfer_guard("disallow"), engine_of(data, tensor, model, store=store, kv_rest_dtype=rest) as engine:
            num_known = len(engine.session(session_id="one").token_ids)
            assert talk(engine, TURNS[turn : turn + 1], start=turn) == expected[turn : turn + 1]
            usage = engine.sessions[0].usage
            num_cached = num_known - usage.dropped_tokens - 1 if turn else 0
            assert usage.cached_tokens == {"ssd" if turn else "dram": num_cached}
            assert engine.metrics.failed_saves == engine.metrics.failed_loads == 0


def test_drafts_are_checked_in_each_part_and_change_no_token(monkeypatch):
    said = [kit.prompt(30, seed) for seed in range(3)]
    with engine_of(1, 1) as engine:
        answers = [each.token_ids for each in engine.generate(said, SamplingParams(max_tokens=20))]
    right = {tuple(prompt): answer for prompt, answer in zip(said, answers, strict=True)}
    rng = np.random.default_rng(1)

    def find(self, job, most):
        rest = right[tuple(job.prompt_ids)][len(job.output_ids) :][:most]
        return drafts.MOST_MATCH, [token if rng.random() < 0.8 else 88 for token in rest]

    monkeypatch.setattr(drafts, "ROW_TOKENS", 1)
    monkeypatch.setattr(drafts.Lookup, "find", find)
    monkeypatch.setattr(drafts.Drafter, "took", lambda self, *of_step: None)
    with engine_of(2, 2, max_draft_tokens=15) as engine:
        found = [each.token_ids for each in engine.generate(said, SamplingParams(max_tokens=20))]
        assert engine.metrics.accepted_tokens > 20
    assert found == answers


@pytest.mark.parametrize("selection", ["hkvd", "query"])
def test_chunks_are_blended_as_on_one_device(selection):
    """In one order, in another with a history before them, and without."""
    chunks = [kit.prompt(50, 1), kit.prompt(24, 2), kit.prompt(1, 3)]
    blend = dataclasses.replace(BLEND, selection=selection)

    def blended(data: int, tensor: int) -> list[list[int]]:
        with engine_of(data, tensor, model_of(num_layers=4), blend=blend) as engine:
            session = engine.session()
            turns = ([chunks[0], chunks[1]], [chunks[2], chunks[1]], None)
            answers = [kit.say(session, kit.prompt(12, i), 6, context=context) for i, context in enumerate(turns)]
            assert (engine.metrics.blended_turns, engine.metrics.loaded_chunks) == (2, 4)
            assert session.usage.num_cached_tokens == 134
            return answers

    expected = blended(1, 1)
    with jax.transfer_guard("disallow"):
        assert blended(2, 2) == expected


def test_what_devices_do_not_divide_each_has_whole(caplog):
    model = model_of(vocab_size=257, mlp_dim=63)
    with engine_of(1, 2, model) as engine:
        expect_greedy(talk(engine, SHORT), model, SHORT)
        params = engine.model.params["params"]
        for leaf in (params["embed"]["embedding"], params["layer_0"]["mlp"]["w_down"]):
            assert leaf.is_fully_replicated
        assert not params["layer_0"]["attn"]["wq"].is_fully_replicated
    for what in ("vocab_size of 257", "mlp_dim of 63"):
        assert f"{what} is not divisible by tensor_parallel_size=2" in caplog.text


def test_jobs_together_on_two_parts_of_the_rows():
    """More than there are rows, some sampled with a penalty, some cut in their answers, some over pages that stayed."""
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {9: 3.0}}
    sampling = SamplingParams(temperature=0.8, top_k=20, logprobs=3, seed=3, **penalties)

    def answers(data: int, tensor: int) -> tuple[list[list[int]], np.ndarray]:
        logprobs = []
        with engine_of(data, tensor, keep_pages=data > 1) as engine:
            sessions = [engine.session() for _ in range(6)]
            for turn, max_tokens in enumerate((5, 70)):
                sends = [
                    s.send_ids(kit.prompt(70 + 20 * i, turn), max_tokens=max_tokens) for i, s in enumerate(sessions)
                ]
                sends.append(engine.session().send_ids(kit.prompt(7), sampling=sampling, max_tokens=20))
                kit.drain(*sends)
                logprobs += [[each.logprob, *(p for _, p in each.top)] for each in sends[-1].job.token_logprobs]
            assert engine.metrics.truncations > 2
            assert (engine.metrics.resident_histories > 0) == (data > 1)
            return [session.token_ids for session in engine.sessions], np.array(logprobs)

    expected, expected_logprobs = answers(1, 1)
    found, logprobs = answers(2, 2)
    assert found == expected
    assert logprobs.shape == (40, 4)
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=kit.ATOL, rtol=0)


def test_of_prompts_on_either_part_of_the_rows_it_is_told_how_likely_they_were():
    prompts = [kit.prompt(num_tokens) for num_tokens in (3, 70, 130, 20)]
    with engine_of(2, 2) as engine:
        told = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=2))
    for ids, answer in zip(prompts, told, strict=True):
        logits, _ = kit.full_pass(ids, model_of())
        expected = np.array(jax.nn.log_softmax(logits))
        found = [each.logprob for each in answer.prompt_logprobs]
        np.testing.assert_allclose(found, expected[np.arange(len(ids) - 1), ids[1:]], atol=kit.ATOL, rtol=0)


REPAIRS = {
    "attention": OverflowConfig(discarder="heavy_hitters"),
    "deviating": OverflowConfig(repair="deviating", anchor_tokens=4, repair_ratio=0.8),
    "spread": OverflowConfig(anchor_tokens=4, repair_ratio=0.5),
    "computed anew": OverflowConfig(method="tt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REPAIRS, "drift"])
def test_every_way_to_overflow(name, tmp_path):
    overflow = REPAIRS.get(name) or OverflowConfig(drift=ok.random_drift(model_of(), WINDOW, tmp_path)[0])
    turns = [(100, 5), (90, 5), (80, 5), (20, 110), (9, 5)]  # One is cut before its turn, one in its answer.

    def answers(data: int, tensor: int) -> list[list[int]]:
        with engine_of(data, tensor, overflow=overflow) as engine:
            found = talk(engine, turns)
            assert engine.metrics.truncations >= 2
            return found

    assert answers(2, 4) == answers(1, 1)


# Where everything lies.


def test_a_full_context_is_computed_at_idle_as_on_one_device():
    """Ahead of a cut for a message, and anew behind one in an answer: what follows is greedy over what is left."""
    model = model_of()
    with engine_of(2, 2, model) as engine:
        session = engine.session()
        for num_new, max_tokens in ((WINDOW - 30, 8), (40, 8), (20, WINDOW // 2), (20, 8)):
            ok.say(session, kit.prompt(num_new, seed=num_new), max_tokens)
            if max_tokens == 8:  # The others are cut in the middle.
                kit.expect_right(session, model=model)
            assert session.usage.repaired_tokens == 0
            engine.wait_for_saves()
            while engine.step():
                pass
            engine.wait_for_saves()
        assert engine.metrics.truncations == 2
        assert engine.metrics.idle_recomputes > 2


def test_buffers_are_held_against_what_each_device_has(monkeypatch):
    monkeypatch.setattr(device_memory, "device_memory_bytes", lambda: GIB // 2)
    with pytest.raises(ValueError, match=r"write_buffer_gib must be at most the device's 0.50 GiB of memory, got 1"):
        engine_of(1, 1)
    engine_of(1, 4).close()
    monkeypatch.setattr(device_memory, "device_memory_bytes", lambda: GIB // 4)
    with pytest.raises(ValueError, match=r"got .*, 0\.25 for write_buffer_gib, .* for the pool of KV"):
        engine_of(1, 4)
    with pytest.raises(ValueError, match=r"4 times a device's 0\.25 GiB of memory, got 2"):
        engine_of(1, 4, write_buffer_gib=2.0)


def test_weights_are_put_and_drawn_where_the_paper_says():
    """Each device gets its part of every leaf, and the abstract mesh tells how large that is."""
    config = config_of(2)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 4}
    real, paper = model_sharding(config, **sizes), model_sharding(config, **sizes, on_paper=True)
    host = tiny.tiny_params(config, seed=1)
    put = params_to_device(host, real.of_params(config, host))
    drawn = random_params(config, dtype="float32", seed=5, sharding=real)
    numbers = random_params(config, dtype="float32", seed=5)
    for slot in parameter_slots(config):
        of_host, of_put, of_drawn, of_one = (
            functools.reduce(lambda tree, key: tree[key], slot.path, tree["params"])
            for tree in (host, put, drawn, numbers)
        )
        for array, expected in ((of_put, of_host), (of_drawn, of_one)):
            assert array.sharding.is_equivalent_to(real.of_slot(slot), array.ndim)
            np.testing.assert_array_equal(np.asarray(array), np.asarray(expected))
            assert array.addressable_shards[0].data.shape == paper.of_slot(slot).shard_shape(slot.shape)
    assert put["params"]["layer_0"]["attn"]["wo"].addressable_shards[0].data.shape == (2, 8, 32)
    assert put["params"]["layer_0"]["attn"]["wk"].addressable_shards[0].data.shape == (32, 1, 8)


# What is compiled.


class OnMesh:
    """A model on a mesh, and what a step of 4 rows takes: pages, rows with a token each, rotations, and scalars."""

    def __init__(self, num_kv_heads: int, data: int, tensor: int) -> None:
        self.config = config = config_of(num_kv_heads)
        self.sharding = model_sharding(config, data_parallel_size=data, tensor_parallel_size=tensor)
        params = tiny.tiny_params(config)
        self.params = params_to_device(params, self.sharding.of_params(config, params))
        self.pages = page_steps.make_pages(config, 8, 128, "float32", self.sharding)
        starts = np.tile(np.arange(4 // data + 1), data)
        self.rows = Rows(*map(self.put, (np.zeros((4, 2)), starts, np.zeros(4))))
        self.rotations = steps.rotation_tables(config, WINDOW, sharding=self.sharding)
        self.zero = self.put(0)

    def put(self, numbers: object, dtype: type = np.int32) -> jax.Array:
        return jax.device_put(np.asarray(numbers, dtype), self.sharding.replicated)

    def collectives(self, function: Callable, *arguments: object) -> list[tuple[str, str]]:
        """Of a compiled function: each collective's kind, and the shapes that it gives."""
        text = function.lower(*arguments, sharding=self.sharding).compile().as_text()
        pattern = r"= (.*?) (all-\w+|collective-\w+|reduce-scatter|ragged-\w+)(?:-start)?\("
        return [(kind, shapes) for shapes, kind in re.findall(pattern, text)]


@pytest.mark.parametrize(("num_kv_heads", "data", "tensor"), [(8, 2, 2), (2, 1, 8)])
def test_a_decode_step_adds_up_twice_a_layer_and_gathers_no_kv(num_kv_heads, data, tensor):
    on = OnMesh(num_kv_heads, data, tensor)
    found = on.collectives(steps.decode, on.config, on.params, on.pages, on.put(np.zeros(4)), on.rows, on.rotations)
    num_rows = 4 // data
    sums = [shapes for kind, shapes in found if kind == "all-reduce"]
    of_layers = [shapes for shapes in sums if shapes.startswith(f"f32[{num_rows},32]")]
    assert len(of_layers) == 2 * on.config.num_layers
    assert [shapes for shapes in sums if shapes not in of_layers] == [f"f32[1,{num_rows},32]{{2,1,0}}"], "of embedding"
    others = [(kind, shapes) for kind, shapes in found if kind != "all-reduce"]
    assert {kind for kind, _ in others} == {"all-gather"}
    assert len(others) <= 2
    assert all(re.match(rf"f32\[({num_rows}|4),256\]", shapes) for _, shapes in others), "of logits"


@pytest.mark.parametrize(
    ("data", "tensor", "num_kv_heads"), [pytest.param(1, 4, 8, marks=pytest.mark.slow), (2, 2, 8), (1, 8, 2)]
)
def test_adapters_answer_like_on_one_device(data, tensor, num_kv_heads, tmp_path):
    """Their matrices are divided as the model's are; with a context that is cut and repaired in the middle."""
    config = config_of(num_kv_heads)
    base = tiny.hf_tensors(config, tiny.tiny_params(config, seed=1))
    paths = [ak.write(tmp_path / f"{lora.seed}", lora, ak.tensors_of(lora, base)) for lora in (ak.FIRST, ak.SECOND)]

    def answers(data: int, tensor: int) -> list[list[int]]:
        with engine_of(data, tensor, model_of(num_kv_heads), max_adapters=2, max_adapter_rank=4) as engine:
            for name, path in zip("ab", paths, strict=True):
                engine.load_adapter(name, path)
            sessions, found = [engine.session(adapter=name) for name in (None, "a", "b")], list[list[int]]()
            for turn, (num_tokens, max_tokens) in enumerate(TURNS):
                prompt = kit.prompt(num_tokens, turn)
                kit.drain(*(session.send_ids(prompt, max_tokens=max_tokens) for session in sessions))
                found += [session.token_ids[-max_tokens:] for session in sessions]
            assert engine.metrics.repaired_tokens > 0
            arrays = engine._runner.params["adapters"]["layer_0"]
            for (module, name), part in {("attn", "wq_b"): tensor, ("mlp", "w_down_a"): tensor}.items():
                array = arrays[module][name]
                assert len({str(shard.index) for shard in array.addressable_shards}) == part
        return found

    assert answers(data, tensor) == answers(1, 1)


def test_a_layer_of_a_pass_adds_up_twice_and_gathers_nothing():
    on = OnMesh(2, 2, 4)
    x = steps.embed(on.config, on.params, on.put(np.zeros((2, 24))), on.sharding)
    rows = on.rows._replace(places=on.put(np.zeros(48)))
    given = on.config, steps.layer_of(on.params, 0), x, on.pages[0], rows, on.rotations[0], 16, on.config.kind_of(0)
    found = on.collectives(steps.layer_step, *given)
    assert [(kind, shapes.split("{")[0]) for kind, shapes in found] == [("all-reduce", "f32[16,32]")] * 2


def test_pages_are_filled_cut_and_copied_where_they_are():
    on = OnMesh(2, 2, 4)
    history = jax.device_put(np.zeros((2, 256, 2, 8), np.float32), on.sharding.kv)
    table = on.put([0, 1])
    assert on.collectives(page_steps.fill_pages, on.pages[0], history, table, on.zero, on.zero, on.zero) == []
    numbers, drift = (on.zero, on.put(np.zeros(256)), on.zero), on.put(np.zeros((2, 2, 2, 8)), np.float32)
    assert on.collectives(page_steps.cut_pages, on.pages, on.put([[0, 1]] * 2), *numbers, drift, on.zero) == []
    assert on.collectives(page_steps.copy_page, on.pages, on.zero, on.zero, on.zero) == []


def test_nothing_is_compiled_after_warmup():
    model = model_of(head_dim=12)  # Like no other test's.
    with engine_of(2, 4, model, max_tpot_ms=1.0, context_window=WINDOW // 2) as engine:
        with CompileCounter() as during:
            engine.warmup()
        assert during.count > 0
        assert engine.rates is not None
        with CompileCounter() as after:
            talk(engine, [(n, 5) for n in (1, 9, 65, 30, 100)])
            sampling = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, max_tokens=4)
            told = [dataclasses.replace(each, logprobs=2) for each in (sampling, SamplingParams(max_tokens=9))]
            penalised = dataclasses.replace(sampling, frequency_penalty=0.5)
            engine.generate([kit.prompt(3), kit.prompt(100)] * 3, [sampling, SamplingParams(max_tokens=9)] * 3)
            engine.generate([kit.prompt(3), kit.prompt(100)] * 2, [*told, *told[::-1]])
            engine.generate([kit.prompt(3)] * 3, [penalised, *told])
            engine.generate([kit.prompt(3)], told[1])
            talk(engine, [(3, 200), (3, 5)])
            assert engine.metrics.truncations > 0
        assert after.count == 0


def test_one_device_is_no_mesh():
    """Its arrays belong to none: what takes them with others that do not is compiled once for both."""
    assert model_sharding(config_of()) is None
    with engine_of(1, 1) as engine:
        assert engine.model is model_of()
        talk(engine, TURNS[:1])
        arrays = (engine._runner.pool.buffers, engine.model.params, engine._runner.empty_kv(0, 8))
        assert not any(leaf.committed for leaf in jax.tree.leaves(arrays))


# Bad input.


@pytest.mark.parametrize(
    ("changes", "data", "tensor", "message"),
    [
        ({}, 1, 3, "tensor_parallel_size must be one of 1, 2, 4, 8, .*got 3"),
        ({"num_kv_heads": 3, "num_heads": 9}, 1, 2, "one of 1, 3, 9, .*got 2"),
        ({"num_kv_heads": 2}, 4, 4, "data_parallel_size=4 .*tensor_parallel_size=4 .*16 .*8"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_before_anything_is_compiled(changes, data, tensor, message):
    model = model_of(**changes)
    with CompileCounter() as counter, pytest.raises(ValueError, match=message):
        engine_of(data, tensor, model)
    assert counter.count == 0


def test_a_model_on_another_mesh_is_refused():
    layout = functools.partial(model_sharding, tensor_parallel_size=2)
    model = model_of().laid_out(layout)
    assert model.laid_out(layout) is model
    with pytest.raises(ValueError, match=r"'tensor': 4.*, got .*'tensor': 2"):
        engine_of(1, 4, model)
    with pytest.raises(ValueError, match="one device, got"):
        engine_of(1, 1, model)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(None, None, "tensor"), ("data", "tensor", None), (None, None, None)]
)
def test_the_kernel_for_4_bits_runs_on_each_device_over_what_it_has(monkeypatch, rows, inputs, outputs):
    kernel = functools.partial(int4_product.gpu_product, interpret=True)
    monkeypatch.setattr(int4_product, "gpu_product", kernel)
    monkeypatch.setattr(int4_product, "kernel_is_served", lambda *_: True)
    int4_product._on_mesh.cache_clear()
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def placed(each: jax.Array, *axes: str | None) -> jax.Array:
        return jax.device_put(each, NamedSharding(mesh, PartitionSpec(*axes)))

    whole = Int4Matrix(*(each[1] for each in weights_of(72, 64)))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 72 * 32)), jnp.bfloat16)
    given = placed(x, rows, inputs), Int4Matrix(*(placed(each, inputs, outputs) for each in whole))
    with backend.assumed(backend.GPU):
        product = jax.jit(int4_product.product).lower(*given).compile()
    int4_product._on_mesh.cache_clear()
    text, found = product.as_text(), product(*given)
    assert "all-gather" not in text
    assert ("all-reduce" in text) == (inputs is not None)
    assert found.addressable_shards[0].data.shape == (3 if rows else 6, 16 if outputs else 64)
    wanted = int4_product.by_xla(x, whole, dtype=jnp.float32)
    size = np.abs(np.asarray(x, np.float32)) @ np.abs(kit.in_float32(whole))
    assert (np.abs(np.asarray(found, np.float32) - wanted) <= 2**-8 * size).all()


def test_weights_in_4_bits_are_divided_by_whole_groups(tmp_path):
    """2 devices have 3 groups of `w_down` each; of 4 each has all 6, and none has a part of one."""
    config = config_of(4, embed_dim=64, mlp_dim=192, head_dim=32)
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config, seed=1))
    load = functools.partial(ca_jax.load_model, str(tmp_path), dtype="bfloat16", weight_dtype="int4")
    one = load()
    for num_tensor, num_parts in ((2, 2), (4, 1)):
        loaded = load(layout=functools.partial(model_sharding, tensor_parallel_size=num_tensor))
        moved = one.laid_out(functools.partial(model_sharding, tensor_parallel_size=num_tensor))
        for each in (loaded, moved):
            jax.tree.map(np.testing.assert_array_equal, each.params, one.params)
            layer = each.params["params"]["layer_0"]
            for matrix, parts in ((layer["attn"]["wo"], num_tensor), (layer["mlp"]["w_down"], num_parts)):
                assert isinstance(matrix, Int4Matrix)
                sizes = [leaf.addressable_shards[0].data.shape[0] for leaf in matrix]
                assert sizes == [size // parts for size in (leaf.shape[0] for leaf in matrix)]
            for matrix in (layer["attn"]["wq"], layer["mlp"]["w_up"]):
                assert {leaf.addressable_shards[0].data.shape[1] * num_tensor for leaf in matrix} == {
                    matrix.numbers.shape[1]
                }
        with engine_of(1, num_tensor, kit.wide_but_small(one), weight_dtype="int4") as engine:
            expect_greedy(talk(engine, SHORT), kit.spelled_out(one), SHORT)


def test_weights_in_8_bits_lie_as_wide_ones_do_and_answer_as_on_one_device(tmp_path):
    config = config_of(4)
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config, seed=1))
    layout = functools.partial(model_sharding, data_parallel_size=2, tensor_parallel_size=2)
    load = functools.partial(ca_jax.load_model, str(tmp_path), dtype="bfloat16", weight_dtype="int8")
    one, loaded = load(), load(layout=layout)
    moved = one.laid_out(layout)
    for of_one, of_loaded, of_moved in zip(
        *(jax.tree.leaves(each.params) for each in (one, loaded, moved)), strict=True
    ):
        assert of_loaded.sharding == of_moved.sharding
        np.testing.assert_array_equal(np.asarray(of_loaded), np.asarray(of_one))
        np.testing.assert_array_equal(np.asarray(of_moved), np.asarray(of_one))
    attn = loaded.params["params"]["layer_0"]["attn"]
    divided = (attn["wq"].numbers, attn["wq"].scales, attn["wo"].numbers)
    assert all(leaf.addressable_shards[0].data.size * 2 == leaf.size for leaf in divided)
    assert attn["wo"].scales.is_fully_replicated, "outputs of a sum are whole on each device"
    in_float32 = jax.tree.map(lambda leaf: leaf if leaf.dtype == np.int8 else leaf.astype(np.float32), one.params)
    model = dataclasses.replace(one, params=in_float32)  # So that rounding decides no token.
    with engine_of(2, 2, model, weight_dtype="int8") as engine:
        expect_greedy(talk(engine, SHORT), model, SHORT)
        assert engine.sessions[0].usage.num_cached_tokens > 0
