"""Conversations as text: first turns, turns that go on from a held reply, and templates that cannot."""

import pytest

from ca_jax.errors import CheckpointError, InvalidRequestError
from ca_jax.models.chat_template import ChatTemplate, with_arguments
from ca_jax.testing import tiny

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
REPLY = {"role": "assistant", "content": "Hi!"}
NEXT = {"role": "user", "content": "And now?"}

LLAMA2_STYLE = """\
{%- if messages[0]['role'] == 'system' -%}
  {%- set system = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' -%}
  {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate') -}}
  {%- endif -%}
  {%- if message['role'] == 'user' -%}
    {{- bos_token + '[INST] ' + (system if loop.first and system else '') + message['content'] + ' [/INST]' -}}
  {%- else -%}
    {{- ' ' + message['content'] | trim + ' ' + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""

TEMPLATES = {
    "chatml": ChatTemplate(tiny.CHATML_TEMPLATE),
    "llama2": ChatTemplate(LLAMA2_STYLE, bos_token="<s>", eos_token="</s>"),
    "plain": ChatTemplate.plain(),
}


FIRST_AND_NEXT = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama2": ("<s>[INST] <<SYS>>Be brief.<</SYS>>Hello [/INST]", " </s><s>[INST] And now? [/INST]"),
    "plain": ("Be brief.\n\nUser: Hello\nAssistant:", "\nUser: And now?\nAssistant:"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_first_turn_reply_and_next_turn_are_the_whole_conversation(name):
    """The ids may hold a reply that was cut off, or that the template would write otherwise: it is not looked at."""
    template, (first, following) = TEMPLATES[name], FIRST_AND_NEXT[name]
    earlier = [SYSTEM, HELLO, REPLY]
    assert template.first_turn([SYSTEM, HELLO]) == first
    for content in ("Hi!", "", "<|im_end|>", "{{ 7 }}"):
        assert template.next_turn([SYSTEM, HELLO, {**REPLY, "content": content}], [NEXT]) == following
    whole = template.first_turn([*earlier, NEXT])
    assert whole.startswith(first)
    assert whole.endswith("Hi!" + following)
    assert whole[len(first) : -len(following)].strip() == "Hi!"
    assert earlier == [SYSTEM, HELLO, {"role": "assistant", "content": "Hi!"}], "messages are not changed"


@pytest.mark.parametrize("earlier", [[], [HELLO], [HELLO, REPLY, NEXT]])
def test_next_turn_wants_a_reply_to_go_on_from(earlier):
    with pytest.raises(InvalidRequestError, match=r"end with the assistant's, got ('user'|no message)"):
        TEMPLATES["chatml"].next_turn(earlier, [NEXT])


@pytest.mark.parametrize(
    ("source", "times"),
    [
        ("{{ messages[-1]['content'] }}", 0),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}", 2),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", 0),
    ],
)
def test_a_template_that_cannot_be_continued_says_so(source, times):
    with pytest.raises(CheckpointError, match=f"must write the last reply once, found it {times} times"):
        ChatTemplate(source).next_turn([HELLO, REPLY], [NEXT])


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (TEMPLATES["llama2"], [HELLO, NEXT], "refuses these messages: roles must alternate"),
        (TEMPLATES["chatml"], [{"role": "user"}], "refuses these messages"),
        *(
            (ChatTemplate(source), [HELLO], r"unsafe|not safe|SecurityError")  # It runs in a sandbox.
            for source in (
                "{{ messages.append(1) }}",
                "{{ ''.__class__.__mro__ }}",
                "{{ cycler.__init__.__globals__.os.getcwd() }}",
            )
        ),
    ],
)
def test_what_the_template_refuses_or_must_not_do_is_an_invalid_request(template, messages, says):
    with pytest.raises(InvalidRequestError, match=says):
        template.first_turn(messages)


def test_a_broken_template_is_refused_when_it_is_made():
    with pytest.raises(CheckpointError, match=r"not valid Jinja: .*line 2"):
        ChatTemplate("fine\n{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "  {% for m in messages %}\n    {{ m['role'] }}: {{ m['content'] }}\n  {% endfor %}\n{% if x %}y{% endif %}\n",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
        "{{ tools is none }} {{ {'a': '<é>'} | tojson }} {{ strftime_now('%Y') | length }}",
    ],
)
def test_a_template_renders_as_transformers_renders_it(source):
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [HELLO, REPLY]
    (wanted,), _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)
    assert ChatTemplate(source).first_turn(messages) == wanted


# Tools.

CALLS = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
RESULT = {"role": "tool", "tool_call_id": "1", "content": "blue"}
WITH_TOOLS = """\
{%- if tools -%}{{ 'tools ' + (tools | tojson) + '\n' }}{%- endif -%}
{%- for message in messages -%}
{{ message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] -%}{{ call.function.name }}ARGUMENTS{%- endfor -%}
{{ '<end>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}
"""
OBJECTS = WITH_TOOLS.replace("ARGUMENTS", "({{ call.function.arguments.at }})")
TEXTS = WITH_TOOLS.replace("ARGUMENTS", "({{ '' + call.function.arguments }})")
WANTS_CALLS = OBJECTS.replace(
    "{{ message.role + ': ' + message.content }}",
    "{%- if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls -%}{{ raise_exception('no call') }}"
    "{%- endif -%}{{ message.role + ': ' + message.content }}",
)


@pytest.mark.parametrize(
    ("source", "written"),
    [(OBJECTS, "look(sea)"), (TEXTS, 'look({"at": "sea"})'), (WANTS_CALLS, "look(sea)")],
    ids=["objects", "texts", "wants to see calls"],
)
def test_a_conversation_goes_on_behind_calls_of_tools(source, written):
    """Whatever a template takes arguments as, and also where it wants to see the call that a tool has answered."""
    template = ChatTemplate(source)
    hello, called = {**HELLO, "tools": TOOLS}, {"role": "assistant", "content": "", "tool_calls": CALLS}
    messages = [with_arguments(message) for message in (hello, called, RESULT)]
    first = template.first_turn([hello])
    assert first.startswith('tools [{"type": "function", "function": {"name": "look"')
    assert template.first_turn(messages) == f"{first}{written}<end>\ntool: blue<end>\nassistant: "
    following = template.next_turn(messages[:2], [RESULT])
    assert following.removeprefix("<end>\n") == "tool: blue<end>\nassistant: "
    later = template.next_turn([*messages, REPLY], [NEXT])
    assert later == "<end>\nuser: And now?<end>\nassistant: "
    assert called["tool_calls"] == CALLS, "messages are not changed"


def test_calls_that_a_template_writes_anew_are_not_gone_on_behind():
    source = WANTS_CALLS.replace("'<end>", "'<end of ' + (messages | length) | string + '>")
    messages = [with_arguments(each) for each in (HELLO, {"role": "assistant", "content": "", "tool_calls": CALLS})]
    with pytest.raises(CheckpointError, match="cannot be continued from calls of tools"):
        ChatTemplate(source).next_turn(messages, [RESULT])
