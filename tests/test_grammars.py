"""Answers that must match: JSON schemas, expressions, choices and grammars, held against `jsonschema` and `re`."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from ca_jax.errors import InvalidRequestError
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.serving.grammars import Grammars
from ca_jax.testing import tiny
from ca_jax.turns.grammars import MAX_GRAMMAR_CHARS, Grammar
from ca_jax.turns.requests import FinishReason, SamplingParams
from tests import engine_kit as kit
from tests import grammar_kit as gk


@pytest.fixture(scope="module")
def engine():
    with kit.small_engine() as engine:
        yield engine


def answer(engine, grammar, **changes):
    return engine.generate([kit.prompt(12)], SamplingParams(grammar=grammar, **{"max_tokens": 200, **changes}))[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar.choice(["yes", "no", 'a "quoted" one']), lambda text: text in ("yes", "no", 'a "quoted" one')),
        (Grammar.regex(r"[A-F]{2,4}/\d{3}(é|ü)"), lambda text: re.fullmatch(r"[A-F]{2,4}/[0-9]{3}(é|ü)", text)),
        (
            Grammar.lark('start: word ("-" word){2}\nword: /[a-z]{1,3}/'),
            lambda text: re.fullmatch("[a-z]+(-[a-z]+){2}", text),
        ),
        (Grammar.json_schema({"enum": [1, "a", None]}), lambda text: json.loads(text) in (1, "a", None)),
        (Grammar.json_schema(False), None),
    ],
    ids=["choice", "regex", "grammar", "schema", "nothing"],
)
def test_an_answer_that_ends_by_itself_matches(engine, grammar, matches, temperature):
    if matches is None:
        with pytest.raises(InvalidRequestError, match="a JSON schema must be one that can be followed"):
            answer(engine, grammar)
        return
    completion = answer(engine, grammar, temperature=temperature)
    assert completion.finish_reason is FinishReason.STOP
    assert matches(completion.text), completion.text


def hold(engine, seeds, batch=100):
    """How many answers ended by themselves, of how many; each of those is what its schema says."""
    ended = 0
    for start in range(0, len(seeds), batch):
        some = seeds[start : start + batch]
        schemas = [gk.random_schema(seed) for seed in some]
        params = [
            SamplingParams(grammar=Grammar.json_schema(each), temperature=1.0, seed=seed, max_tokens=120)
            for seed, each in zip(some, schemas, strict=True)
        ]
        found = engine.generate([kit.prompt(8, seed) for seed in some], params)
        for schema, completion in zip(schemas, found, strict=True):
            if completion.finish_reason is FinishReason.STOP:
                ended += 1
                gk.check_answer(schema, completion.text)
    return ended


def test_answers_are_what_random_schemas_say(engine):
    assert hold(engine, range(100)) >= 60, "most values are short"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_are_what_many_random_schemas_say(engine):
    assert hold(engine, range(1000, 11_000)) >= 6_000


def test_others_of_the_batch_are_answered_as_without(engine):
    """Rows with a grammar, and with other parameters, beside one without; all decode ahead of the host."""
    plain = SamplingParams(max_tokens=40)
    prompts = [kit.prompt(10, seed) for seed in range(3)]
    expected = engine.generate(prompts[:1], plain)[0].token_ids
    alone = engine.generate(prompts[1:2], SamplingParams(max_tokens=40, grammar=Grammar.regex("[a-z ]{60}")))[0]
    params = [
        plain,
        SamplingParams(max_tokens=40, grammar=Grammar.regex("[a-z ]{60}")),
        SamplingParams(max_tokens=40, grammar=Grammar.json_object(), temperature=0.7, frequency_penalty=0.5, top_p=0.9),
    ]
    answers = [engine.session().send_ids(ids, sampling=each) for ids, each in zip(prompts, params, strict=True)]
    next(answers[0])
    ahead = []
    while not answers[0].job.done:
        engine.step()
        ahead.append(engine._runner._ahead is not None)
    kit.drain(*answers)
    assert sum(ahead) > 25, "steps are dispatched before the host has read the last one's tokens"
    assert answers[0].job.output_ids == expected
    assert answers[1].job.output_ids == alone.token_ids
    assert re.fullmatch("[a-z ]{40}", alone.text)
    assert answers[2].job.output.text.startswith("{")


def test_a_grammar_goes_before_what_else_is_asked_for(engine):
    grammar = Grammar.choice(["ab"])
    barred = {ord("a"): -100.0, ord("z"): 100.0}
    found = answer(engine, grammar, min_tokens=20, logit_bias=barred, repetition_penalty=5.0, temperature=1.0, top_k=1)
    assert (found.text, found.finish_reason) == ("ab", FinishReason.STOP)
    cut = answer(engine, Grammar.regex("[a-z]{10}"), max_tokens=4)
    assert (len(cut.text), cut.finish_reason) == (4, FinishReason.LENGTH)
    endless = answer(engine, grammar, ignore_eos=True)
    assert (endless.text, endless.finish_reason) == ("ab", FinishReason.STOP), "nothing may follow"


def test_log_probabilities_are_the_models_own(engine):
    prompt = kit.prompt(12)
    found = engine.generate([prompt], SamplingParams(max_tokens=5, grammar=Grammar.regex("[a-z]{9}"), logprobs=2))[0]
    logits = kit.full_pass([*prompt, *found.token_ids])[0][len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for told, row in zip(found.logprobs, expected, strict=True):
        assert told.logprob == pytest.approx(row[told.token_id], abs=1e-3)
        assert told.top[0][1] == pytest.approx(row.max(), abs=1e-3)


def test_a_session_goes_on_behind_an_answer_that_matched(engine):
    session = engine.session()
    schema = Grammar.json_schema({"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}})
    first = "".join(session.send("Give.", sampling=SamplingParams(max_tokens=60, grammar=schema)))
    assert json.loads(first)["n"] <= 99 if "n" in json.loads(first) else first
    assert session.messages[-1] == {"role": "assistant", "content": first}
    assert len("".join(session.send("More.", max_tokens=5))) > 0
    assert session.usage.num_cached_tokens > 0


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD = {
    "no schema": Grammar.json_schema({"type": "nothing"}),
    "no JSON": Grammar.json_schema("{"),
    "a number": Grammar.json_schema("3"),
    "nothing matches": Grammar.json_schema({"type": "string", "minLength": 5, "maxLength": 2}),
    "refers to itself alone": Grammar.json_schema({"$ref": "#"}),
    "refers to nothing": Grammar.json_schema({"$ref": "#/$defs/none"}),
    "refers elsewhere": Grammar.json_schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "is part of itself": Grammar.json_schema({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
    "not served": Grammar.json_schema({"type": "object", "dependentRequired": {"a": ["b"]}}),
    "deep": Grammar.json_schema(json.dumps(deep(200))),
    "very deep": Grammar.json_schema('{"items":' * 20_000 + "{}" + "}" * 20_000),
    "explodes in all": Grammar.json_schema(
        {"allOf": [{"type": "string", "pattern": f"(a|b){{{n},{n + 900}}}c"} for n in range(50)]}
    ),
    "expression": Grammar.regex("("),
    "looks ahead": Grammar.regex("(?=a)b"),
    "grammar": Grammar.lark("start: nothing"),
    "no start": Grammar.lark('begin: "a"'),
    "grammar of itself alone": Grammar.lark("start: start"),
    "no grammar": Grammar.lark("\x00{{{"),
}


@pytest.mark.parametrize("grammar", BAD.values(), ids=BAD)
def test_what_cannot_be_followed_is_refused_with_the_reason(engine, grammar):
    with pytest.raises(InvalidRequestError, match=r"must be one that can be followed: \w") as told:
        engine.generate([kit.prompt(5)], SamplingParams(grammar=grammar, max_tokens=20))
    assert len(str(told.value)) < 500
    assert engine.generate([kit.prompt(5)], SamplingParams(max_tokens=2))[0].token_ids, "the engine goes on"


def test_a_grammar_is_checked_where_it_is_made():
    assert Grammar.json_object() == Grammar.json_schema({"type": "object"})
    assert len({Grammar.regex("a"), Grammar.regex("a"), Grammar.lark("a")}) == 2
    for make in (
        lambda: Grammar.choice([]),
        lambda: Grammar.choice("ab"),
        lambda: Grammar.choice(["a", ""]),
        lambda: Grammar.regex(""),
        lambda: Grammar.regex("a" * (MAX_GRAMMAR_CHARS + 1)),
        lambda: Grammar.json_schema({"const": float("nan")}),
        lambda: Grammar.json_schema({"const": object()}),
    ):
        with pytest.raises(InvalidRequestError):
            make()


def test_a_model_without_tokenizer_follows_none():
    with kit.small_engine(kit.model_of()) as engine, pytest.raises(InvalidRequestError, match="with a tokenizer"):
        engine.generate([[1, 2]], SamplingParams(grammar=Grammar.regex("a")))


def sentencepiece() -> Tokenizer:
    """Words that begin with ▁, and bytes for what has no token."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁yes",
        "yes",
        "é",
        '▁{"',
        '":',
        "}",
    ]
    backend = tokenizers.Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, bos_id=1, eos_id=2)


@pytest.mark.parametrize("tokenizer", [Tokenizer(tiny.byte_tokenizer()), sentencepiece()], ids=["bytes", "words"])
def test_masks_allow_what_spells_the_grammar_and_nothing_else(tokenizer):
    """The vocabulary is narrower than the logits, and has special tokens whose names a grammar's text could spell."""
    size = tokenizer.vocab_size + 37
    stops = [tokenizer.vocab_size - 1, 2]
    for text in ("yes é", "<|im_end|></s>"):
        matcher = Grammars(tokenizer, size).compiled(Grammar.choice([text])).begin(stops)
        mask, said = np.zeros(-(-size // 32), np.uint32), b""
        for _ in range(40):
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]).tolist()
            if said == text.encode():
                assert allowed == sorted(stops)
                break
            wanted = {
                token
                for token in range(tokenizer.vocab_size)
                if token not in tokenizer.special_ids
                and (spelled := tokenizer.token_bytes(token))
                and text.encode()[len(said) :].startswith(spelled)
            }
            assert set(allowed) <= wanted, "where one thing alone may come, as the tokenizer cuts it"
            token = max(allowed, key=lambda each: len(tokenizer.token_bytes(each)))
            matcher.take(token)
            said += tokenizer.token_bytes(token)
        else:
            pytest.fail("the text did not end")
