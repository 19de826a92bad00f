"""Chat templates: conversations as the text a model was trained on.

A template is a Jinja program that came with a checkpoint, so it runs in Jinja's sandbox.

Not here: token ids. History is kept as ids and never rendered again; `next_turn` gives only the text that goes on.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ca_jax.errors import CheckpointError, InvalidRequestError

Message = Mapping[str, Any]
"""One message: `role` ("system", "user", "assistant", "tool") and `content`; see `turns.conversations.Message`."""

_SOME_DAY = datetime.datetime(2024, 7, 26)  # For text that must not change with the day.
_AS_TEXT = "arguments of its calls as text"  # Of a message, for templates that want them so.

_PLAIN = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ message['content'] + '\n\n' }}
{%- elif message['role'] == 'assistant' -%}{{ 'Assistant: ' + message['content'] + '\n' }}
{%- else -%}{{ 'User: ' + message['content'] + '\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}
"""


class ChatTemplate:
    """A Jinja chat template, rendered the way Hugging Face `transformers` renders it. Safe to share between threads.

    Args:
      source: the Jinja source.
      bos_token: text of the token that begins a sequence, for templates that write it themselves.
      eos_token: text of the token that ends a reply.
      tool_source: the source for conversations with tools; None: the same.
      other_tokens: text of other special tokens by the names that templates have for them: `pad_token`.

    Raises:
      CheckpointError: a source is not a Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        tool_source: str | None = None,
        other_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.other_tokens = dict(other_tokens or {})
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template, self._tool_template = map(environment.from_string, (source, self.tool_source))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template is not valid Jinja: {error} (line {error.lineno})") from error

    @classmethod
    def plain(cls) -> ChatTemplate:
        """The fallback for models that come without a template.

        A system message is a paragraph of its own, then "User: ..." and "Assistant: ..." lines, then "Assistant:".
        """
        return cls(_PLAIN)

    def first_turn(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to where the assistant's next reply begins.

        Args:
          messages: oldest first.

        Returns:
          Text whose special tokens are spelled out, the beginning-of-sequence token included where the template writes
          it: encode it with `add_bos=False`.

        Raises:
          InvalidRequestError: the template refuses the messages (their roles do not alternate, say).
        """
        return self._rendered(messages)

    def before_message(self) -> str:
        """The text of a conversation up to where its first message's own text begins, the same on every day.

        Raises:
          InvalidRequestError: the template refuses a message, or does not write it once and as it is.
        """
        mark = f"message{secrets.token_hex(16)}"
        before, *behind = self._rendered([{"role": "user", "content": mark}], today=_SOME_DAY).split(mark)
        if len(behind) != 1:
            found = len(behind)
            raise InvalidRequestError(f"a chat template must write a message once, as it is; wrote it {found} times")
        return before

    def _rendered(
        self, messages: Sequence[Message], *, begins_reply: bool = True, today: datetime.datetime | None = None
    ) -> str:
        tools = next((message["tools"] for message in messages if "tools" in message), None)
        asked: Mapping[str, Any] = next((message["template"] for message in messages if "template" in message), {})

        def render(reads_arguments: bool) -> str:
            tokens = {**self.other_tokens, "bos_token": self.bos_token, "eos_token": self.eos_token}
            own: dict[str, Any] = {**tokens, "tools": tools, "documents": None}
            if today is not None:
                own["strftime_now"] = today.strftime
            told = [_as_template(message, reads_arguments) for message in messages]
            template = self._template if tools is None else self._tool_template
            return template.render({**asked, **own, "messages": told, "add_generation_prompt": begins_reply})

        try:
            try:
                return render(True)
            except TypeError:  # Some take the arguments of calls as text.
                return render(False)
        except Exception as error:  # A template is a program of others: it may raise anything.
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from error

    def next_turn(self, earlier: Sequence[Message], new: Sequence[Message]) -> str:
        """The text that continues a conversation whose messages so far, the last reply included, are held as token ids.

        It begins right after the content of the last reply, so with whatever the template writes to end a turn. A
        caller whose ids already end with that (the stop token) takes it off, or does not keep the stop token.

        Args:
          earlier: the messages so far, ending with the assistant's reply. Its content is not looked at.
          new: the messages that follow.

        Returns:
          For instance "<|im_end|>\\n<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n".

        Raises:
          InvalidRequestError: `earlier` does not end with a reply, or the template refuses the messages.
          CheckpointError: the template does not write the reply exactly once, so it cannot be continued.
        """
        if not earlier or earlier[-1].get("role") != "assistant":
            found = repr(earlier[-1].get("role")) if earlier else "no message"
            raise InvalidRequestError(f"earlier messages must end with the assistant's, got {found}")
        sentinel = f"reply{secrets.token_hex(16)}"
        plain = {"role": "assistant", "content": sentinel}
        try:
            parts = self.first_turn([*earlier[:-1], plain, *new]).split(sentinel)
        except InvalidRequestError:
            if "tool_calls" not in earlier[-1]:
                raise
            return self._behind(earlier, new)  # It wants to see the calls that tools have answered.
        if len(parts) != 2:
            raise CheckpointError(
                "this chat template cannot be continued from a reply: it must write the last reply once, "
                f"found it {len(parts) - 1} times"
            )
        return parts[1]

    def _behind(self, earlier: Sequence[Message], new: Sequence[Message]) -> str:
        """What new messages add to the text of earlier ones, which is not looked at beyond that."""
        head, text = self._rendered(earlier, begins_reply=False), self.first_turn([*earlier, *new])
        if not text.startswith(head):
            raise CheckpointError("this chat template cannot be continued from calls of tools: it writes them anew")
        return text[len(head) :]


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the reply for training; here it is only what is inside."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Gives what stands inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def with_arguments(message: Message) -> dict[str, Any]:
    """A message whose calls have their arguments as objects, where they are such, as most templates take them.

    Templates that take the texts find them still. To be done before what somebody said is marked: JSON may spell a
    special token in escapes.
    """
    if "tool_calls" not in message:
        return dict(message)
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [
        {**call, "function": {**function, "arguments": _read(function["arguments"])}}
        for call, function in zip(message["tool_calls"], functions, strict=True)
    ]
    return {**message, "tool_calls": calls, _AS_TEXT: [function["arguments"] for function in functions]}


def _as_template(message: Message, reads_arguments: bool) -> dict[str, Any]:
    """A message as a template takes it, with the arguments of calls as objects or as texts."""
    told = {name: value for name, value in message.items() if name not in ("tools", "template", _AS_TEXT)}
    if not reads_arguments and _AS_TEXT in message:
        told["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": text}}
            for call, text in zip(told["tool_calls"], message[_AS_TEXT], strict=True)
        ]
    return told


def _read(arguments: str) -> Any:
    try:
        found = json.loads(arguments)
        json.dumps(found, ensure_ascii=False).encode()  # Escapes may spell half a character, which no prompt can have.
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as it is, without Jinja's escaping for HTML; arguments in the order of `transformers`, not of Jinja."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
