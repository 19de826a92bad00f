"""LoRA adapters through the engine, held against the same adapters merged into the model's weights."""

from __future__ import annotations

import contextlib
import hashlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import ca_jax
from benchmarks.compiles import CompileCounter
from ca_jax.device import transfer
from ca_jax.device.warmup import Shapes
from ca_jax.errors import AdapterError, AdapterInUseError, InvalidRequestError, ProcessesError, UnknownAdapterError
from ca_jax.models import cpu_kernels
from ca_jax.storage.records import Residency
from ca_jax.turns.requests import SamplingParams
from tests import adapters_kit as ak
from tests import engine_kit as kit
from tests import families_kit
from tests import overflow_kit as ok
from tests.threads_kit import ThreadProcesses, run_together

LORAS = {None: None, "a": ak.FIRST, "b": ak.SECOND, "c": ak.PATTERNED}
PROMPT = kit.prompt(40)


def drained(sessions, prompts, max_tokens=10):
    """A turn of each, all in one batch."""
    answers = [session.send_ids(ids, max_tokens=max_tokens) for session, ids in zip(sessions, prompts, strict=True)]
    kit.drain(*answers)
    return [session.token_ids[session.usage.prompt_tokens :] for session in sessions]


def test_a_batch_of_base_and_adapters_answers_as_each_merged_model_does():
    """The same prompt for all, in one pass; then turns of different lengths over stored KV."""
    with ak.engine_of(ak.FIRST, ak.SECOND, ak.PATTERNED) as engine:
        assert bool(engine._runner.params["packed"]) == (cpu_kernels.kind() is not None), "packed products are used"
        sessions = [engine.session(adapter=name) for name in LORAS]
        assert [session.adapter for session in sessions] == list(LORAS)
        for prompts in ([PROMPT] * 4, [kit.prompt(30 - 9 * i, seed=i) for i in range(4)]):
            before = [list(session.token_ids) for session in sessions]
            answers = drained(sessions, prompts)
            for session, known, new, answer, lora in zip(
                sessions, before, prompts, answers, LORAS.values(), strict=True
            ):
                assert answer == ak.pair_of(lora).their_answer([*known, *new], 10)
                assert session.usage.num_cached_tokens == max(len(known) - 1, 0)
            assert len({tuple(answer) for answer in answers}) == 4, "each adapter says something else"
            engine.wait_for_saves()
        for session, lora in zip(sessions, LORAS.values(), strict=True):
            stored = kit.stored_kv(engine, session)
            expected = kit.full_pass(session.token_ids, ak.model_of(lora))[1][:, :, : stored.shape[2]]
            np.testing.assert_allclose(stored, expected, rtol=0, atol=kit.ATOL)


def test_logits_are_those_of_the_merged_model():
    with ak.engine_of(ak.PATTERNED, ak.FIRST) as engine:
        session = engine.session(adapter="b")
        with ok.recorded_logits(engine) as logits:
            answer = kit.say(session, PROMPT, 6)
        theirs = ak.pair_of(ak.FIRST).their_logits([*PROMPT, *answer])
        np.testing.assert_allclose(np.stack(logits), theirs[len(PROMPT) - 1 : -1], rtol=0, atol=kit.ATOL)


def test_prefixes_are_shared_within_an_adapter_and_never_across():
    with ak.engine_of(ak.FIRST, ak.SECOND) as engine:
        params = SamplingParams(max_tokens=4)
        for cached in (0, len(PROMPT) - 1):
            for name in (None, "a", "b"):
                [found] = engine.generate([PROMPT], params, adapter=name)
                assert found.usage.num_cached_tokens == cached, f"adapter {name}"
                assert found.token_ids == kit.greedy_answer(PROMPT, 4, ak.model_of(LORAS[name]))
                engine.wait_for_saves()


@pytest.mark.parametrize("tier", ["device", "dram", "ssd"])
def test_no_tier_gives_an_adapters_kv_to_another(tier, tmp_path):
    """KV of the same tokens is on the device, in DRAM, or on SSD alone: only who has the same adapter finds it."""
    store = kit.ssd_store(tmp_path) if tier == "ssd" else kit.SMALL.store
    with ak.engine_of(ak.FIRST, ak.SECOND, keep_pages=tier == "device", store=store) as engine:
        kit.say(engine.session(session_id="first", adapter="a"), PROMPT, 20)
        engine.wait_for_saves()
        if tier == "ssd":
            engine._kv.store.leave_dram(engine.sessions[0].key)
            assert engine.stored.find("first").residency is Residency.SSD
        for name in (None, "b", "a"):
            session = engine.session(adapter=name)
            kit.check_turn(session, PROMPT, 4, model=ak.model_of(LORAS[name]))
            assert bool(session.usage.num_cached_tokens) == (name == "a")


def test_one_name_has_other_kv_under_another_adapter():
    """Without SSD a conversation that is let go of is forgotten, and its KV may stay for a while."""
    with ak.engine_of(ak.FIRST, ak.SECOND) as engine:
        for name in ("a", "b", None):
            session = engine.session(session_id="the same", adapter=name)
            kit.check_turn(session, PROMPT, 4, model=ak.model_of(LORAS[name]))
            assert session.usage.num_cached_tokens == 0
            engine.wait_for_saves()
            engine.release(session)


def test_a_session_keeps_its_adapter_over_a_restart(tmp_path):
    store = kit.ssd_store(tmp_path)
    with ak.engine_of(ak.FIRST, ak.SECOND, store=store) as engine:
        for name in (None, "a", "b"):
            kit.say(engine.session(session_id=f"with {name}", adapter=name), PROMPT, 8)
    with kit.small_engine(ak.model_of(None), store=store, max_adapters=3, max_adapter_rank=6) as engine:
        assert sorted(name for _, name in engine.stored.names()) == ["with None", "with a", "with b"]
        assert engine.stored.conversation("with a").adapter == "a"
        with pytest.raises(UnknownAdapterError, match=r"one that is loaded \(none\), got 'a': load it first"):
            engine.session(session_id="with a")
        engine.load_adapter("a", ak.written(ak.SECOND))
        with pytest.raises(
            UnknownAdapterError, match=r"'a' whose fingerprint is [0-9a-f]{64}, got the one from .* loaded"
        ):
            engine.session(session_id="with a")
        engine.unload_adapter("a")
        for name in ("b", "a"):  # In other slots than before.
            engine.load_adapter(name, ak.written(LORAS[name]))
        with pytest.raises(InvalidRequestError, match="must go on with adapter 'a', got adapter 'b'"):
            engine.session(session_id="with a", adapter="b")
        for name in ("a", "b", None):
            session = engine.session(session_id=f"with {name}")
            assert session.adapter == name
            num_known = len(session.token_ids)
            assert num_known == len(PROMPT) + 8
            kit.check_turn(session, kit.prompt(7), 8, model=ak.model_of(LORAS[name]))
            assert session.usage.cached_tokens == {"ssd": num_known - 1}


def test_a_killed_process_leaves_which_adapter_a_conversation_had(tmp_path):
    """In the log of open conversations, where SSD has nothing of it yet; copied as it lies while the engine runs."""
    with ak.engine_of(ak.FIRST, store=kit.ssd_store(tmp_path / "first")) as engine:
        session = engine.session(session_id="one", tenant="some", adapter="a")
        kit.say(session, PROMPT, 8)
        engine.wait_for_saves()
        engine.drop_stored(session)
        engine.wait_for_saves()
        shutil.copytree(tmp_path / "first", tmp_path / "second")
    with ak.engine_of(ak.FIRST, store=kit.ssd_store(tmp_path / "second")) as engine:
        assert engine.stored.names() == (("some", "one"),)
        again = engine.session(session_id="one", tenant="some")
        assert (again.adapter, again.token_ids, again.key) == ("a", session.token_ids, session.key)
        kit.check_turn(again, kit.prompt(7), 8, model=ak.model_of(ak.FIRST))


def test_processes_that_serve_as_one_load_the_same_adapter():
    def run(processes: ThreadProcesses) -> list[int]:
        with ak.engine_of(ak.FIRST, processes=processes) as engine:
            session = engine.session(session_id="one", adapter="a")
            kit.check_turn(session, PROMPT, 8, model=ak.model_of(ak.FIRST))
            with pytest.raises(ProcessesError, match="adapter"):
                engine.load_adapter("b", ak.written((ak.FIRST, ak.SECOND)[processes.index]))
            return session.token_ids

    one, other = run_together(2, run)
    assert one == other


def test_a_fork_has_the_adapter_of_what_it_goes_on_with():
    with ak.engine_of(ak.FIRST) as engine:
        session = engine.session(adapter="a")
        kit.say(session, PROMPT, 8)
        engine.wait_for_saves()
        fork = engine.fork(session, len(PROMPT) + 4)
        assert fork.adapter == "a"
        kit.check_turn(fork, kit.prompt(5), 6, model=ak.model_of(ak.FIRST))
        assert fork.usage.num_cached_tokens > 0


TURNS = [(kit.prompt(56, 0), 8), (kit.prompt(40, 1), 8), (kit.prompt(14, 2), 40), (kit.prompt(30, 3), 30)]


@pytest.mark.parametrize(
    "how",
    [
        {"repair": "spread"},
        {"method": "tt"},
        pytest.param({"repair": "spread", "repair_ratio": 0.3}, marks=pytest.mark.slow),
        pytest.param({"repair": "none"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_overflow_is_repaired_with_the_sessions_own_adapter(how):
    """Before a turn and in the middle of an answer, beside sessions with another adapter and with none."""
    changes = {"context_window": 128, "overflow": ca_jax.OverflowConfig(truncation_ratio=0.4, **how)}
    with ak.engine_of(ak.FIRST, ak.SECOND, **changes) as engine:
        sessions = [engine.session(adapter=name) for name in (None, "a", "b")]
        answers = [drained(sessions, [prompt] * 3, max_tokens) for prompt, max_tokens in TURNS]
        assert all(session.num_dropped for session in sessions)
        assert bool(engine.metrics.repaired_tokens) == (how.get("repair") == "spread")
    for found, name in zip(zip(*answers, strict=True), (None, "a", "b"), strict=True):
        assert list(found) == ak.say_alone(LORAS[name], TURNS, **changes), f"adapter {name}"


@pytest.mark.parametrize("selection", ["hkvd", pytest.param("spread", marks=pytest.mark.slow)])
def test_chunks_are_computed_and_blended_with_the_sessions_own_adapter(selection):
    chunks = [kit.prompt(40, 7), kit.prompt(33, 8)]
    blend = ca_jax.BlendConfig(recompute_ratio=0.4, selection=selection)

    def ask(engine, adapter=None):
        return kit.say(engine.session(adapter=adapter), kit.prompt(9), 8, context=chunks)

    with ak.engine_of(ak.FIRST, ak.SECOND, blend=blend) as engine:
        for name in (None, "a", "b"):
            found = [ask(engine, name), ask(engine, name)]
            assert engine.metrics.computed_chunks == 2 * (1 + [None, "a", "b"].index(name)), "once for each adapter"
            with kit.small_engine(ak.model_of(LORAS[name]), blend=blend) as alone:
                assert found == [ask(alone), ask(alone)], f"adapter {name}"


@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "qwen3",
        "granite",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "smollm3", "olmo2")),
    ],
)
def test_other_families_with_a_matrix_each(name, tmp_path):
    """Biases, norms of queries and keys, and scales of the residual stream are where they are without adapters."""
    transformers = pytest.importorskip("transformers")
    families_kit.make(name, tmp_path / "base")
    base = safetensors.numpy.load_file(tmp_path / "base" / "model.safetensors")
    adapter = ak.write(tmp_path / "adapter", ak.FIRST, ak.tensors_of(ak.FIRST, base))
    shutil.copytree(tmp_path / "base", tmp_path / "merged")
    merged = ak.merged_tensors(ak.FIRST, base)
    safetensors.numpy.save_file(merged, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    models = {}
    for which in ("base", "merged"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / which, dtype="float32").eval()
        models[which] = families_kit.Pair(ca_jax.load_model(str(tmp_path / "base"), dtype="float32"), theirs)
    with kit.small_engine(models["base"].model, context_window=128, max_adapters=2) as engine:
        engine.load_adapter("a", adapter)
        sessions = [engine.session(), engine.session(adapter="a")]
        for turn in range(2):
            before = [list(session.token_ids) for session in sessions]
            new = families_kit.prompt(21, seed=turn)
            for answer, known, which in zip(drained(sessions, [new, new], 6), before, models, strict=True):
                assert answer == models[which].their_answer([*known, *new], 6)


# Coming and going.


def test_an_adapter_that_is_used_is_not_unloaded():
    with ak.engine_of(ak.FIRST) as engine:
        session = engine.session(adapter="a")
        answer = session.send_ids(PROMPT, max_tokens=4)
        with pytest.raises(AdapterInUseError, match="got 1 jobs that run or wait and 1 open sessions"):
            engine.unload_adapter("a")
        kit.drain(answer)
        with pytest.raises(AdapterInUseError, match="got 0 jobs that run or wait and 1 open sessions"):
            engine.unload_adapter("a")
        branch = engine.fork(session, is_kept=False)
        session.close()
        engine.unload_adapter("a")
        assert engine.adapters == ()
        with pytest.raises(UnknownAdapterError):
            branch.send_ids(PROMPT)
        with pytest.raises(UnknownAdapterError, match=r"\(none\), got 'a'"):
            engine.unload_adapter("a")
        for ask in (lambda: engine.session(adapter="a"), lambda: engine.generate([PROMPT], adapter="a")):
            with pytest.raises(UnknownAdapterError):
                ask()


def test_a_slot_that_is_given_back_says_nothing_of_what_it_held():
    with ak.engine_of(ak.FIRST, ak.SECOND, ak.PATTERNED) as engine:
        with pytest.raises(InvalidRequestError, match="at most max_adapters=3, got as many already: a, b, c"):
            engine.load_adapter("d", ak.written(ak.FIRST))
        engine.unload_adapter("a")
        with pytest.raises(InvalidRequestError, match="not taken, got 'b'"):
            engine.load_adapter("b", ak.written(ak.FIRST))
        engine.load_adapter("d", ak.written(ak.PATTERNED))
        assert [adapter.name for adapter in engine.adapters] == ["b", "c", "d"]
        for name, lora in (("d", ak.PATTERNED), ("b", ak.SECOND), (None, None)):
            kit.check_turn(engine.session(adapter=name), PROMPT, 6, model=ak.model_of(lora))


def test_an_adapter_that_finds_no_memory_leaves_all_as_it_was(monkeypatch):
    def put(*args, original=transfer.staging_to_device):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with ak.engine_of(ak.FIRST) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(transfer, "staging_to_device", put)
            with pytest.raises(jax.errors.JaxRuntimeError):
                engine.load_adapter("b", ak.written(ak.SECOND))
        assert [adapter.name for adapter in engine.adapters] == ["a"]
        engine.load_adapter("c", ak.written(ak.PATTERNED))
        for name, lora in (("a", ak.FIRST), ("c", ak.PATTERNED)):
            kit.check_turn(engine.session(adapter=name), PROMPT, 6, model=ak.model_of(lora))


def test_nothing_is_compiled_as_adapters_come_and_go():
    overflow = ok.config(ratio=0.5)
    with ak.engine_of(context_window=128, max_batch_size=2, overflow=overflow) as engine:
        engine.warmup()
        with CompileCounter() as compiled:
            for lora in (ak.FIRST, ak.SECOND):
                engine.load_adapter("a", ak.written(lora))
                session = engine.session(adapter="a")
                for num_tokens in (60, 50, 30):
                    kit.say(session, kit.prompt(num_tokens), 8)
                session.close()
                engine.unload_adapter("a")
        assert compiled.count == 0


def test_adapters_come_while_answers_run():
    with ak.engine_of(ak.FIRST) as engine, contextlib.ExitStack() as stack:
        first = engine.session(adapter="a")
        answer = first.send_ids(PROMPT, max_tokens=20)
        pieces = [next(answer) for _ in range(5)]
        engine.load_adapter("b", ak.written(ak.SECOND))
        second = engine.session(adapter="b")
        other = second.send_ids(PROMPT, max_tokens=20)
        stack.callback(other.close)
        kit.drain(answer, other)
        assert pieces
        kit.expect_right(first, model=ak.model_of(ak.FIRST))
        kit.expect_right(second, model=ak.model_of(ak.SECOND))


# Without.


def test_an_engine_without_room_for_adapters_is_as_it_was():
    """Its functions are given no more arrays, and its keys are those of an engine that has room."""
    engines = kit.small_engine(ak.model_of(None)), ak.engine_of(ak.FIRST)
    with engines[0] as plain, engines[1] as roomy:
        runner = plain._runner
        beside = jax.tree.leaves(runner.params["packed"])
        assert len(jax.tree.leaves(runner.params)) == len(jax.tree.leaves(plain.model.params)) + len(beside)
        assert all("adapters" not in layer for layer in runner.layers)
        assert Shapes(runner).adapters(1, 64) is None, "steps are given none"
        salt = plain._kv._salt
        assert salt == roomy._kv._salt
        for engine in (plain, roomy):
            name = hashlib.sha256(salt + b"4:someone").hexdigest()
            assert engine._kv.key("one", "some") == name
            assert engine.session(session_id="one", tenant="some").key == name
        with pytest.raises(InvalidRequestError, match="engines with max_adapters above 0, got max_adapters=0"):
            plain.load_adapter("a", ak.written(ak.FIRST))
        with pytest.raises(UnknownAdapterError):
            plain.session(adapter="a")


@pytest.mark.slow
def test_as_many_functions_are_compiled_with_adapters_as_without():
    counts = []
    for num_adapters in (0, 2):
        jax.clear_caches()
        with ak.engine_of(context_window=128, max_batch_size=2, max_adapters=num_adapters) as engine:
            with CompileCounter() as compiled:
                engine.warmup()
            counts.append(compiled.count)
    assert counts[0] == counts[1] > 0


# What is refused.


def test_a_rank_above_the_room_is_refused():
    with ak.engine_of(max_adapter_rank=3) as engine:
        with pytest.raises(AdapterError, match="at most max_adapter_rank=3, got 4"):
            engine.load_adapter("a", ak.written(ak.FIRST))
        engine.load_adapter("b", ak.written(ak.SECOND))


def test_what_replicas_share_has_no_adapters(tmp_path):
    store = kit.ssd_store(tmp_path, objects_url=f"file://{tmp_path}/objects/")
    with pytest.raises(ValueError, match="max_adapters must be 0 with an objects_url"):
        kit.small_engine(max_adapters=1, store=store)


@pytest.mark.parametrize("name", ["", "a b", "a\n"])
def test_a_name_is_text_without_spaces(name):
    with ak.engine_of() as engine, pytest.raises(InvalidRequestError, match="text without spaces"):
        engine.load_adapter(name, ak.written(ak.FIRST))
