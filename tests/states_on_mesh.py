"""Layers that keep states on a mesh of eight virtual devices, against one. `tests/test_mesh.py` starts the process."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from benchmarks.compiles import CompileCounter
from ca_jax.device import page_steps, state_steps, steps
from ca_jax.device.pages import PoolSize
from ca_jax.device.states import StatePool
from ca_jax.device.transfer import host_view, params_to_device, to_host_memory
from ca_jax.models.config import ModelConfig
from ca_jax.models.paged_attention import Rows
from ca_jax.models.recurrence import RecurrenceConfig
from ca_jax.models.sharding import ModelSharding, model_sharding
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Session
from ca_jax.testing import tiny
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit
from tests.families_on_mesh import FAMILIES
from tests.on_mesh import WINDOW, config_of, engine_of, model_of
from tests.storage.store_helpers import as_bits

KINDS = ("lfm2", "qwen3_5", "granite4", "kimi_linear")
"""A family of each kind of recurrence."""
SLOW = [*KINDS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS[2:])]


def say(sessions: list[Session], lengths: list[int], turn: int) -> list[tuple[list[int], np.ndarray]]:
    """Has several sessions say something at once: their answers, and how likely their tokens were."""
    sampling = SamplingParams(temperature=0.0, logprobs=3)
    sent = [
        each.send_ids(kit.prompt(length, turn), sampling=sampling, max_tokens=5 + i)
        for i, (each, length) in enumerate(zip(sessions, lengths, strict=True))
    ]
    kit.drain(*sent)
    of_jobs = [each.job.token_logprobs for each in sent]
    return [
        ([token.token_id for token in job], np.array([[each.logprob, *(p for _, p in each.top)] for each in job]))
        for job in of_jobs
    ]


def expect_alike(found: list[tuple[list[int], np.ndarray]], expected: list[tuple[list[int], np.ndarray]]) -> None:
    for (tokens, logprobs), (of_tokens, of_logprobs) in zip(found, expected, strict=True):
        assert tokens == of_tokens
        np.testing.assert_allclose(logprobs, of_logprobs, atol=kit.ATOL, rtol=0)


# Tokens.


@pytest.mark.parametrize("name", SLOW)
def test_jobs_on_both_parts_of_the_rows_answer_like_on_one_device(name):
    """More than there are rows, over three turns with reuse; in the last each goes on from another turn's end."""
    model = model_of(**FAMILIES[name])

    def answers(data: int, tensor: int) -> list[tuple[list[int], np.ndarray]]:
        found = []
        with engine_of(data, tensor, model, overflow=None) as engine:
            sessions = [engine.session() for _ in range(5)]
            for turn, lengths in enumerate(([70, 3, 21, 1, 30], [5, 66, 2, 9, 1])):
                found += say(sessions, lengths, turn)
                engine.wait_for_saves()
            for session in sessions[::2]:
                session.rewind(session.conversation.states[0][1])
            found += say(sessions, [4] * 5, 2)
            assert all(session.usage.num_cached_tokens > 0 for session in sessions)
            assert engine.metrics.failed_saves == engine.metrics.failed_loads == 0
        return found

    expected = answers(1, 1)
    with jax.transfer_guard("disallow"):
        expect_alike(answers(2, 2), expected)


@pytest.mark.parametrize("name", SLOW)
def test_what_one_mesh_stored_on_ssd_others_go_on_from(tmp_path, name):
    """One conversation, a turn on each mesh, each in an engine of its own over the same directory; against no reuse."""
    model, store = model_of(**FAMILIES[name]), kit.ssd_store(tmp_path)
    lengths = [60, 3, 20, 1, 9]
    with engine_of(1, 1, model, overflow=None, store=kit.STORE_OFF) as engine:
        session = engine.session()
        expected = [say([session], [length], turn) for turn, length in enumerate(lengths)]
    for turn, mesh in enumerate([(1, 1), (2, 2), (1, 4), (2, 2), (1, 1)]):
        with jax.transfer_guard("disallow"), engine_of(*mesh, model, store=store, overflow=None) as engine:
            session = engine.session(session_id="one")
            num_known = len(session.token_ids)
            expect_alike(say([session], lengths[turn : turn + 1], turn), expected[turn])
            assert session.usage.num_cached_tokens == (num_known - 1 if turn else 0)


def test_what_devices_do_not_divide_each_has_whole(caplog):
    """Heads that two devices do not divide, beside channels that they do and that they do not."""
    for value_dim, is_divided in ((10, True), (5, False)):
        heads = {"num_key_heads": 3, "num_value_heads": 3, "key_dim": 6, "value_dim": value_dim}
        recurrence = RecurrenceConfig(kind="gated_delta", layers=(0,), conv_width=4, **heads)
        model = model_of(recurrence=recurrence)
        with engine_of(1, 1, model, overflow=None) as engine:
            expected = [say([engine.session()], [30], 0)]
        with engine_of(2, 2, model, overflow=None) as engine:
            expect_alike(say([engine.session()], [30], 0), expected[0])
            mixer = engine.model.params["params"]["layer_0"]["mixer"]
            assert mixer["w_z"].is_fully_replicated
            assert mixer["w_qkv"].is_fully_replicated != is_divided
    assert "recurrence num_value_heads of 3 is not divisible by tensor_parallel_size=2" in caplog.text


# States.


def random_states(pool: StatePool, seed: int) -> list[np.ndarray]:
    """Of all layers, any bits: zeros of both signs and NaN among them."""
    rng = np.random.default_rng(seed)
    found = [rng.standard_normal(each.shape).astype(each.dtype) for each in pool.restored_shapes]
    for each in found:
        each.reshape(-1)[:3] = -0.0, np.nan, 0.0
    return found


def pools(config: ModelConfig, dtype: str) -> Iterator[StatePool]:
    """Of eight rows, on several meshes."""
    for data, tensor in ((1, 1), (2, 2), (4, 2), (2, 1), (1, 4)):
        sharding = model_sharding(config, data_parallel_size=data, tensor_parallel_size=tensor)
        yield StatePool(config, dtype, PoolSize(4, 16, 64, 8, data), sharding)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_is_the_same_bits_whatever_mesh_it_is_on(name, dtype):
    """Each row stands at one of its own, and goes on standing there while others' are put beside it."""
    for pool in pools(config_of(**FAMILIES[name]), dtype):
        given = [random_states(pool, seed) for seed in range(8)]
        for row in (3, 6, 0, 7, 2, 5, 1, 4):
            pool.restore(row, given[row], 10 + row)
        for row, wanted in enumerate(given):
            found = pool.state(row, 10 + row)
            assert pool.state(row, 11 + row) is None
            for each, expected in zip(found, wanted, strict=True):
                there = host_view(to_host_memory(each))
                assert there.dtype == expected.dtype
                np.testing.assert_array_equal(as_bits(there), as_bits(expected))


def test_rows_of_a_step_have_cells_of_their_part_and_padding_has_none():
    """Of eight rows, all but those of padding; a row that stands elsewhere than it did writes where it stood."""
    rows = [0, None, 3, None, 4, 5, 7, None]
    for pool in pools(config_of(**FAMILIES["lfm2"]), "float32"):
        num_own = 16 // pool._size.num_parts
        pool.stands({3: 1, 7: 1})
        read, write = map(np.asarray, pool.cells(rows))
        for row, each_read, each_write in zip(rows, read, write, strict=True):
            if row is None:
                assert each_write == num_own
            else:
                assert {each_read, each_write} == {2 * row % num_own, 2 * row % num_own + 1}
                assert (each_read > each_write) == (row in (3, 7))


def test_each_device_holds_its_share_of_states_and_weights():
    for name in KINDS:
        config = config_of(**FAMILIES[name])
        one, *others = pools(config, "float32")
        assert [pool.num_bytes * parts for pool, parts in zip(others, (4, 8, 2, 4), strict=True)] == [one.num_bytes] * 4
        sharding = model_sharding(config, data_parallel_size=2, tensor_parallel_size=2)
        host = tiny.tiny_params(config)
        params = params_to_device(host, sharding.of_params(config, host))["params"]
        mixer = params[f"layer_{config.recurrence.layers[0]}"]["mixer"]
        whole = {key for key, leaf in mixer.items() if leaf.is_fully_replicated}
        small = {"b_out", "scale", "w_decay_a", "w_gate_a", "kernel_q", "kernel_k", "kernel_v"}
        assert whole <= small
        for key in mixer.keys() - whole:
            assert mixer[key].addressable_shards[0].data.nbytes * 2 == mixer[key].nbytes, key


# What is compiled.


def collectives(function: object, *arguments: object, sharding: ModelSharding) -> list[str]:
    """Of a compiled function: each collective's kind."""
    text = function.lower(*arguments, sharding=sharding).compile().as_text()
    return re.findall(r"= .*? (all-[\w-]+?|collective-\w+|reduce-scatter|ragged-[\w-]+?)(?:-start)?\(", text)


@pytest.mark.parametrize(("name", "num_gathers"), [("lfm2", 1), ("qwen3_5", 1), ("kimi_linear", 4)])
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (1, 4)])
def test_a_layer_gathers_channels_and_adds_up_twice_and_states_stay_where_they_are(name, num_gathers, data, tensor):
    config = config_of(**FAMILIES[name])
    sharding = model_sharding(config, data_parallel_size=data, tensor_parallel_size=tensor)
    host = tiny.tiny_params(config)
    params = params_to_device(host, sharding.of_params(config, host))
    pool = StatePool(config, "float32", PoolSize(2, 128, WINDOW, 4, data), sharding)

    def put(numbers: object) -> jax.Array:
        return jax.device_put(np.asarray(numbers, np.int32), sharding.replicated)

    starts, cells = np.tile(np.arange(4 // data + 1), data), pool.cells([0, None, 2, 3])
    rows = Rows(*map(put, (np.zeros((4, 2)), starts, np.zeros(24 * data))))
    x, layer = steps.embed(config, params, put(np.zeros((data, 24))), sharding), config.recurrence.layers[0]
    given = steps.layer_of(params, layer), x, pool.buffers[0], cells, rows, 16, config.kind_of(layer)
    found = collectives(state_steps.layer_step, config, *given, sharding=sharding)
    assert found == ["all-gather"] * num_gathers + ["all-reduce"] * 2
    pages = page_steps.make_pages(config, 8, 128, "float32", sharding)
    of_rows = put(np.zeros(4)), rows._replace(places=put(np.zeros(4))), steps.rotation_tables(config, WINDOW)
    found = collectives(state_steps.decode, config, params, pages, pool.buffers, cells, *of_rows, sharding=sharding)
    assert {*found} == {"all-gather", "all-reduce"}
    assert collectives(state_steps.read_state, pool.buffers, put(0), sharding=sharding) == []
    given = put(0), pool.restored_shapes, put(0)
    assert collectives(state_steps.write_state, pool.buffers, *given, sharding=sharding) == []


def test_nothing_is_compiled_after_warmup():
    model: LoadedModel = model_of(**{**FAMILIES["lfm2"], "head_dim": 12})  # Like no other test's.
    with engine_of(2, 2, model, overflow=None, context_window=WINDOW // 2) as engine:
        engine.warmup()
        with CompileCounter() as after:
            sessions = [engine.session() for _ in range(3)]
            for turn in range(2):
                kit.drain(*(each.send_ids(kit.prompt(20, turn), max_tokens=4) for each in sessions))
                engine.wait_for_saves()
            assert all(each.usage.num_cached_tokens == 23 for each in sessions)
        assert after.count == 0
