"""Calls of tools and reasoning as families of models write them, in whatever pieces they come."""

from __future__ import annotations

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from ca_jax.server.tool_calls import Reply, ToolParser, read
from ca_jax.server.tool_families import DeepSeek, Glm, Harmony, Hermes, Llama3, Mistral

THINK = ("<think>", "</think>")
GLM_TOOLS = {"f": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}}}
DEEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

# By what each is: family, options, text, then content, reasoning, and calls (name, arguments).
WHOLE = {
    "no family": (None, {}, "Hello <tool_call>", "Hello <tool_call>", "", []),
    "reasoning": (None, {"reasoning": THINK}, "<think>\nHm.\n</think>\n\nYes.\n", "Yes.\n", "Hm.", []),
    "reasoning that the prompt began": (
        None,
        {"reasoning": THINK, "is_thinking": True},
        "Hm.\n</think>No.",
        "No.",
        "Hm.",
        [],
    ),
    "a tag that is said": (
        None,
        {"reasoning": THINK},
        "So <think> is a tag</think>.",
        "So <think> is a tag</think>.",
        "",
        [],
    ),
    "hermes": (
        Hermes,
        {},
        '<tool_call>\n{"name": "f", "arguments": {"q": "a}\\"b"}}\n</tool_call>',
        "",
        "",
        [("f", '{"q": "a}\\"b"}')],
    ),
    "hermes behind text": (
        Hermes,
        {"reasoning": THINK},
        'I look.\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n'
        '<tool_call>{"arguments":{"n":[1,{"x":2}]},"name":"g"}</tool_call>',
        "I look.",
        "",
        [("f", "{}"), ("g", '{"n":[1,{"x":2}]}')],
    ),
    "hermes behind reasoning": (
        Hermes,
        {"reasoning": THINK},
        '<think>I could <tool_call>.</think>\n<tool_call>{"name": "f"}</tool_call>',
        "",
        "I could <tool_call>.",
        [("f", "{}")],
    ),
    "hermes with tags in a string": (
        Hermes,
        {},
        '<tool_call>{"name": "f", "arguments": {"q": "</tool_call><tool_call>"}}</tool_call>',
        "",
        "",
        [("f", '{"q": "</tool_call><tool_call>"}')],
    ),
    "hermes, arguments as text": (
        Hermes,
        {},
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("f", '{"a": 1}')],
    ),
    "hermes, no call": (Hermes, {}, "a <tool_call>nothing</tool_call> b", "a <tool_call>nothing b", "", []),
    "llama3": (
        Llama3,
        {},
        '{"name": "f", "parameters": {"q": "x"}}; {"name": "g", "parameters": {}}',
        "",
        "",
        [("f", '{"q": "x"}'), ("g", "{}")],
    ),
    "llama3 behind a marker": (
        Llama3,
        {},
        '<|python_tag|>{"name": "f", "parameters": {"q": 1}}',
        "",
        "",
        [("f", '{"q": 1}')],
    ),
    "llama3, other JSON": (Llama3, {}, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', "", []),
    "llama3, text": (Llama3, {}, 'Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', "", []),
    "mistral": (
        Mistral,
        {},
        '[TOOL_CALLS] [{"name": "f", "arguments": {"q": "[ARGS]"}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
        "",
        "",
        [("f", '{"q": "[ARGS]"}'), ("g", "{}")],
    ),
    "mistral of later": (
        Mistral,
        {},
        'On it.[TOOL_CALLS]f[ARGS]{"q": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}',
        "On it.",
        "",
        [("f", '{"q": 1}'), ("g", "{}")],
    ),
    "deepseek": (
        DeepSeek,
        {"reasoning": THINK},
        "</think>Hi." + DEEP.format('f<｜tool▁sep｜>{"q": 1}'),
        "</think>Hi.",
        "",
        [("f", '{"q": 1}')],
    ),
    "deepseek, fenced": (
        DeepSeek,
        {},
        DEEP.format('function<｜tool▁sep｜>f\n```json\n{"q": "a\\nb"}\n```'),
        "",
        "",
        [("f", '{"q": "a\\nb"}')],
    ),
    "glm": (
        Glm,
        {"tools": GLM_TOOLS, "reasoning": THINK},
        "<think></think>\n<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
        "",
        "",
        [("f", '{"q": "12", "n": 12}')],
    ),
    "glm without arguments": (Glm, {}, "Now.\n<tool_call>now\n</tool_call>", "Now.", "", [("now", "{}")]),
    "harmony": (
        Harmony,
        {},
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"q": 1}',
        "",
        "Look it up.",
        [("f", '{"q": 1}')],
    ),
    "harmony, called at once": (
        Harmony,
        {},
        ' to=functions.f<|channel|>commentary<|message|>{"q": 1}<|call|>',
        "",
        "",
        [("f", '{"q": 1}')],
    ),
    "harmony, said": (
        Harmony,
        {},
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
        "Four.",
        "Easy.",
        [],
    ),
}


def make(case: str) -> ToolParser:
    family, options, *_ = CASES[case]
    return ToolParser(family, **options)


# What a cut leaves: the same, but that the answer ended before its time.
CUT = {
    "hermes, half a call": (Hermes, {}, 'Wait. <tool_call>{"name": "f", "arguments": {"q": "a', "Wait.", "", []),
    "hermes, half a name": (Hermes, {}, 'Wait. <tool_call>{"na', 'Wait. <tool_call>{"na', "", []),
    "hermes, half a tag": (Hermes, {}, "Wait. <tool_c", "Wait. <tool_c", "", []),
    "hermes, the second": (
        Hermes,
        {},
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {',
        "",
        "",
        [("f", "{}")],
    ),
    "llama3, half a call": (Llama3, {}, '{"name": "f", "parameters": {"q"', "", "", []),
    "mistral, half a call": (Mistral, {}, '[TOOL_CALLS]f[ARGS]{"q": 1', "", "", []),
    "deepseek, half a call": (
        DeepSeek,
        {},
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"q": 1}',
        "",
        "",
        [],
    ),
    "glm, half a call": (Glm, {}, "<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>1</arg_value>", "", "", []),
    "harmony, half a call": (Harmony, {}, '<|channel|>commentary to=functions.f<|message|>{"q": 1', "", "", []),
    "reasoning": (Hermes, {"reasoning": THINK}, "<think>So <tool_call>", "", "So <tool_call>", []),
}
CASES = {**WHOLE, **{f"{name}, cut": case for name, case in CUT.items()}}


def told(reply: Reply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.content, reply.reasoning, [(call.name, call.arguments) for call in reply.calls]


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_read(case):
    _, _, text, content, reasoning, calls = CASES[case]
    assert told(read(make(case), text, is_whole=not case.endswith("cut"))) == (content, reasoning, calls)


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=150)
def test_whatever_pieces_it_comes_in_the_same_is_read(data):
    """Calls are announced once, before their arguments, and say once that they are whole."""
    case = data.draw(st.sampled_from(list(CASES)))
    _, _, text, content, reasoning, calls = CASES[case]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    parser = make(case)
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    deltas = [*map(parser.feed, pieces), parser.finish(not case.endswith("cut"))]
    assert "".join(delta.content for delta in deltas) == content
    assert "".join(delta.reasoning for delta in deltas) == reasoning
    arguments, whole = {}, []
    for call in (call for delta in deltas for call in delta.calls):
        assert call.is_first == (call.index not in arguments)
        assert call.index not in whole
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
        whole += [call.index] * call.is_whole
    assert [arguments[index] for index in whole] == [expected for _, expected in calls]


@hypothesis.given(
    st.text(alphabet=st.sampled_from('<|>{}[]":,\\ntolcarg_keyTOLCASTHINK\n ')), st.sampled_from(list(CASES))
)
@hypothesis.settings(deadline=None, max_examples=300)
def test_any_text_is_read(text, case):
    """Without calls, nothing of it is lost but white space and what belongs to a notation."""
    for noise in (text, CASES[case][2][: len(text)] + text, text + CASES[case][2]):
        reply = read(make(case), noise, is_whole=len(text) % 2 == 0)
        assert reply == read(make(case), noise, is_whole=len(text) % 2 == 0)
        assert reply.message()["content"] == reply.content


def test_arguments_come_as_they_are_written():
    """A client that shows them sees them grow."""
    parser, seen = ToolParser(Hermes), []
    for piece in ('<tool_call>{"name": "f", "argu', 'ments": {"text": "once ', "upon", ' a time"}}', "</tool_call>"):
        seen += [(call.arguments, call.is_first, call.is_whole) for call in parser.feed(piece).calls]
    assert seen == [
        ("", True, False),
        ('{"text": "once ', False, False),
        ("upon", False, False),
        (' a time"}', False, True),
    ]
    assert json.loads("".join(arguments for arguments, _, _ in seen)) == {"text": "once upon a time"}


@pytest.mark.parametrize(
    "text",
    ['[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]', "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}"],
)
def test_a_call_has_the_name_that_the_model_gives_it(text):
    """Results are told to it by that."""
    [call] = read(ToolParser(Mistral), text, is_whole=True).calls
    assert call.call_id == "abcdefghi"


@pytest.mark.parametrize("case", [name for name in CUT if "half a call" in name])
def test_a_call_that_a_stop_string_cuts_is_none(case):
    """The answer ended as it was asked to, and the call did not."""
    family, options, text, *_ = CUT[case]
    assert read(ToolParser(family, **options), text.rstrip("}"), is_whole=True).calls == ()


@pytest.mark.parametrize("key", ["name", "arguments", "id"])
def test_what_is_nested_deeper_than_can_be_read_is_no_call(key):
    text = f'<tool_call>{{"{key}": {"[" * 5000}{"]" * 5000}}}</tool_call>'
    assert not read(ToolParser(Hermes), text, True).calls
