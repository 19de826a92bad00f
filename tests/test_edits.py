"""Histories that are edited in the middle, through the engine: what is stored behind the edit is used there.

The references are the model's own: KV of the old history, cut out and put behind what was computed of the new one.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.evaluate.items import RagPrompt
from benchmarks.evaluate.rag_context import ContextModel
from ca_jax import BlendConfig, SamplingParams
from ca_jax.edits import edited, fork_edited
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.recompute.plan import blend_plan
from ca_jax.serving.prompts import new_turn
from ca_jax.storage.records import Residency
from ca_jax.testing import tiny
from ca_jax.turns.conversations import Conversation, chain_of
from ca_jax.turns.text import ChunkSpan
from tests import adapters_kit as ak
from tests import engine_kit as kit
from tests import overlap_kit, test_sliding_kv
from tests.server_kit import assistant, system, user
from tests.test_context import REUSE, SOME, WHOLE, answer_over
from tests.test_context_faults import faulty
from tests.threads_kit import ThreadProcesses, run_together

SAID = ("find the sea", "it is said to be far away, and blue", "how far is it then", "and is it deep, and cold too")
ASKED = "what did I ask you first"
ENDED = SamplingParams(max_tokens=14, min_tokens=6, logit_bias=((tiny.IM_END_ID, 100.0),))  # By a stop token.

EDITS = {
    "edited": lambda said: [*said[:2], user("it is near"), *said[3:]],
    "dropped": lambda said: [*said[:2], *said[4:]],
    "a reply dropped": lambda said: [*said[:3], *said[4:]],
    "added": lambda said: [*said[:2], user("listen"), assistant("I do."), *said[2:]],
    "a reply": lambda said: [*said[:3], assistant("Far."), *said[4:]],
    "the first one": lambda said: [user("find it"), *said[1:]],
    "two": lambda said: [*said[:1], assistant("No."), user("it is near"), *said[3:]],
}


def talked(engine, sampling=None, **options):
    """A conversation of four turns."""
    session = engine.session(**options)
    for text in SAID:
        kit.drain(session.send(text, max_tokens=None if sampling else 14, sampling=sampling))
    engine.wait_for_saves()
    return session


def ask(engine, session, edit="edited", max_tokens=8, **options):
    """The session of an edited history with a question behind it, which it has answered; and the answer."""
    fork, new = fork_edited(engine, session, [*EDITS[edit](session.messages), user(ASKED)])
    borrowed = fork.conversation.borrowed
    kit.drain(fork.send(new, max_tokens=max_tokens, **options))
    return fork, borrowed, fork.token_ids[fork.usage.prompt_tokens :]


def pieced(source, fork, borrowed):
    """KV of an edited history up to where what it borrows ends: computed, and cut out of the old one's."""
    head = kit.full_pass(fork.token_ids[: borrowed.start])[1]
    part = slice(borrowed.first, borrowed.first + borrowed.num_tokens)
    return np.concatenate([head, kit.full_pass(source.token_ids)[1][:, :, part]], axis=2)


@pytest.mark.parametrize("sampling", [None, ENDED], ids=["cut short", "ended"])
@pytest.mark.parametrize("edit", EDITS)
def test_reuse_is_the_old_kv_behind_the_new_beginning(edit, sampling):
    with kit.small_engine(blend=REUSE) as engine:
        source = talked(engine, sampling)
        before = source.conversation
        fork, borrowed, answer = ask(engine, source, edit)
        kv = pieced(source, fork, borrowed)
        usage = fork.usage
        assert answer == answer_over(kv, fork.token_ids[kv.shape[2] : usage.prompt_tokens], 8)
        np.testing.assert_allclose(kit.stored_kv(engine, fork)[:, :, : kv.shape[2]], kv, atol=1e-4)
        assert usage.num_cached_tokens >= borrowed.num_tokens > 32
        assert (usage.missed_chunks, usage.repaired_tokens) == (0, 0)
        assert engine.metrics.loaded_chunks == 1
        # Told as a client tells it, and what was generated is what it was.
        text = engine.model.tokenizer.decode(fork.token_ids[: usage.prompt_tokens], skip_special_tokens=False)
        template = engine.model.tokenizer.chat_template
        assert text == template.first_turn([*EDITS[edit](before.messages), user(ASKED)])
        # The source goes on itself, and so does the other.
        assert source.conversation is before
        kit.check_turn(source, "further", 8)
        assert source.usage.num_cached_tokens == len(before.token_ids) - 1
        history = fork.token_ids
        answer = kit.say(fork, "and then", 8)
        assert fork.usage.num_cached_tokens == len(history) - 1
        assert answer == answer_over(kv, fork.token_ids[kv.shape[2] : fork.usage.prompt_tokens], 8)


@pytest.mark.parametrize("edit", EDITS)
def test_all_computed_anew_is_exact(edit):
    with kit.small_engine(blend=WHOLE) as engine:
        fork, borrowed, answer = ask(engine, talked(engine), edit)
        assert borrowed
        assert engine.metrics.loaded_chunks == 1
        assert answer == kit.greedy_answer(fork.token_ids[: fork.usage.prompt_tokens], 8)
        kit.check_turn(fork, "and then", 8)


@pytest.mark.parametrize("selection", ["hkvd", "spread"])
def test_some_tokens_are_computed_anew_as_of_chunks(selection):
    config = dataclasses.replace(SOME, selection=selection)
    with kit.small_engine(blend=config) as engine:
        source = talked(engine)
        fork, borrowed, answer = ask(engine, source)
        stored, usage = kit.stored_kv(engine, fork), fork.usage
    reused = pieced(source, fork, borrowed)
    count, num_own = reused.shape[2], usage.num_cached_tokens - borrowed.num_tokens
    prompt = RagPrompt(source="", head=(), chunks=((0,) * count,), question_ids=(0,), answers=())
    of, span = ContextModel(kit.tiny_model(), [prompt], 0), ChunkSpan("", borrowed.start, borrowed.num_tokens)
    plan = blend_plan(config, kit.NUM_LAYERS, count, num_own, [span], 0.15)
    fused = of.fused(plan, fork.token_ids[:count], of.joined([reused], 0))
    kv = np.stack([np.asarray(layer) for layer in fused])[:, :, :count]
    np.testing.assert_allclose(stored[:, :, :count], kv, atol=1e-4)
    assert answer == answer_over(kv, fork.token_ids[count : usage.prompt_tokens], 8)
    assert usage.repaired_tokens == round(plan.num_recomputed) > 0
    assert np.abs(kv - reused).max() > 1e-2


def test_an_edit_of_an_edited_history_uses_what_was_blended():
    with kit.small_engine(blend=REUSE) as engine:
        source = talked(engine)
        first, borrowed, _ = ask(engine, source)
        kv = pieced(source, first, borrowed)
        again, of_first, _ = ask(engine, first, "the first one")
        part = slice(of_first.first, borrowed.start + borrowed.num_tokens)
        stored = kit.stored_kv(engine, again)
        moved = slice(of_first.start, of_first.start + part.stop - part.start)
        np.testing.assert_allclose(stored[:, :, moved], kv[:, :, part], atol=1e-4)
        assert again.usage.num_cached_tokens >= of_first.num_tokens


def test_contexts_before_and_behind_the_edit_are_part_of_what_was_said():
    contexts = {1: ["The sky is green."], 2: ["Grass is blue.", "The sea is far."]}
    with kit.small_engine(blend=WHOLE) as engine:
        source = engine.session()
        for number, text in enumerate(SAID):
            kit.drain(source.send(text, context=contexts.get(number), max_tokens=14))
        assert source.conversation.lineage
        said, near = source.messages, user("it is near")
        for shorter, again in ((near, True), ({**said[2], **near}, True), (said[2], False)):
            behind = said[3:] if again else [said[3], {**said[4], "context": ["Grass is blue."]}, *said[5:]]
            fork, new = fork_edited(engine, source, [*said[:2], shorter, *behind, user(ASKED)])
            borrowed, grass = fork.conversation.borrowed, kit.tiny_model().tokenizer.encode("Grass is blue.")
            part = source.token_ids[borrowed.first : borrowed.first + borrowed.num_tokens]
            assert (bytes(grass) in bytes(part)) == again, "another context is another message"
            kit.drain(fork.send(new, max_tokens=8))
            kit.expect_right(fork)
            text = engine.model.tokenizer.decode(fork.token_ids)
            assert ("The sky is green." in text) == ("context" in shorter)


def test_a_source_on_ssd_is_fetched_also_after_a_restart(tmp_path):
    store = kit.ssd_store(tmp_path)
    with kit.small_engine(blend=REUSE, store=store) as engine:
        source = talked(engine, session_id="one")
        expected = ask(engine, source)[2]
        assert engine.stored.find("one").residency is Residency.DRAM
        engine._kv.store.leave_dram(source.key)
        fork, borrowed, answer = ask(engine, source)
        assert answer == expected
        assert fork.usage.cached_tokens["ssd"] >= borrowed.num_tokens
    with kit.small_engine(blend=REUSE, store=store) as engine:
        source = engine.session(session_id="one")
        fork, _, answer = ask(engine, source)
        assert (answer, fork.usage.missed_chunks) == (expected, 0)
        assert fork.usage.cached_tokens["ssd"] >= borrowed.num_tokens
        kit.check_turn(source, "further", 8)


def test_a_source_that_is_busy_serves_what_it_has():
    with kit.small_engine(blend=REUSE) as engine:
        source = talked(engine)
        expected = ask(engine, source)[2]
        running = source.send("further", max_tokens=40)
        next(running)
        fork, _, answer = ask(engine, source)
        assert (answer, fork.usage.missed_chunks) == (expected, 0)
        assert source.is_busy
        kit.drain(running)
        kit.expect_right(source)


@pytest.mark.parametrize("how", ["forgotten", "shorter", "closed"])
def test_what_is_gone_by_then_is_computed_in_its_place(how):
    with kit.small_engine(blend=REUSE) as engine:
        source = talked(engine)
        fork, new = fork_edited(engine, source, [*EDITS["edited"](source.messages), user(ASKED)])
        answer = fork.send(new, max_tokens=8)
        if how == "closed":
            source.close()
        else:
            engine.truncate_stored(source, {"forgotten": 0, "shorter": 150}[how])
        kit.drain(answer)
        assert fork.usage.missed_chunks == 1
        kit.expect_right(fork)
        assert fork.usage.num_cached_tokens < 100


def test_a_source_that_goes_while_it_is_read_stays_until_then():
    """Its blocks are held; freed memory is NaN."""
    with overlap_kit.gated_engine(blend=REUSE) as (engine, loads, _):
        source = talked(engine)
        expected = ask(engine, source)[2]
        fork, new = fork_edited(engine, source, [*EDITS["edited"](source.messages), user(ASKED)])
        with overlap_kit.shut(loads):
            answer = fork.send(new, max_tokens=8)
            engine._kv.store.poll()
            engine._kv.histories.preload(fork.job, fork, lambda job: True)
            assert engine._kv.histories.is_preloaded(fork.job)
            engine._kv.store.drop(source.key)
        kit.drain(answer)
        assert fork.token_ids[-8:] == expected
        assert fork.usage.missed_chunks == 0


def test_what_breaks_in_the_middle_of_a_load_is_computed_and_the_source_stays():
    with faulty(WHOLE) as (engine, loads, _):
        source = talked(engine)
        loads.breaks = lambda load: (load.key, load.layer) == (source.key, 1)
        fork, borrowed, answer = ask(engine, source)
        assert borrowed
        assert loads.num_broken == engine.metrics.failed_loads == 1
        assert answer == kit.greedy_answer(fork.token_ids[: fork.usage.prompt_tokens], 8)
        assert fork.usage.num_cached_tokens < borrowed.start
        loads.breaks = lambda load: False
        num_before = len(source.token_ids)
        kit.check_turn(source, "further", 8)
        assert source.usage.num_cached_tokens == num_before - 1


def test_what_one_process_lacks_none_uses():
    def run(processes: ThreadProcesses) -> tuple[list[int], int]:
        with kit.small_engine(blend=REUSE, processes=processes) as engine:
            source = talked(engine, session_id="one")
            fork, new = fork_edited(engine, source, [*EDITS["edited"](source.messages), user(ASKED)])
            answer = fork.send(new, max_tokens=8)
            if processes.index == 1:
                engine._kv.store.drop(source.key)
            kit.drain(answer)
            kit.expect_right(fork)
            return fork.token_ids[-8:], fork.usage.missed_chunks

    one, other = run_together(2, run)
    assert one == other
    assert one[1] == 1


def test_another_tenant_is_never_served():
    with kit.small_engine(blend=REUSE) as engine:
        source = talked(engine, session_id="one", tenant="a")
        found = ask(engine, source)[0]
        assert (found.tenant, found.usage.missed_chunks) == ("a", 0)
        stranger = engine.session(tenant="b")
        fork, new = fork_edited(engine, source, [*EDITS["edited"](source.messages), user(ASKED)])
        stranger.resume(fork.conversation)  # As if it had come to know what to ask for.
        kit.drain(stranger.send(new, max_tokens=8))
        assert stranger.usage.num_cached_tokens == 0
        assert stranger.usage.missed_chunks == 1
        kit.expect_right(stranger)


def test_with_an_adapter_and_in_a_model_whose_layers_slide_it_is_exact_too():
    with ak.engine_of(ak.FIRST, ak.SECOND, blend=WHOLE) as engine:
        source = talked(engine, adapter="a")
        fork, _, _ = ask(engine, source)
        assert (fork.adapter, fork.usage.missed_chunks, engine.metrics.loaded_chunks) == ("a", 0, 1)
        kit.expect_right(fork, model=ak.model_of(ak.FIRST))
        stranger = engine.session(adapter="b")
        told = [*EDITS["edited"](source.messages), user(ASKED)]
        assert edited(engine.model, source.conversation, "one", told, source.conversation.first_chain) is not None
        assert edited(engine.model, source.conversation, "one", told, stranger.conversation.first_chain) is None
    model = test_sliding_kv.model((1,))  # The other layers slide.
    with kit.small_engine(model, blend=WHOLE) as engine:
        fork, _, _ = ask(engine, talked(engine))
        assert engine.metrics.loaded_chunks == 1
        kit.expect_right(fork, model=model)


NUMBERED = tiny.CHATML_TEMPLATE.replace("message['role'] +", "loop.index|string + message['role'] +")
OF_SYSTEM = tiny.CHATML_TEMPLATE.replace("message['role'] +", "messages[0]['content'][:1] + message['role'] +")


def templated(template):
    made = ChatTemplate(template, eos_token="<|im_end|>")
    backend = tiny.byte_tokenizer()
    tokenizer = Tokenizer(backend, bos_id=tiny.END_OF_TEXT_ID, eos_id=tiny.IM_END_ID, chat_template=made)
    return dataclasses.replace(kit.tiny_model(), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("template", "edit", "is_used"),
    [(NUMBERED, "edited", True), (NUMBERED, "added", False), (OF_SYSTEM, "edited", True)],
)
def test_what_the_template_writes_otherwise_is_not_used(template, edit, is_used):
    model = templated(template)
    with kit.small_engine(model, blend=WHOLE) as engine:
        source = talked(engine)
        fork, borrowed, _ = ask(engine, source, edit)
        assert (borrowed is not None) == is_used
        kit.expect_right(fork)
        first = [user("else"), *source.messages[1:], user(ASKED)]
        found = edited(model, source.conversation, "one", first, "")
        assert (found is None) == (template is OF_SYSTEM)


def test_when_nothing_can_be_used_all_is_new():
    with kit.small_engine(blend=REUSE, context_window=256) as engine:
        source = talked(engine)
        model, conversation, said = engine.model, source.conversation, source.messages
        told = [*EDITS["edited"](said), user(ASKED)]
        assert edited(model, conversation, "one", told, "") is not None
        for messages in ([*said, user(ASKED)], [user(ASKED)], [*said[:6], user("else"), said[7]], []):
            assert edited(model, conversation, "one", messages, "") is None
        assert edited(model, conversation, "one", told, "another adapter's") is None
        assert edited(model, engine.session().conversation, "one", told, "") is None
        for changes in ({"num_slid": 8}, {"num_dropped": 8}, {"chain": "token ids were given"}):
            assert edited(model, dataclasses.replace(conversation, **changes), "one", told, "") is None
        fork, new = fork_edited(engine, source, [*said[:6], user("else"), assistant("no"), user(ASKED)])
        assert len(new) == 9
        assert not fork.token_ids
        # What is told of its prompt has to be computed.
        fork, new = fork_edited(engine, source, told)
        kit.drain(fork.send(new, sampling=SamplingParams(max_tokens=4, prompt_logprobs=0)))
        kit.expect_right(fork)
        assert not fork.usage.num_cached_tokens


@pytest.mark.parametrize(("before", "after"), [("", ""), ("A", "A"), ("A", "B")])
def test_what_was_generated_stays_what_it_was_and_nothing_comes_twice(before, after):
    """Replies that are all the same, and whose tokens are not what their text would be; behind system messages."""
    model, reply, generated = kit.tiny_model(), "Noted. " * 6, "noted, " * 6
    source = Conversation.begin([system(text) for text in before])
    for text in ("one", "two", "three", "four"):
        ids = source.token_ids + new_turn(model, source.token_ids[-1:], source.messages, [user(text)]).ids
        source = source.with_turn([*ids, *generated.encode(), tiny.IM_END_ID], [user(text)], reply)
    said = source.messages[len(before) :]
    for rest in ([*said[:2], *said[4:]], [*said[:2], user("else"), *said[3:]], [user("else"), *said[1:]], said[4:]):
        told = [*map(system, after), *rest]
        found = edited(model, source, "one", [*told, user(ASKED)], "")
        text = model.tokenizer.decode(found.token_ids, skip_special_tokens=False)
        expected = model.tokenizer.chat_template.first_turn([*told, user("")])
        spelled = text.replace(reply, generated)
        assert expected.replace(reply, generated).startswith(f"{spelled}\n<|im_start|>user\n<|im_end|>")
        assert (reply in text) == (before != after and rest[2] == user("else")), "said anew behind another beginning"
        assert found.chain == chain_of(told)
        ends = [*found.turn_starts[1:], (len(found.token_ids), len(told))]
        assert found.states == [(chain_of(told[:number]), tokens) for tokens, number in ends]


def test_a_turn_that_is_not_as_the_template_writes_it_is_computed():
    with kit.small_engine(blend=REUSE) as engine:
        source = talked(engine)
        told = [*EDITS["edited"](source.messages), user(ASKED)]
        plain = edited(engine.model, source.conversation, "one", told, "")
        (start, _), second = source.conversation.turn_starts[1], source.conversation.turn_starts[2][0]
        ids = [*source.token_ids[: start + 5], 0x20, *source.token_ids[start + 6 :]]
        found = edited(engine.model, dataclasses.replace(source.conversation, token_ids=ids), "one", told, "")
        assert plain.borrowed.first < second < found.borrowed.first
        assert found.token_ids[: found.borrowed.start] == plain.token_ids[: found.borrowed.start], "all are bytes here"


def test_what_begins_like_an_edited_history_borrows_it_whole_or_not():
    with kit.small_engine(blend=REUSE) as engine:
        source = talked(engine)
        fork, new = fork_edited(engine, source, [*EDITS["edited"](source.messages), user(ASKED)])
        whole, part = engine.fork(fork), engine.fork(fork, len(fork.token_ids) - 40)
        kit.drain(*(each.send(new, max_tokens=4) for each in (fork, whole)))
        assert fork.token_ids == whole.token_ids
        assert whole.usage.missed_chunks == 0
        assert engine.metrics.loaded_chunks == 2
        assert not part.conversation.borrowed
        assert kit.check_turn(part, "and", 4).missed_chunks == 0
        noted = fork.conversation
        assert type(noted).from_bytes(noted.to_bytes()).borrowed is None


@pytest.mark.parametrize("mode", ["prefix", "recompute"])
def test_a_blend_mode_without_reuse_computes_all(mode):
    with kit.small_engine(blend=BlendConfig(mode=mode)) as engine:
        fork, borrowed, answer = ask(engine, talked(engine))
        assert borrowed
        assert answer == kit.greedy_answer(fork.token_ids[: fork.usage.prompt_tokens], 8)
        assert engine.metrics.loaded_chunks == 0


def test_a_window_that_overflows_loses_the_oldest_and_computes_the_rest():
    with kit.small_engine(blend=REUSE, context_window=256) as engine:
        source = talked(engine)
        fork, new = fork_edited(engine, source, [*EDITS["edited"](source.messages), user(ASKED * 2)])
        assert fork.conversation.borrowed
        kit.drain(fork.send(new, max_tokens=4))
        assert fork.usage.dropped_tokens > 0
        assert engine.metrics.loaded_chunks == 0
        kit.expect_right(fork)
        assert fork.conversation.lineage == 0
