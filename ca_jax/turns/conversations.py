"""Conversations: what is known of one but for its KV, and as bytes, so that a store can keep it beside that.

Not here: sessions (session), where the bytes are kept (storage).
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Message = dict[str, Any]
"""One message: `role` ("system", "user", "assistant", "tool") and `content`. It may have a `context`: chunks, as text
or as lists of token ids, that stand in front of its content and are part of it. One of the first turn may have `tools`,
functions as OpenAI describes them, and `template`, further variables of the chat template; an assistant's `tool_calls`
and `reasoning_content`, a tool's a `tool_call_id`."""
OTHERWISE = "otherwise"
"""In `Conversation.cut_by`: the messages alone do not say which tokens left."""
_FORMAT = 6
_ADAPTED_FORMAT = 7  # Of one that has an adapter, which a release that knows none must not go on with.
_EXTENDED_FORMAT = 8  # Of one whose messages have more than text, likewise.
_CHAINED_FORMAT = 5  # The first whose chain names contexts too.
# What was written before additions is one without any.
_READABLE = (3, 4, 5, _FORMAT, _ADAPTED_FORMAT, _EXTENDED_FORMAT)
_PACKED = {"token_ids": "<i4", "attention": "<f4"}  # Fields that are lists of numbers.
_OF_PROCESS = ("stem", "borrowed")  # Fields that are not kept.
_OF_ADAPTER = ("adapter", "adapter_weights")  # Fields that are left out where there is none.
_GROWING = ("token_ids", "messages", "turn_starts", "states", "responses")  # Fields that a turn only adds to.
_EXTRAS = ("tools", "template", "tool_calls", "tool_call_id", "name", "reasoning_content")  # Of messages, beside text.


@dataclasses.dataclass(frozen=True)
class Borrowed:
    """Tokens of a conversation that another one of its tenant has too, behind other tokens."""

    session_id: str
    """The other one's name."""
    first: int
    """Where they begin there."""
    start: int
    """And where here."""
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """All that a session knows, but for its KV."""

    token_ids: list[int]
    """The conversation as the model saw it."""
    messages: list[Message]
    """The conversation as text, oldest first."""
    turn_starts: list[tuple[int, int]]
    """Tokens and messages there were before each turn."""
    num_dropped: int = 0
    """Tokens that were dropped from it, since the context was full or by hand."""
    lineage: int = 0
    """A mark by which KV of two states is told apart: counts dropped tokens that had others behind them which stayed,
    tokens whose KV was blended, and times that all of it was stored anew. KV of another lineage has seen other tokens,
    or is not repaired."""
    num_slid: int = 0
    """First tokens that no layer of the model looks back to any more: their KV is not kept."""
    attention: list[float] = dataclasses.field(default_factory=list)
    """That its first tokens received, summed over layers, heads and queries; empty where that is not measured."""
    num_to_repair: int = 0
    """First tokens some of whose KV the next prefill computes anew: those that were there when others left."""
    to_drift: list[int] = dataclasses.field(default_factory=list)
    """For each truncation since then, how many first tokens are left of those that drifted by it."""
    generation: int = dataclasses.field(default=0, compare=False)
    """Counts what changed the conversation or the KV that is kept of it: of two states the later one has more."""
    stem: object = dataclasses.field(default_factory=object, compare=False, repr=False)
    """The same of states each of which only adds to the one before; of this process alone."""
    chain: str = ""
    """Names all that was said so far, contexts and messages that have left included; see `chain_of`."""
    states: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    """Chain and number of tokens at the end of each turn since tokens left last: where it can be gone on with."""
    cut_by: str = ""
    """The rule by which tokens left, where that and the messages say which; "" where none left, else `OTHERWISE`."""
    reached: str = ""
    """How a server's clients have gone on with it: by `name`, or by `history`. Empty: in neither way yet."""
    responses: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    """Of turns that are found by an id: that id, the chain behind the turn, and what else is kept of it, JSON; empty
    where it was deleted. A conversation that is forked from this one has none of them, nor has one that was cut."""
    kept: str = ""
    """What a server keeps with it for its clients, JSON; empty: nothing. A fork has nothing of it."""
    adapter: str = ""
    """Name of the adapter that it is held with, for good; empty: none."""
    adapter_weights: str = ""
    """That adapter's fingerprint."""
    borrowed: Borrowed | None = dataclasses.field(default=None, compare=False, repr=False)
    """What its next turn may blend of another's KV, where it has none of its own yet; of this process alone."""

    @classmethod
    def begin(cls, messages: Sequence[Message] = (), *, adapter: str = "", adapter_weights: str = "") -> Conversation:
        """One that has no turn yet, with messages that stand in front of the first: a system message, say."""
        empty = cls(token_ids=[], messages=[], turn_starts=[], adapter=adapter, adapter_weights=adapter_weights)
        return dataclasses.replace(empty, messages=list(messages), chain=chain_of(messages, empty.first_chain))

    @property
    def first_chain(self) -> str:
        """Its chain before anything was said."""
        return first_chain(self.adapter, self.adapter_weights)

    @property
    def kv_lineage(self) -> int:
        """The store's mark of its KV: all tokens that are gone from there and had others behind them."""
        return self.lineage + self.num_slid

    def slid(self, num_tokens: int) -> Conversation:
        """The same, of which only the KV behind its first `num_tokens` tokens is kept."""
        return dataclasses.replace(self, num_slid=num_tokens, generation=self.generation + 1)

    def stored_anew(self, num_fused: int) -> Conversation:
        """The same, all KV of which takes the place of what is kept; so many more tokens have the KV of chunks.

        Where that does not come to be kept, what was before is not taken for it.
        """
        lineage = self.lineage + max(num_fused, 1)
        return dataclasses.replace(self.with_kv_of(0), lineage=lineage, generation=self.generation + 1)

    def with_turn(
        self,
        token_ids: list[int],
        messages: Sequence[Message],
        answer: str | Message,
        attention: np.ndarray | None = None,
        given_ids: Sequence[int] = (),
        note: tuple[str, str] | None = None,
    ) -> Conversation:
        """The conversation with a turn behind it.

        Args:
          token_ids: of all of it; so is `attention`.
          messages: of the turn alone, the user's mostly.
          answer: the assistant's, its text or all of its message.
          attention: that its tokens received, where that is measured.
          given_ids: tokens of the turn that were given as ids: their text does not say what they are, the chain does.
          note: an id by which the turn is found, and what is kept by that.
        """
        said = [*messages, {"role": "assistant", "content": answer} if isinstance(answer, str) else answer]
        given = [{"role": "", "content": f"token ids {list(given_ids)}"}] if given_ids else []
        chain = chain_of([*given, *said], self.chain)
        return dataclasses.replace(
            self,
            token_ids=list(token_ids),
            messages=self.messages + said,
            turn_starts=[*self.turn_starts, (len(self.token_ids), len(self.messages))],
            attention=[] if attention is None else padded(attention, len(token_ids)).tolist(),
            chain=chain,
            states=[*self.states, (chain, len(token_ids))],
            responses=self.responses if note is None else [*self.responses, (note[0], chain, note[1])],
            borrowed=None,
            generation=self.generation + 1,
        )

    def take(self, num_tokens: int) -> Conversation:
        """Its first tokens, and the messages of the turns that begin before their end.

        One that ends where no turn did has a chain that no messages have: those are not what its tokens say.
        """
        turn_starts = [start for start in self.turn_starts if start[0] < num_tokens]
        num_messages = self.turn_starts[len(turn_starts)][1] if len(turn_starts) < len(self.turn_starts) else None
        messages = self.messages[:num_messages]
        states = [state for state in self.states if state[1] <= num_tokens]
        chain = chain_of([{"role": "", "content": f"cut short to {num_tokens} tokens"}], self.chain)
        if num_tokens == len(self.token_ids):
            chain = self.chain
        elif states and states[-1][1] == num_tokens:
            chain = states[-1][0]
        elif not num_tokens and not self.num_dropped:
            chain = chain_of(messages, self.first_chain)
        return dataclasses.replace(
            self.with_kv_of(num_tokens),
            token_ids=self.token_ids[:num_tokens],
            messages=messages,
            chain=chain,
            states=states,
            responses=[each for each in self.responses if each[1] in dict(states)],
            turn_starts=turn_starts,
            borrowed=self.borrowed if num_tokens == len(self.token_ids) else None,
            attention=self.attention[:num_tokens],
            num_slid=min(self.num_slid, num_tokens),
            generation=self.generation + 1,
            stem=object(),
        )

    def forked(self, num_tokens: int) -> Conversation:
        """What another conversation begins with that goes on behind the first `num_tokens` tokens of this one.

        Nothing of its KV is marked: it is to be what computing these tokens gives.
        """
        unmarked: dict[str, Any] = {"lineage": 0, "num_slid": 0, "num_to_repair": 0, "attention": [], "to_drift": []}
        return dataclasses.replace(self.take(num_tokens), **unmarked, reached="", responses=[], kept="")

    def without_response(self, response_id: str, *, takes_turn: bool) -> Conversation:
        """The same without a turn that is found by an id; where nothing is left, without tokens.

        Args:
          response_id: that id.
          takes_turn: whether the last turns leave too as far as they were deleted. Others stay: turns behind them do.
        """
        responses = [(name, chain, "" if name == response_id else kept) for name, chain, kept in self.responses]
        deleted = {chain for _, chain, kept in responses if not kept}
        ends = [num_tokens for chain, num_tokens in self.states if chain not in deleted]
        left = dataclasses.replace(self, responses=responses, generation=self.generation + 1, stem=object())
        is_last = bool(self.states) and self.states[-1][0] in deleted
        return left.take(max(ends, default=0)) if takes_turn and is_last else left

    def with_repair(self, num_tokens: int, *, drifts: bool) -> Conversation:
        """The same, the KV of whose first tokens the next prefill repairs; by their drift too, if they drifted."""
        to_drift = [*self.to_drift, num_tokens] if drifts and num_tokens else self.to_drift
        return dataclasses.replace(self, num_to_repair=num_tokens, to_drift=to_drift)

    def with_kv_of(self, num_tokens: int) -> Conversation:
        """The same, of which no more tokens have KV from before a cut: what is behind them is computed anew."""
        return dataclasses.replace(
            self,
            num_to_repair=min(self.num_to_repair, num_tokens),
            to_drift=[min(each, num_tokens) for each in self.to_drift] if num_tokens else [],
        )

    def cut(self, discarded: np.ndarray, *, others: np.ndarray | None = None, by: str = OTHERWISE) -> Conversation:
        """What is left without some tokens.

        A turn of which nothing is left but what is before the first token that leaves loses its messages too.

        Args:
          discarded: bool `[T]`, True where a token leaves; the first `num_slid` leave in any case, having no KV.
          others: the same for the tokens of a turn that runs, which are not of the conversation yet.
          by: the rule that says which leave, if the messages alone say it to the rule.
        """
        discarded = discarded | (np.arange(len(discarded)) < self.num_slid)
        everything = discarded if others is None else np.concatenate([discarded, others])
        left = np.flatnonzero(~everything)
        kept = np.flatnonzero(~discarded)
        first_gone = int(discarded.argmax()) if discarded.any() else len(discarded)
        num_before = np.concatenate([[0], np.cumsum(~discarded)])
        bounds = [*self.turn_starts, (len(self.token_ids), len(self.messages))]
        messages, turn_starts = self.messages[: bounds[0][1]], []
        for (start, first_message), (stop, end_message) in itertools.pairwise(bounds):
            if stop <= first_gone or num_before[max(start, first_gone)] < num_before[stop]:
                turn_starts.append((int(num_before[start]), len(messages)))
                messages = messages + self.messages[first_message:end_message]
        return Conversation(
            token_ids=[self.token_ids[i] for i in kept],
            messages=messages,
            chain=self.chain,
            cut_by=by if self.cut_by in ("", by) else OTHERWISE,
            reached=self.reached,
            kept=self.kept,
            adapter=self.adapter,
            adapter_weights=self.adapter_weights,
            generation=self.generation + 1,
            turn_starts=turn_starts,
            num_dropped=self.num_dropped + int(everything.sum()),
            lineage=self.lineage + int(everything[: left[-1]].sum() if len(left) else 0),
            attention=padded(self.attention, len(discarded))[kept].tolist() if self.attention else [],
            num_to_repair=int((~everything[: self.num_to_repair]).sum()),
            to_drift=[num_left for each in self.to_drift if (num_left := int((~everything[:each]).sum()))],
        )

    def to_bytes(self) -> bytes:
        """As compressed JSON, lists of numbers packed: of 12,800 tokens in under a millisecond."""
        return zlib.compress(self._packed({}), level=1)

    def added_to(self, before: Conversation) -> bytes | None:
        """What this one adds to an earlier state, to go behind the bytes of that; takes as long as that is large.

        Args:
          before: the earlier state.

        Returns:
          A line of JSON. None where it is no addition: tokens or messages of `before` are gone, or attention is
          measured, which changes for all tokens.
        """
        num_before = {name: len(getattr(before, name)) for name in _GROWING}
        grows = all(len(getattr(self, name)) >= num for name, num in num_before.items())
        if self.stem is not before.stem or not grows or self.attention:
            return None
        return self._packed(num_before) + b"\n"

    def _packed(self, num_before: dict[str, int]) -> bytes:
        """As JSON, without the first ones of the lists that grow."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in _OF_PROCESS)
        fields = {name: getattr(self, name) for name in names}
        fields |= {name: fields[name][num:] for name, num in num_before.items()}
        for name, dtype in _PACKED.items():
            fields[name] = base64.b64encode(np.array(fields[name], dtype).tobytes()).decode("ascii")
        if not self.adapter:
            fields = {name: value for name, value in fields.items() if name not in _OF_ADAPTER}
        if not self.responses:  # As it was before there were any.
            fields = {name: value for name, value in fields.items() if name != "responses"}
            num_before = {name: num for name, num in num_before.items() if name != "responses"}
        if not self.kept:
            del fields["kept"]
        format_ = _ADAPTED_FORMAT if self.adapter else _FORMAT
        if any(name in message for message in fields["messages"] for name in _EXTRAS):
            format_ = _EXTENDED_FORMAT
        return json.dumps({"format": format_, "behind": num_before, **fields}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Conversation:
        """What `to_bytes` gave, with what `added_to` gave behind it, in order.

        Raises:
          ValueError: the bytes are others, or of another version.
        """
        try:
            unpacker = zlib.decompressobj()
            whole = unpacker.decompress(data)
            if not unpacker.eof:
                raise ValueError("a conversation must be there whole, got it cut short")
            fields: dict[str, Any] = {}
            for part in (whole, *unpacker.unused_data.splitlines()):
                _add(fields, json.loads(part))
            if not np.isfinite(fields["attention"]).all():
                raise ValueError("attention must be finite numbers, got others")
            messages = [_message(each) for each in fields["messages"]]
            if fields["format"] < _CHAINED_FORMAT:
                fields |= _without_contexts(fields, messages)
            plain: dict[str, Any] = {name: fields[name] for name in _PACKED}
            plain |= {name: int(fields[name]) for name in ("lineage", "num_dropped", "num_slid", "num_to_repair")}
            plain |= {name: str(fields[name]) for name in ("chain", "cut_by", "reached")}
            has_adapter = fields["format"] == _ADAPTED_FORMAT or "adapter" in fields
            plain |= {name: str(fields[name]) for name in _OF_ADAPTER if has_adapter}
            return cls(
                messages=messages,
                kept=str(fields.get("kept", "")),
                turn_starts=[(int(tokens), int(messages)) for tokens, messages in fields["turn_starts"]],
                to_drift=[int(num_tokens) for num_tokens in fields["to_drift"]],
                states=[(str(chain), int(tokens)) for chain, tokens in fields["states"]],
                responses=[(str(name), str(chain), str(kept)) for name, chain, kept in fields["responses"]],
                generation=int(fields.get("generation", 0)),
                **plain,
            )
        except (zlib.error, KeyError, TypeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the bytes must be a conversation, got {len(data)} other bytes: {error}") from error


def _add(fields: dict[str, Any], part: dict[str, Any]) -> None:
    """Puts what a part says of a conversation behind what those before it have said."""
    if part["format"] not in _READABLE:
        raise ValueError(f"a conversation must be of format {_FORMAT}, got {part['format']!r}")
    if part.pop("positions", ""):  # Up to format 5.
        raise ValueError("a conversation's keys must be used at their places, got one that was truncated naively")
    for name, dtype in _PACKED.items():
        part[name] = np.frombuffer(base64.b64decode(part[name], validate=True), dtype).tolist()
    behind = part.get("behind") or {}
    behind.pop("positions", None)
    part.setdefault("responses", [])
    if fields:
        behind.setdefault("responses", len(fields["responses"]))
    if behind != {name: len(fields[name]) for name in _GROWING if name in fields}:
        raise ValueError(f"an addition must come behind what is there, got one behind {behind}")
    for name in behind:
        fields[name] += part.pop(name)
    fields.update(part)


def as_messages(new: str | Sequence[Message]) -> list[Message]:
    """Messages of a turn: where it is one text, the user's."""
    return [{"role": "user", "content": new}] if isinstance(new, str) else list(new)


def chain_of(messages: Sequence[Message], chain: str = "") -> str:
    """A name for messages, in order, behind those that `chain` names: 32 hex digits of SHA-256 over name and message.

    Equal names mean equal messages from the first on, character by character, with equal tools and calls of them, and
    equal contexts, chunk by chunk; a chunk of ids is another than a chunk of their text. Arguments of calls are equal
    if they are the same JSON.
    """
    for message in messages:
        context = [message["context"]] if "context" in message else []
        extras = {name: _meaning(message[name]) for name in _EXTRAS if name in message}
        said = json.dumps([chain, message["role"], message["content"], *context, *([extras] if extras else [])])
        chain = hashlib.sha256(said.encode()).hexdigest()[:32]
    return chain


def _meaning(value: Any) -> Any:
    """A part of a message in which arguments of calls are told by what they are, however they are written."""
    if isinstance(value, list):
        return [_meaning(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    told = {name: _meaning(each) for name, each in value.items()}
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        told |= {"arguments": json.loads(value["arguments"])} if "arguments" in value else {}
    return told


def message_chars(messages: Sequence[Message]) -> int:
    """Characters in messages, their contexts, tools and calls; token ids count none."""
    return sum(_num_chars(value) for each in messages for name, value in each.items() if name != "role")


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.keys())) + sum(map(_num_chars, value.values()))
    return 0 if not isinstance(value, list) or (value and isinstance(value[0], int)) else sum(map(_num_chars, value))


def first_chain(adapter: str = "", adapter_weights: str = "") -> str:
    """The chain of a conversation before anything is said: empty, but where it is held with an adapter."""
    return chain_of([{"role": "", "content": f"adapter {adapter_weights} {adapter}"}]) if adapter else ""


def _message(read: Mapping[str, Any]) -> Message:
    message: Message = {"role": str(read["role"]), "content": str(read["content"])}
    if "context" in read:
        message["context"] = [each if isinstance(each, str) else list(map(int, each)) for each in read["context"]]
    message |= {name: read[name] for name in _EXTRAS if name in read}
    return message


def _without_contexts(fields: Mapping[str, Any], messages: Sequence[Message]) -> dict[str, Any]:
    """What a conversation of format 3 or 4, whose chain left contexts out, has of the newer fields.

    No history finds it as it is. Where its messages do not prove that it has no context, its chain names no messages,
    so that no history finds it later either.
    """
    chain = str(fields.get("chain", chain_of(messages)))
    if fields["num_dropped"] or chain != chain_of(messages):
        chain = chain_of([{"role": "", "content": "kept before contexts were part of a chain"}], chain)
    return {"chain": chain, "states": [], "cut_by": OTHERWISE if fields["num_dropped"] else "", "reached": ""}


def padded(attention: npt.ArrayLike, num_tokens: int) -> np.ndarray:
    """What tokens received, f32 `[num_tokens]`: none where nothing is known."""
    known = np.asarray(attention, np.float32)
    return np.concatenate([known, np.zeros(max(num_tokens - len(known), 0), np.float32)])[:num_tokens]
