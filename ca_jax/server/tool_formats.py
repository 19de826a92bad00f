"""How a model writes calls of tools and what it thinks: known from its chat template, or by flag.

`ReplyForm` gives readers of answers, and grammars of answers that must call a tool. These are in the model's own
notation, so that what is read of them is what the model would have written by itself.

Not here: reading (`tool_calls`, `tool_families`), how tools come into a prompt (the chat template).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from ca_jax.errors import InvalidRequestError
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.server.errors import ApiError
from ca_jax.server.tool_calls import Family, ReplyReader, ToolParser
from ca_jax.server.tool_families import DeepSeek, Glm, Harmony, Hermes, Llama3, Mistral
from ca_jax.turns.grammars import Grammar, lark_text

ToolFamily = Literal["auto", "none", "hermes", "llama3", "mistral", "deepseek", "glm", "harmony"]
"""Names of `--tool_call_parser`."""
ReasoningFamily = Literal["auto", "none", "think", "magistral", "harmony"]
"""Names of `--reasoning_parser`."""

_FAMILIES: dict[str, type[Family]] = {
    "hermes": Hermes,
    "llama3": Llama3,
    "mistral": Mistral,
    "deepseek": DeepSeek,
    "glm": Glm,
    "harmony": Harmony,
}
# What a template spells that is of one family alone, the first that is found.
_SIGNS = (
    ("harmony", "<|channel|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("deepseek", "<｜tool▁calls▁begin｜>"),
    ("glm", "<arg_key>"),
    ("hermes", "<tool_call>"),
    ("llama3", "<|python_tag|>"),
    ("llama3", '"parameters": dictionary'),
)
_REASONING = {"think": ("<think>", "</think>"), "magistral": ("[THINK]", "[/THINK]")}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Between two tokens of a call's JSON: as much as one needs that is indented, and no more, or a model that draws blanks
# would be cut before its call ends.
_SPACED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedTools:
    """What a request says of tools."""

    functions: tuple[Mapping[str, Any], ...]
    """Each with its `name`, and the schema of its arguments, `parameters`, if they have one."""
    choice: Literal["none", "auto", "required"] = "auto"
    """Whether the answer may call them, or must."""
    named: str | None = None
    """The one that must be called."""
    is_parallel: bool = True
    """Whether it may call several."""

    @property
    def must_call(self) -> bool:
        """Whether the answer must call one."""
        return self.choice == "required" or self.named is not None

    @property
    def is_strict(self) -> bool:
        """Whether calls that may come have arguments as the schemas say: of all functions, where one is `strict`."""
        return self.choice == "auto" and any(each.get("strict") for each in self.functions)

    @property
    def schemas(self) -> dict[str, Any]:
        """By name, the schema of its arguments."""
        return {each["name"]: each.get("parameters") or _ANY_OBJECT for each in self.functions}


class ReplyForm:
    """How a model's answers are written. Threads may share it.

    Args:
      tokenizer: with the chat template; None: answers are text alone.
      tools: the family of its calls; `auto`: what the template says.
      reasoning: how it thinks, likewise.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, tools: ToolFamily = "auto", reasoning: ReasoningFamily = "auto"
    ) -> None:
        self._tokenizer = tokenizer
        template = None if tokenizer is None else tokenizer.chat_template
        self._source = "" if template is None else template.source
        with_tools = "" if template is None else template.tool_source
        self.family = None if tools == "none" else _family(with_tools) if tools == "auto" else tools
        """Of its calls; None: it has none."""
        kind = _reasoning(self._source) if reasoning == "auto" else reasoning
        self._is_harmony = kind == "harmony"
        self.reasoning = _REASONING.get(kind)
        """What stands around what it thinks; None: it does not, or on a channel of its own."""
        self.is_thinking = template is not None and self.reasoning is not None and _opens(template, *self.reasoning)
        """Whether its prompts end in the middle of that."""

    def check(self, tools: AskedTools) -> None:
        """Raises ApiError where the model has no way to call tools."""
        if self.family is None:
            message = (
                "tools must be for a model whose chat template has a place for them, and calls of a known kind; this "
                "one's has not: the server's --tool_call_parser says of which kind they are, if they are"
            )
            raise ApiError(400, message, param="tools", code="unsupported_parameter")

    def reader(self, tools: AskedTools | None, seed: str) -> ReplyReader | None:
        """Reads answers to a request; None where all of them is content.

        Args:
          tools: what the request says of them; None: nothing.
          seed: of one answer; ids of calls follow from it.
        """
        calls = tools is not None and tools.choice != "none"
        family = _FAMILIES[self.family] if self.family and calls else Harmony if self._is_harmony else None
        if family is None and self.reasoning is None:
            return None
        schemas = {} if tools is None else tools.schemas

        def make(call_id: Callable[[int], str]) -> ToolParser:
            return ToolParser(
                family, reasoning=self.reasoning, is_thinking=self.is_thinking, call_id=call_id, tools=schemas
            )

        spelled = frozenset([*(self.reasoning or ()), *(family.markers if family else ())])
        if self.family == "mistral":  # Its template asks for such.
            return ReplyReader(make, spelled, seed, id_prefix="", id_chars=9)
        return ReplyReader(make, spelled, seed)

    def grammar(self, tools: AskedTools | None, guided: Mapping[str, Grammar]) -> Grammar | None:
        """What an answer must match, all that the model writes around what is said included; None: anything.

        Args:
          tools: what the request says of them.
          guided: what it says must match, by field. Calls that must come need match nothing else; to
            `response_format`, calls that may come are the alternative; `guided_grammar` is of all of the answer.
            Where nothing is to match, calls of strict tools may stand behind any text.
        """
        field, grammar = next(iter(guided.items()), ("", None))
        if tools is not None and tools.must_call:
            return self._whole([("called", self._calls(tools))])
        if tools is not None and tools.is_strict and grammar is None:
            return self._whole([("free", self._free(tools))])
        if grammar is None or field == "guided_grammar":
            return grammar
        said = ("said", self._said(grammar))
        if tools is not None and tools.choice == "auto" and field == "response_format":
            return self._whole([said, ("called", self._calls(tools))])
        return self._whole([said]) if self.reasoning is not None or self._is_harmony else grammar

    def _whole(self, rules: Sequence[tuple[str, str]]) -> Grammar:
        """A grammar of a whole answer: one of some rules, by name, behind what the model thinks."""
        main = f"main: {' | '.join(name for name, _ in rules)}"
        return Grammar.lark("\n".join([self._start(), main, *(rule for _, rule in rules)]))

    def _start(self) -> str:
        """The rule of a whole answer around the rule `main`."""
        if self._is_harmony:
            head, tail = self._text("<|channel|>analysis<|message|>"), self._text("<|end|><|start|>assistant")
            return f"start: thought? main\nthought: {head} THOUGHT {tail}\nTHOUGHT: /(?s:.*)/"
        if self.reasoning is None:
            return "start: main"
        opening, closing = self.reasoning
        begins = "" if self.is_thinking else self._text(opening)
        start = "start: thought main" if self.is_thinking else "start: thought? main"
        thought = f"{start}\nthought: {begins} thinking /[\\n]{{0,2}}/"
        if self._special(closing) is not None:
            return f"{thought}\nthinking: THOUGHT {self._text(closing)}\nTHOUGHT: /(?s:.*)/"
        return f"{thought}\nthinking[lazy]: /(?s:.*)/ {lark_text(closing)}"

    def _said(self, grammar: Grammar) -> str:
        """The rule `said`: what is said to the user."""
        head = self._text("<|channel|>final<|message|>") if self._is_harmony else ""
        return f"said: {head} answer\n{_as_rule(grammar)}"

    def _calls(self, tools: AskedTools, skipped: str = "") -> str:
        """The rule `called`: one call of a tool, or several; without the text `skipped` that it begins with."""
        functions = [each for each in tools.functions if tools.named in (None, each["name"])]
        is_one = tools.named is not None or not tools.is_parallel
        before, between, behind = self._around()
        calls = [self._call(each) for each in functions]
        firsts = [f"{self._text((before + head).removeprefix(skipped))} {rest}" for head, rest in calls]
        more = [f"{self._text(between + head)} {rest}" for head, rest in calls]
        called = f"called: first {self._text(behind)}" if is_one else f"called: first more* {self._text(behind)}"
        rules = [called, f"first: {' | '.join(firsts)}", *([] if is_one else [f"more: {' | '.join(more)}"])]
        return "\n".join(rules)

    def _free(self, tools: AskedTools) -> str:
        """The rule `free`: any text, and calls that may stand behind it, or in its place where they begin like JSON."""
        family = _FAMILIES[self.family or ""]
        # A regular expression matches no special token; a marker that is text must be kept out of what is said.
        spelled = [marker for marker in family.markers if self._special(marker) is None]
        without = f" & ~/(?s:.*)({'|'.join(_escaped(marker) for marker in spelled)})(?s:.*)/" if spelled else ""
        if self._is_harmony:
            said = f"{self._text('<|channel|>final<|message|>')} WORDS?"
            return f"free: {said} | called\nWORDS: /(?s:.+)/{without}\n{self._calls(tools)}"
        if self.family == "llama3":
            tag = family.markers[0]
            begin = "" if tag in spelled else f"{self._text(tag)}? "
            blank = r"[ \t\r\n]"
            words = f"WORDS: /{blank}+|{blank}*[^ \\t\\r\\n{{](?s:.*)/{without}"
            return f"free: WORDS? | {begin}called\n{words}\n{self._calls(tools)}"
        opening, words = family.markers[0], f"WORDS: /(?s:.+)/{without}"
        if opening not in spelled:
            return f"free: WORDS? called?\n{words}\n{self._calls(tools)}"
        # What is matched lazily ends with the marker's first place, behind which the call goes on.
        before = f"before[lazy]: /(?s:.*)/ {lark_text(opening)}"
        return f"free: WORDS? | before called\n{words}\n{before}\n{self._calls(tools, opening)}"

    def _around(self) -> tuple[str, str, str]:
        """What stands before, between and behind calls."""
        if self.family == "mistral" and not self._names_arguments:
            return "[TOOL_CALLS][", ", ", "]"
        if self.family == "deepseek":
            return "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"
        return "", {"hermes": "\n", "llama3": "; ", "glm": "\n"}.get(self.family or "", ""), ""

    def _call(self, function: Mapping[str, Any]) -> tuple[str, str]:
        """What calls a function: the text before its arguments, and the rest in Lark's notation."""
        name, schema = function["name"], function.get("parameters") or _ANY_OBJECT
        if self.family == "glm":
            return f"<tool_call>{name}", self._glm_arguments(schema)
        arguments, text = _json_rule(schema), self._text
        head = f'{{"name": {json.dumps(name)}, '
        if self.family == "llama3":
            return f'{head}"parameters": ', f"{arguments} {text('}')}"
        if self.family == "mistral" and self._names_arguments:
            return f"[TOOL_CALLS]{name}[ARGS]", arguments
        if self.family == "mistral":
            return f'{head}"arguments": ', f"{arguments} {text('}')}"
        if self.family == "deepseek":
            is_fenced = "```json" in self._source
            inner = f"function<｜tool▁sep｜>{name}\n```json\n" if is_fenced else f"{name}<｜tool▁sep｜>"
            end = ("\n```" if is_fenced else "") + "<｜tool▁call▁end｜>"
            return f"<｜tool▁call▁begin｜>{inner}", f"{arguments} {text(end)}"
        if self.family == "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", arguments
        return f'<tool_call>\n{head}"arguments": ', f"{arguments} {text('}' + chr(10) + '</tool_call>')}"

    def _glm_arguments(self, schema: Any) -> str:
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        required = schema.get("required", ()) if isinstance(schema, Mapping) else ()
        pairs = []
        for key, described in (properties or {}).items():
            is_text = isinstance(described, Mapping) and described.get("type") == "string" and "enum" not in described
            value = "/[^<]*/" if is_text else _json_rule(_with_definitions(described, schema))
            if isinstance(described, Mapping) and described.get("type") == "string" and "enum" in described:
                value = f"({' | '.join(map(lark_text, described['enum']))})"
            head = self._text(f"\n<arg_key>{key}</arg_key>\n<arg_value>")
            pair = f"{head} {value} {self._text('</arg_value>')}"
            pairs.append(pair if key in required else f"({pair})?")
        return " ".join([*pairs, self._text("\n</tool_call>")])

    @property
    def _names_arguments(self) -> bool:
        return "[ARGS]" in self._source

    def _text(self, text: str) -> str:
        """A text in Lark's notation, special tokens that it spells as those."""
        if not text:
            return ""
        names = sorted((name for name in _markers() if self._special(name) is not None), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        told = (f"<[{self._special(part)}]>" if part in names else lark_text(part) for part in parts if part)
        return " ".join(told)

    def _special(self, name: str) -> int | None:
        """The id of a special token; None: it is none."""
        token = None if self._tokenizer is None else self._tokenizer.token_id(name)
        return token if self._tokenizer is not None and token in self._tokenizer.special_ids else None


@functools.cache
def _markers() -> tuple[str, ...]:
    families: Iterable[str] = (marker for family in _FAMILIES.values() for marker in family.markers)
    return tuple({*families, *(marker for pair in _REASONING.values() for marker in pair)})


def _family(source: str) -> str | None:
    if "tools" not in source:
        return "harmony" if "<|channel|>" in source else None
    is_other = "<function=" in source  # Of Qwen3-Coder and Functionary, whose calls are not read.
    return None if is_other else next((family for family, sign in _SIGNS if sign in source), None)


def _reasoning(source: str) -> str:
    if "<|channel|>" in source:
        return "harmony"
    return next((kind for kind, (_, closing) in _REASONING.items() if closing in source), "none")


def _opens(template: ChatTemplate, opening: str, closing: str) -> bool:
    """Whether prompts end within reasoning."""
    try:
        prompt = template.first_turn([{"role": "user", "content": "?"}])
    except InvalidRequestError:
        return False
    return prompt.rfind(opening) > prompt.rfind(closing)


def _escaped(text: str) -> str:
    """A text as part of a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def _json_rule(schema: Any) -> str:
    spaced = {**schema, "x-guidance": _SPACED} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(spaced, ensure_ascii=False)}"


def _with_definitions(described: Any, schema: Any) -> Any:
    """A schema of a property with the definitions that it may refer to."""
    if not isinstance(described, Mapping) or not isinstance(schema, Mapping):
        return described
    return {**{name: schema[name] for name in ("$defs", "definitions") if name in schema}, **described}


def _as_rule(grammar: Grammar) -> str:
    """A grammar as a rule `answer`."""
    if grammar.kind == "json_schema":
        try:
            return f"answer: {_json_rule(json.loads(grammar.text))}"
        except ValueError as error:
            raise InvalidRequestError(f"a JSON schema must be JSON: {error}") from error
    if grammar.kind == "regex":
        escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], grammar.text, flags=re.S)
        return f"answer: /{escaped}/"
    return re.sub(r"^start(?=\s*[:\[])", "answer", grammar.text, count=1, flags=re.MULTILINE)
