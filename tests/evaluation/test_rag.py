"""Ways to use the KV of chunks on the tiny model: what must be the same, what must not, and rows from known figures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from benchmarks.evaluate.rag import MAX_TOP1_LOSS, GateConfig, RagConfig, held_against, run_gate, run_rag
from benchmarks.evaluate.rag_context import ContextModel
from benchmarks.evaluate.rag_deviation import ORACLE, run_deviation, true_kv
from benchmarks.evaluate.rag_methods import SUMMARIZE, Blends, PromptContexts, methods_of
from benchmarks.evaluate.statistics import (
    f1_score,
    first_line,
    has_answer,
    kl_divergence,
    log_softmax,
    mean_interval,
    rouge_l,
)
from ca_jax.launch.texts import EvaluationError
from ca_jax.models.kv import KVCache, LayerKV
from tests import engine_kit as kit
from tests.chunk_kit import reused
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


def test_full_recompute_and_whatever_computes_all_of_it_are_alike(measured):
    assert [method.name for method in methods_of(Blends(selections=("hkvd", "first"), other_ratios=(0.3,)), ())] == [
        *("full recompute", "hkvd 5%", "hkvd 15%", "hkvd 30%", "hkvd 50%", "first 30%")
    ]
    rows = {row.name: row for row in measured.rows}
    recompute = rows["full recompute"]
    assert (recompute.num_items, len(recompute.layer_deviations)) == (3, 3)
    assert (recompute.mean_kl, recompute.same_top1, recompute.attention_deviation) == (0, 1, 0)
    for name in ("prefix caching", "hkvd 100%", "random 100%"):
        assert rows[name].mean_kl == pytest.approx(0, abs=1e-7)
        assert (rows[name].same_top1, rows[name].f1) == (1, recompute.f1)
        assert rows[name].attention_deviation == pytest.approx(0, abs=1e-3)
        assert all(item["answers"][name] == item["answers"]["full recompute"] for item in measured.items)


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
    num_sinks = 1  # The first token of a prompt that begins with a chunk.
    computed = {row.name: row.computed_tokens for row in measured.rows}
    assert computed["full recompute"] == pytest.approx(context + question)
    assert computed["prefix caching"] == pytest.approx(context - first + question)
    assert computed["hkvd 100%"] == pytest.approx(context + question)
    assert computed["full reuse"] == pytest.approx(num_sinks + question)
    of_random = computed["random 50%"] - question - num_sinks
    assert 0 < of_random <= (context - num_sinks) / 2
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
    assert item["has_answer"]["full recompute"] == has_answer(text, prompt.answers)
    pairs = zip(logits[-NUM_POSITIONS:], _over_chunks_as_stored(prompt), strict=True)
    expected = np.mean([kl_divergence(log_softmax(full), log_softmax(reused)) for full, reused in pairs])
    assert item["kl"]["full reuse"] == pytest.approx(expected, rel=1e-3)


def _over_chunks_as_stored(prompt) -> np.ndarray:
    """Logits of a question's last tokens over chunks as they are stored, by the model over an explicit history."""
    model = kit.tiny_model()
    kv = reused(*prompt.chunks)
    history = KVCache(
        tuple(LayerKV(jnp.asarray(k[None]), jnp.asarray(v[None])) for k, v in kv), jnp.array([kv.shape[2]], jnp.int32)
    )
    positions = jnp.arange(kv.shape[2], kv.shape[2] + len(prompt.question_ids))[None]
    logits, _ = jax.jit(model.model.apply)(model.params, jnp.array([prompt.question_ids]), positions, history)
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


# The gate.

REUSE_KL = [1.0, 2.0, 3.0, 4.0]


def held(kl=REUSE_KL, same_top1=(0.5,) * 4, **bounds):
    return held_against(GateConfig(**bounds), kl=list(kl), same_top1=same_top1, reuse_kl=REUSE_KL)


def test_each_bound_is_held_against_the_interval():
    lost, same = mean_interval([0.0, 0.25, 0.0, 0.0]), (1.0, 0.75, 1.0, 1.0)
    assert held(same_top1=same) == {
        **{"top1_excess": lost[1] - MAX_TOP1_LOSS, "share_excess": None, "kl_excess": None},
        "passes": False,  # 0.0625 is within the bound, the interval is not.
    }
    assert held(same_top1=same, max_top1_loss=lost[1])["passes"]
    found = held([each / 2 for each in REUSE_KL], max_kl_share=0.5)
    assert found == {"top1_excess": None, "share_excess": pytest.approx(0), "kl_excess": None, "passes": True}
    uneven = np.array([0.0, 0.0, 0.0, 4.8])  # In the mean 0.48 of full reuse's, but who knows of other items.
    found = held(uneven, max_kl_share=0.5)
    assert found["share_excess"] == pytest.approx(mean_interval((uneven - np.array(REUSE_KL) / 2).tolist())[1])
    assert not found["passes"]
    kl = [0.1, 0.2, 0.1, 0.2]
    assert held(kl, max_kl=0.21)["kl_excess"] == mean_interval(kl)[1] - 0.21
    assert held(kl, max_kl=0.21)["passes"]
    assert not held(kl, max_kl=0.16)["passes"], "0.15 is within it, its bound is not"
    assert not held(kl, max_kl=0.21, max_kl_share=0.01)["passes"], "both bounds hold"


def test_ratios_are_tried_from_full_reuse_to_the_largest(path):
    config = GateConfig(
        chunking=chunking(path), blends=Blends(ratios=(1.0, 0.5), selections=("hkvd",)), max_kl_share=0.01
    )
    evaluation = run_gate(kit.tiny_model(), config, ignore)
    assert [(row.ratio, row.passes) for row in evaluation.rows] == [(0, False), (0.5, False), (1, True)]
    assert evaluation.rows[0].kl_share == 1
    assert [row.mean_kl for row in evaluation.rows] == [
        pytest.approx(np.mean([item["kl"][name] for item in evaluation.items]))
        for name in ("full reuse", "hkvd 50%", "hkvd 100%")
    ]
    easy = GateConfig(chunking=chunking(path), blends=Blends(ratios=(1.0,)), max_kl=1e3)
    assert [row.passes for row in run_gate(kit.tiny_model(), easy, ignore).rows] == [True, True]


def test_what_a_gate_cannot_judge_is_refused(path):
    with pytest.raises(EvaluationError, match="items must be at least 2 to say how sure a mean is, got 1"):
        run_gate(kit.tiny_model(), GateConfig(chunking=chunking(path, max_items=1)), ignore)


# Figures of deviation, against KV of full passes.


@pytest.fixture(scope="module")
def deviations(path) -> list[np.ndarray]:
    """KV deviation of each item's tokens behind its first one, `[L, n]`, from full passes."""
    found = []
    for prompt in prompts(path):
        difference = kit.full_pass(prompt.context_ids)[1] - reused(*prompt.chunks)
        found.append(np.sqrt((difference[:, :, 1:] ** 2).sum((1, 3, 4))))
    return found


def deviation_rows(path, figure: int, **blends):
    config = RagConfig(chunking=chunking(path), blends=Blends(**blends), figure=figure)
    return run_deviation(kit.tiny_model(), config, ignore).rows


def test_figure_6_goes_from_full_reuse_to_nothing(path):
    rows = {(row.selection, row.ratio): row for row in deviation_rows(path, 6, ratios=(1.0, 0.5), selections=("hkvd",))}
    reuse = rows["hkvd", 0]
    assert reuse.interval[0] <= reuse.attention_deviation == pytest.approx(np.mean(reuse.layer_deviations))
    for name in (ORACLE, "hkvd"):
        none, half, everything = (rows[name, ratio] for ratio in (0, 0.5, 1))
        assert (none.attention_deviation, none.share, none.num_items) == (reuse.attention_deviation, 1, 3)
        assert (everything.attention_deviation, everything.mean_kl) == (
            pytest.approx(0, abs=1e-3),
            pytest.approx(0, abs=1e-7),
        )
        assert half.share == pytest.approx(half.attention_deviation / reuse.attention_deviation)
    assert 0 < rows[ORACLE, 0.5].share < 1


def test_the_oracle_has_the_true_kv_of_the_tokens_that_deviate_most(path, deviations):
    asked = prompts(path)
    of = PromptContexts(ContextModel(kit.tiny_model(), asked, 0), asked[0], Blends())
    places = of.stored_places()
    count = round(0.25 * len(places))
    for layer, kv in enumerate(true_kv(of, 0.25)):
        is_true = (np.asarray(kv) == np.asarray(of.full[layer])).all((0, 2, 3))
        is_stored = (np.asarray(kv) == np.asarray(of.stored[layer])).all((0, 2, 3))
        assert is_true[: places[0]].all()
        if layer:  # The first layer's KV never deviates, but for rounding.
            chosen = np.sort(np.argsort(-deviations[0][layer])[:count])
            np.testing.assert_array_equal(np.flatnonzero(is_true[places]), chosen)
            assert is_stored[places].sum() == len(places) - count


def test_figure_7_is_the_distribution_over_all_items(path, deviations):
    rows = deviation_rows(path, 7)
    assert [row.layer for row in rows] == [1, 2], "of three layers the second is the early and the middle one"
    together = np.concatenate(deviations, axis=1)
    for row in rows:
        values = np.sort(together[row.layer])
        np.testing.assert_allclose(row.percentiles, np.percentile(values, np.arange(101)), atol=1e-3)
        assert row.num_tokens == len(values)
        assert row.top_10_share == pytest.approx(values[-round(0.1 * len(values)) :].sum() / values.sum(), abs=1e-3)
        assert row.top_10_share < row.top_15_share < 1


def test_figure_8_is_spearmans_correlation_of_neighbouring_layers(path, deviations):
    (row,) = deviation_rows(path, 8)
    expected = [scipy.stats.spearmanr(each[1], each[2]).statistic for each in deviations]
    assert (row.layer, row.num_items) == (1, 3)
    assert row.correlation == pytest.approx(np.mean(expected), abs=5e-3)
    assert row.interval[0] <= row.correlation <= row.interval[1]
