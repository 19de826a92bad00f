"""How families of models write calls of tools, each read by a small machine over its markers.

    hermes     <tool_call>{"name": "f", "arguments": {...}}</tool_call>                  Hermes, Qwen 2.5 and 3
    llama3     {"name": "f", "parameters": {...}}                                        Llama 3.1 and later
    mistral    [TOOL_CALLS][{"name": "f", "arguments": {...}}], [TOOL_CALLS]f[ARGS]{...}
    deepseek   <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, in a list of them
    glm        <tool_call>f <arg_key>k</arg_key> <arg_value>v</arg_value></tool_call>    GLM 4.5
    harmony    <|channel|>commentary to=functions.f<|message|>{...}<|call|>              gpt-oss

Not here: what is common to all of them (`tool_calls`), which one a template is of (`tool_formats`).
Source: the models' published chat templates and prompt formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ca_jax.server.tool_calls import Family, JsonCall, ToolParser


class Hermes(Family):
    """An object in JSON between tags."""

    markers = ("<tool_call>", "</tool_call>")

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser)
        self._call: JsonCall | None = None

    def mark(self, marker: str) -> None:
        """A tag comes; within a string of the call it is text."""
        if self._call is not None and self._call.in_text:
            self._call.feed(marker)
            return
        self.end(is_whole=True)
        if marker == self.markers[0]:
            self._call = JsonCall(self.parser)

    def text(self, text: str) -> None:
        """Of the call, or beside it."""
        if self._call is None:
            self.parser.say(text)
        elif not self._call.is_done:
            self._call.feed(text)

    def end(self, is_whole: bool) -> None:
        """What was not told is no call."""
        call, self._call = self._call, None
        if call is not None and not call.is_told:
            self.parser.say(self.markers[0] + call.raw)


class Llama3(Family):
    """Objects in JSON that are all of the answer, or come behind a marker."""

    markers = ("<|python_tag|>",)

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser)
        self._begun = ""
        self._is_called: bool | None = None  # None: that is not known yet.
        self._call: JsonCall | None = None

    def mark(self, marker: str) -> None:
        """What follows is calls."""
        self._is_called = True

    def text(self, text: str) -> None:
        """Calls, if the answer begins like one."""
        if self._is_called is None:
            self._begun += text
            if not self._begun.strip():
                return
            self._is_called, text = self._begun.lstrip().startswith("{"), self._begun
        if not self._is_called:
            self.parser.say(text)
            return
        while text:
            if self._call is None:
                text = text.lstrip(" \t\r\n;,")
                if not text:
                    return
                if not text.startswith("{"):
                    self._is_called = False
                    self.parser.say(text)
                    return
                self._call = JsonCall(self.parser, needs_arguments=True)
            text = self._call.feed(text)
            if self._call.is_done:
                self.end(is_whole=True)

    def end(self, is_whole: bool) -> None:
        """What was not told is no call."""
        call, self._call = self._call, None
        if call is not None and not call.is_told:
            self.parser.say(call.raw)
        elif self._is_called is None:
            self.parser.say(self._begun)


class _Plain(Family):
    """Of families whose arguments stand alone, behind the name: they are told as they come."""

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser)
        self._index: int | None = None
        self._name = self._blank = ""
        self._is_told = False
        self._arguments = ""

    def begin(self, name: str, call_id: str = "") -> None:
        """A call of this function begins, which the model may have named."""
        self._index, self._name = self.parser.begin_call(call_id), name
        self._blank = self._arguments = ""
        self.parser.call(self._index, name, "", is_first=True)

    def arguments(self, text: str) -> None:
        """Something of its arguments, without the white space around them."""
        if self._index is not None:
            text = self._blank + text
            shown = text.rstrip()
            self._blank = text[len(shown) :]
            self._arguments += shown
            if shown:
                self.parser.call(self._index, self._name, shown if self._is_told else shown.lstrip())
                self._is_told = True

    def _is_json(self) -> bool:
        try:
            json.loads(self._arguments or "{}")
        except (ValueError, RecursionError):
            return False
        return True

    def close(self, is_whole: bool) -> None:
        """It ends. One that the end of an answer ends, which a stop string may have cut, is whole if it is JSON."""
        if self._index is not None and is_whole:
            self.parser.call(self._index, self._name, "" if self._is_told else "{}", is_whole=True)
        self._index, self._is_told = None, False


class Mistral(_Plain):
    """A list in JSON behind a marker; later models write the name and a marker before the arguments."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser)
        self._head: str | None = None  # Behind a marker, what is not known to be a name or a list.
        self._call_id: str | None = None  # As the model names the call; None: it does not.
        self._call: JsonCall | None = None
        self._in_list = False

    def mark(self, marker: str) -> None:
        """A call begins, or its arguments do."""
        if self._call is not None and self._call.in_text:
            self._call.feed(marker)
        elif marker == self.markers[0]:
            self.end(is_whole=True)
            self._head, self._call_id, self._in_list = "", None, False
        elif self._head is not None and marker == self.markers[1]:
            self._call_id = ""
        elif self._head is not None:
            self.begin(self._head.strip(), (self._call_id or "").strip())
            self._head = None
        elif self._index is not None:
            self.arguments(marker)
        else:
            self.parser.say(marker)

    def text(self, text: str) -> None:
        """Of a name, of a list, of arguments, or beside them."""
        if self._index is not None:
            self.arguments(text)
        elif self._head is not None:
            if self._call_id is not None:
                self._call_id += text
                return
            self._head += text
            head = self._head.lstrip()
            if head.startswith(("[", "{")):
                self._head, self._in_list = None, True
                self._listed(head)
        elif self._in_list:
            self._listed(text)
        else:
            self.parser.say(text)

    def _listed(self, text: str) -> None:
        while text:
            if self._call is None:
                at = text.find("{")
                if at < 0:
                    return
                text, self._call = text[at:], JsonCall(self.parser, has_id=True)
            text = self._call.feed(text)
            if self._call.is_done:
                self._call_ends()

    def _call_ends(self) -> None:
        call, self._call = self._call, None
        if call is not None and not call.is_told:
            self.parser.say(call.raw)

    def end(self, is_whole: bool) -> None:
        """Arguments that stand alone end with the answer."""
        self._call_ends()
        self.close(is_whole and self._is_json())
        if self._head:
            self.parser.say(self.markers[0] + self._head)
        self._head = None


class DeepSeek(_Plain):
    """Calls in a list of them, between markers; V3 and R1 put the arguments into a fenced block behind the name."""

    markers = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )
    _FENCED = re.compile(r"\s*([^\n]+)\n```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser)
        self._head: str | None = None  # Before the separator.
        self._fenced: str | None = None

    def mark(self, marker: str) -> None:
        """A call begins, its arguments do, or it ends."""
        if marker == self.markers[2]:
            self._head = ""
        elif marker == self.markers[4] and self._head is not None:
            name, self._head = self._head.strip(), None
            if name == "function":
                self._fenced = ""
            else:
                self.begin(name)
        elif marker == self.markers[3]:
            self._close()

    def text(self, text: str) -> None:
        """Of a name or of arguments; else it is said."""
        if self._index is not None:
            self.arguments(text)
        elif self._fenced is not None:
            self._fenced += text
        elif self._head is not None:
            self._head += text
        else:
            self.parser.say(text)

    def _close(self) -> None:
        fenced, self._fenced = self._fenced, None
        if fenced is not None and (found := self._FENCED.fullmatch(fenced)):
            self.begin(found[1].strip())
            self.arguments(found[2])
        elif fenced is not None:
            self.parser.say(fenced)
        self.close(is_whole=True)
        self._head = None

    def end(self, is_whole: bool) -> None:
        """A call without its end is none."""
        if self._head:
            self.parser.say(self._head)
        if self._fenced:
            self.parser.say(self._fenced)
        self._head = self._fenced = None
        self.close(is_whole=False)


class Glm(Family):
    """A name, and a pair of tags for each argument: values that are text by their schema stand as they are."""

    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser)
        self._index: int | None = None
        self._name = self._key = self._text = ""
        self._is_open = False
        self._num_arguments = 0

    def mark(self, marker: str) -> None:
        """A part of a call begins or ends."""
        text, self._text = self._text, ""
        if marker == "<tool_call>":
            self._is_open, self._index, self._num_arguments = True, None, 0
        elif not self._is_open:
            self.parser.say(marker)
        elif self._index is None:
            self._name = text.strip()
            self._index = self.parser.begin_call()
            self.parser.call(self._index, self._name, "{", is_first=True)
        if self._index is None:
            return
        if marker == "</arg_key>":
            self._key = text.strip()
        elif marker == "</arg_value>":
            before = ", " if self._num_arguments else ""
            pair = f"{before}{json.dumps(self._key, ensure_ascii=False)}: {self._value(text)}"
            self.parser.call(self._index, self._name, pair)
            self._num_arguments += 1
        elif marker == "</tool_call>":
            self.parser.call(self._index, self._name, "}", is_whole=True)
            self._is_open, self._index = False, None

    def text(self, text: str) -> None:
        """Of a part of a call, or beside it."""
        if self._is_open:
            self._text += text
        else:
            self.parser.say(text)

    def end(self, is_whole: bool) -> None:
        """A call without its end is none."""
        if self._is_open and self._index is None:
            self.parser.say(self.markers[0] + self._text)
        self._is_open = False

    def _value(self, text: str) -> str:
        """A value as JSON."""
        schema = self.parser.tools.get(self._name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        described = properties.get(self._key) if isinstance(properties, Mapping) else None
        if not (isinstance(described, Mapping) and described.get("type") == "string"):
            try:
                return json.dumps(json.loads(text), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)


class Harmony(_Plain):
    """Messages on channels: what is thought on `analysis`, what is said on `final`, calls to `functions.NAME`."""

    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    _TO = re.compile(r"to=functions\.([^\s<]+)")

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser)
        self._head: str | None = ""  # Of the message that begins; None: in its body.
        self._is_thought = False

    def mark(self, marker: str) -> None:
        """A message begins, its body does, or it ends."""
        if marker == "<|message|>" and self._head is not None:
            head, self._head = self._head, None
            called = self._TO.search(head)
            if called is not None:
                self.begin(called[1])
            self._is_thought = "<|channel|>analysis" in head
        elif marker in ("<|channel|>", "<|constrain|>") and self._head is not None:
            self._head += marker
        else:
            self.close(is_whole=True)
            self._head = marker if marker == "<|channel|>" else ""

    def text(self, text: str) -> None:
        """Of a head or a body."""
        if self._head is not None:
            self._head += text
        elif self._index is not None:
            self.arguments(text)
        elif self._is_thought:
            self.parser.think(text)
        else:
            self.parser.say(text)

    def end(self, is_whole: bool) -> None:
        """A call's end is the answer's, whose last token is no text."""
        self.close(is_whole and self._is_json())
        if self._head and "<|" not in self._head and not self._head.lstrip().startswith(("assistant", "to=")):
            self.parser.say(self._head)
        self._head = ""
