"""Ways to use the KV of chunks on the tiny model: what must be the same, what must not, and rows from known figures."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.evaluate.rag import RagConfig, run_rag
from benchmarks.evaluate.rag_methods import SUMMARIZE, Blends, methods_of
from benchmarks.evaluate.statistics import f1_score, first_line, kl_divergence, log_softmax, mean_interval, rouge_l
from ca_jax.models.kv import KVCache, LayerKV
from tests import engine_kit as kit
from tests.evaluation.rag_kit import ITEMS, chunking, ignore, prompts, write

NUM_POSITIONS, ANSWER_TOKENS = 4, 5


def ask(path, **changes) -> RagConfig:
    blends = {"ratios": (0.5, 1.0), "positions": NUM_POSITIONS, **changes.pop("blends", {})}
    return RagConfig(
        **{
            "chunking": chunking(path),
            "blends": Blends(**blends),
            "answer_tokens": ANSWER_TOKENS,
            "summary_tokens": 7,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("rag") / "items.json", ITEMS)


@pytest.fixture(scope="module")
def measured(path):
    told = []
    config = ask(path, blends={"selections": ("hkvd", "random")})
    evaluation = run_rag(kit.tiny_model(), config, lambda *call: told.append(call))
    assert told == [("rag", done, 3) for done in range(4)]
    return evaluation


def test_there_is_a_row_for_each_method(measured):
    assert [row.name for row in measured.rows] == [
        *("full recompute", "prefix caching", "full reuse", "MapReduce", "MapRerank"),
        *(f"{selection} {ratio}%" for selection in ("hkvd", "random") for ratio in (50, 100)),
    ]
    assert {row.num_items for row in measured.rows} == {3}
    assert [method.name for method in methods_of(Blends(selections=("hkvd", "first"), other_ratios=(0.3,)), ())] == [
        *("full recompute", "hkvd 5%", "hkvd 15%", "hkvd 30%", "hkvd 50%", "first 30%")
    ]


def test_full_recompute_and_whatever_computes_all_of_it_are_alike(measured):
    rows = {row.name: row for row in measured.rows}
    recompute = rows["full recompute"]
    assert (recompute.mean_kl, recompute.same_top1, recompute.attention_deviation) == (0, 1, 0)
    assert len(recompute.layer_deviations) == 3
    for name in ("prefix caching", "hkvd 100%", "random 100%"):
        assert rows[name].mean_kl == pytest.approx(0, abs=1e-7)
        assert rows[name].same_top1 == 1
        assert rows[name].attention_deviation == pytest.approx(0, abs=1e-3)
        assert all(item["answers"][name] == item["answers"]["full recompute"] for item in measured.items)
        assert rows[name].f1 == recompute.f1


def test_full_reuse_is_off_and_blending_less_so(measured):
    rows = {row.name: row for row in measured.rows}
    reuse, hkvd = rows["full reuse"], rows["hkvd 50%"]
    assert reuse.kl_share == 1
    assert 0 < hkvd.mean_kl < reuse.mean_kl
    assert hkvd.kl_share == pytest.approx(hkvd.mean_kl / reuse.mean_kl)
    assert 0 < hkvd.attention_deviation < reuse.attention_deviation
    assert reuse.layer_deviations[0] == pytest.approx(0, abs=1e-4), "KV of the first layer is of the token alone"
    random = rows["random 50%"]
    differences = [item["kl"]["random 50%"] - item["kl"]["hkvd 50%"] for item in measured.items]
    assert random.kl_above_hkvd == pytest.approx(np.mean(differences))
    assert random.kl_above_hkvd_interval == pytest.approx(mean_interval(differences))
    assert hkvd.kl_above_hkvd is None


def test_computed_tokens_are_those_that_each_method_cannot_take_from_the_store(measured, path):
    asked = prompts(path)
    context = np.mean([len(prompt.context_ids) for prompt in asked])
    question = np.mean([len(prompt.question_ids) for prompt in asked])
    first = np.mean([len(prompt.chunks[0]) for prompt in asked])
    computed = {row.name: row.computed_tokens for row in measured.rows}
    assert computed["full recompute"] == pytest.approx(context + question)
    assert computed["prefix caching"] == computed["hkvd 100%"] == pytest.approx(context - first + question)
    assert computed["full reuse"] == pytest.approx(question)
    of_random = computed["random 50%"] - question
    assert 0 < of_random <= (context - first) / 2
    assert question + of_random / 2 < computed["hkvd 50%"] < computed["hkvd 100%"]  # Its check layer computes all.
    assert measured.rows[0].context_tokens == pytest.approx(context)


def test_answers_and_divergence_are_those_of_the_model_itself(measured, path):
    prompt = prompts(path)[0]
    logits, _ = kit.full_pass([*prompt.context_ids, *prompt.question_ids])
    answer = kit.greedy_answer([*prompt.context_ids, *prompt.question_ids], ANSWER_TOKENS)
    text = first_line(bytes(answer).decode())
    item = measured.items[0]
    assert item["answers"]["full recompute"] == text
    assert item["f1"]["full recompute"] == f1_score(text, prompt.answers)
    assert measured.rows[0].rouge_l == pytest.approx(
        np.mean([rouge_l(each["answers"]["full recompute"], each["right_answers"]) for each in measured.items])
    )
    pairs = zip(logits[-NUM_POSITIONS:], _over_chunks_alone(prompt), strict=True)
    expected = np.mean([kl_divergence(log_softmax(full), log_softmax(reused)) for full, reused in pairs])
    assert item["kl"]["full reuse"] == pytest.approx(expected, rel=1e-3)


def _over_chunks_alone(prompt) -> np.ndarray:
    """Logits of a question's last tokens over chunks computed alone, by the model over an explicit history."""
    model = kit.tiny_model()
    kv = np.concatenate([kit.full_pass(list(chunk))[1] for chunk in prompt.chunks], axis=2)
    history = KVCache(
        tuple(LayerKV(jnp.asarray(k[None]), jnp.asarray(v[None])) for k, v in kv), jnp.array([kv.shape[2]], jnp.int32)
    )
    positions = jnp.arange(kv.shape[2], kv.shape[2] + len(prompt.question_ids))[None]
    logits, _ = model.model.apply(model.params, jnp.array([prompt.question_ids]), positions, history)
    return np.asarray(logits)[0, -NUM_POSITIONS:]


def test_mapreduce_asks_of_summaries_and_maprerank_takes_the_surest_answer(measured, path):
    tokenizer = kit.tiny_model().tokenizer
    prompt = prompts(path)[0]
    summaries = [kit.greedy_answer([*chunk, *SUMMARIZE.encode()], 7) for chunk in prompt.chunks]
    texts = [" ".join(tokenizer.decode(summary).split()) + "\n\n" for summary in summaries]
    ids = tokenizer.encode("".join(texts), add_bos=False)
    reduced = kit.greedy_answer([*ids, *prompt.question_ids], ANSWER_TOKENS)
    item = measured.items[0]
    assert item["answers"]["MapReduce"] == first_line(tokenizer.decode(reduced))
    surest = max((_sure(list(chunk), list(prompt.question_ids)) for chunk in prompt.chunks), key=lambda each: each[0])
    assert item["answers"]["MapRerank"] == first_line(tokenizer.decode(surest[1]))
    rows = {row.name: row for row in measured.rows}
    assert rows["MapReduce"].mean_kl is None
    assert rows["MapRerank"].layer_deviations == []


def _sure(chunk: list[int], question: list[int]) -> tuple[float, list[int]]:
    answer = kit.greedy_answer([*chunk, *question], ANSWER_TOKENS)
    start = len(chunk) + len(question)
    logits, _ = kit.full_pass([*chunk, *question, *answer])
    return np.mean([log_softmax(logits[start - 1 + i])[token] for i, token in enumerate(answer)]), answer


def test_items_without_right_answers_have_answers_and_no_score(path, tmp_path):
    content = [{**ITEMS[0], "answers": []}, ITEMS[1]]
    config = ask(write(tmp_path / "a.json", content), baselines=("reuse",))
    evaluation = run_rag(kit.tiny_model(), config, ignore)
    assert evaluation.items[0]["f1"] == {}
    assert evaluation.items[0]["answers"].keys() == evaluation.items[1]["f1"].keys()
    assert [row.f1 for row in evaluation.rows] == [evaluation.items[1]["f1"][row.name] for row in evaluation.rows], (
        "the mean of those that have some"
    )
