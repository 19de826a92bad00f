"""The terminal chat: commands, errors, Ctrl-C, a file as context, processes; in the process and as a program."""

import contextlib
import dataclasses
import io
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import rich.console

from ca_jax import SamplingParams
from ca_jax.errors import ContextWindowError, EmptyMessageError, InvalidRequestError
from ca_jax.launch.chat import COMMANDS, Chat, context_chunks, join_processes
from tests import engine_kit as kit
from tests.scripts_kit import run_script

MAX_TOKENS = 12


class User:
    """Types lines. What can be called is called before the next line is typed."""

    def __init__(self, *lines):
        self.terminal = io.StringIO()
        self._lines = list(lines)

    def __call__(self):
        while self._lines and callable(self._lines[0]):
            self._lines.pop(0)()
        if not self._lines:
            raise EOFError
        return self._lines.pop(0)


def chat_of(engine, user, max_tokens=MAX_TOKENS, context=(), **session):
    console = rich.console.Console(file=user.terminal, width=120)
    chat = Chat(engine, user, console, SamplingParams(max_tokens=max_tokens), context=context)
    chat.begin(**session)
    return chat


def talk(engine, *lines, **options):
    """Runs a chat to its end: the chat, and what it printed."""
    user = User(*lines)
    chat = chat_of(engine, user, **options)
    chat.run()
    return chat, user.terminal.getvalue()


def roles(session):
    return [message["role"] for message in session.messages]


def said_in(session):
    return [message["content"] for message in session.messages if message["role"] == "user"]


def test_each_answer_is_followed_by_what_it_took(engine):
    handler = signal.getsignal(signal.SIGINT)
    chat, output = talk(engine, "Who wrote Faust?", "When?", "/stats", "/help")
    assert signal.getsignal(signal.SIGINT) is handler
    usage = chat.session.usage
    assert roles(chat.session) == ["user", "assistant"] * 2
    first, second = re.findall(r"cached (\d+) of (\d+) prompt tokens", output)
    assert second == (str(usage.num_cached_tokens), str(usage.prompt_tokens))
    assert usage.num_cached_tokens == int(first[1]) + MAX_TOKENS - 1
    assert f"generated tokens      {engine.metrics.completion_tokens:,}" in output
    assert all(re.search(rf"^{command} ", output, re.MULTILINE) for command in COMMANDS)


def test_messages_go_to_the_conversation_switched_to(engine):
    lines = "first", "/new Be rude.", "second", "/sessions", "/switch 1", "third"
    chat, output = talk(engine, *lines, system="Be kind.")
    assert said_in(chat.session) == ["first", "third"]
    assert chat.session.messages[0] == {"role": "system", "content": "Be kind."}
    other = next(s for s in engine.sessions if s.messages and s.messages[0]["content"] == "Be rude.")
    assert roles(other) == ["system", "user", "assistant"]
    listed = [line.split() for line in output.splitlines() if line.strip().startswith(("1 ", "* 2 "))]
    assert listed == [
        ["1", "first", "1", listed[0][-2], "0"],
        ["*", "2", "second", "1", str(len(other.token_ids)), "0"],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/foo bar", f"must be one of {', '.join(COMMANDS)}; got /foo"),
        ("/switch 2", "/switch must be given the number of a conversation, 1 to 1; got '2'"),
        ("/switch", "got ''"),
        ("/forget 1", "/forget must have a conversation of two turns or more: the last one stays"),
        ("  ", "blank"),
        ("long " * 200, "under the context window of 512 tokens, "),
    ],
)
def test_bad_input_is_said_and_the_chat_goes_on(engine, line, message):
    chat, output = talk(engine, "hello", line, "again")
    assert re.search(rf"error: .*{re.escape(message)}", output)
    assert said_in(chat.session) == ["hello", "again"]
    assert chat.session.usage.num_cached_tokens > 0


def long_message(number):
    """About a third of the window."""
    return f"message {number} " + "and so on " * 14


def test_it_is_shown_when_the_context_was_full(engine):
    turns = [long_message(number) for number in range(1, 5)]
    chat, output = talk(engine, *turns, "/stats")
    dropped = [
        re.search(r" · context full: dropped the oldest (\d+) tokens \((\d) turns?\)$", line)
        for line in output.splitlines()
        if line.startswith(("TTFT", "cut short"))
    ]
    assert [found is not None for found in dropped] == [False, False, True, False]
    assert (int(dropped[2][1]), int(dropped[2][2])) == (256, 1)
    assert chat.session.num_dropped == 256
    assert said_in(chat.session) == [turn.strip() for turn in turns[1:]]
    shown = f"{engine.metrics.dropped_tokens:,} in {engine.metrics.truncations} truncations"
    assert re.search(rf"^dropped tokens +{shown} *$", output, re.MULTILINE)


def test_the_oldest_turns_are_forgotten(engine):
    chat, output = talk(engine, "first", "second", "third", "/forget 2", "fourth")
    shown = re.search(r"^dropped (\d+) tokens, (\d+) are left$", output, re.MULTILINE)
    num_dropped, num_left = map(int, shown.groups())
    assert chat.session.num_dropped == num_dropped
    assert said_in(chat.session) == ["third", "fourth"]
    assert chat.session.usage.num_cached_tokens == num_left - 1  # What is left is used as it is stored.
    assert chat.session.usage.dropped_tokens == 0
    assert "context full" not in output


def ssd_engine(directory):
    return kit.small_engine(store=kit.ssd_store(directory))


def test_a_conversation_is_gone_on_with_by_its_name(tmp_path):
    with ssd_engine(tmp_path) as engine:
        chat, output = talk(engine, "hello", "more", "/new", system="Be kind.", session_id="my trip")
        known = len(chat._sessions[0].token_ids)
    assert "goes on" not in output
    assert re.findall("^kept: .*", output, re.MULTILINE) == ["kept: hello · --session_id='my trip'"]
    with ssd_engine(tmp_path) as engine:
        chat, output = talk(engine, "again", system="Be rude.", session_id="my trip")
    assert f"session my trip goes on: {known} tokens, 5 messages" in output
    assert chat.session.messages[0] == {"role": "system", "content": "Be kind."}
    assert roles(chat.session) == ["system"] + ["user", "assistant"] * 3
    assert chat.session.usage.cached_tokens == {"ssd": known - 1}


def test_what_is_stored_is_listed_pinned_and_dropped(tmp_path):
    pinned = []

    def look():
        engine.wait_for_saves()
        pinned.append({info.session_id: info.pinned for info in engine.stored.list()})

    with ssd_engine(tmp_path) as engine:
        lines = ("/stored", "hello", look, "/pin", look, "/stored", "/stats", "/unpin", look, "/drop", look, "/stored")
        chat, output = talk(engine, *lines, session_id="[b]one[/b]")
        assert engine.store_stats().ssd.num_sessions == 0
    assert pinned == [{"[b]one[/b]": False}, {"[b]one[/b]": True}, {"[b]one[/b]": False}, {}]
    listed = [line.split() for line in output.splitlines() if line.startswith("*")]
    assert len(listed) == 1
    assert listed[0][:4] == ["*", "[b]one[/b]", str(len(chat.session.token_ids) - 1), "dram"]
    assert (listed[0][5], listed[0][-1]) == ("kB", "yes")
    assert output.count("nothing is stored\n") == 2
    assert output.splitlines()[-1] == "not kept: hello"


def test_a_context_stands_in_front_of_the_first_message_that_is_sent(tmp_path):
    context = ["The sky is green.", "Grass is blue."]
    with ssd_engine(tmp_path) as engine:
        chat, output = talk(engine, "  ", "Which is green?", "/new", "And now?", context=context)
        assert engine.metrics.computed_chunks == 2
    assert "context: 2 chunks in front of the next message · 2 computed now, in " in output
    first, second = (session.messages for session in chat._sessions)
    assert first[0] == {"role": "user", "content": "Which is green?", "context": context}
    assert second[0]["content"] == "And now?"
    assert " · recomputed " in output
    assert "missed chunks" not in output
    with ssd_engine(tmp_path) as engine:
        _, output = talk(engine, "Which is green?", context=context[::-1])
        assert engine.metrics.computed_chunks == 0
    assert "context: 2 chunks in front of the next message · 0 computed now" in output


def test_a_context_too_long_for_the_window_ends_the_chat_before_it_begins(engine):
    with pytest.raises(ContextWindowError, match="chunk 1 of 1"):
        talk(engine, "hello", context=["long " * 200])


# The program.


@pytest.mark.timeout(120)
def test_the_program_on_a_terminal_outlives_ctrl_c_in_an_answer(tiny_model):
    """The answer is longer than a terminal holds unread, so that the program cannot be done with it before."""
    command = [sys.executable, "-m", "ca_jax.launch.chat", f"--model={tiny_model}", "--dram_gib=0.05"]
    command += ["--context_window=512", "--max_tokens=60000"]
    user, terminal = os.openpty()
    environment = os.environ | {"PYTHONUTF8": "1", "JAX_PLATFORMS": "cpu", "TERM": "dumb"}
    streams = {"stdin": terminal, "stdout": terminal, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **streams, env=environment, start_new_session=True) as program:
        os.close(terminal)
        seen = b""

        def read_until(pattern, presses=False):
            """With `presses` Ctrl-C is pressed until it comes: a prompt that is being drawn may miss it."""
            nonlocal seen
            give_up_s = time.monotonic() + 60
            while (found := re.search(pattern, seen, re.DOTALL)) is None:
                assert time.monotonic() < give_up_s, seen
                if select.select([user], [], [], 1)[0]:
                    seen += os.read(user, 256)
                elif presses:
                    program.send_signal(signal.SIGINT)
            seen = seen[found.end() :]

        read_until(rb"Ctrl-C stops an answer.*> ")
        os.write(user, b"tell me\r")
        read_until(rb"tell me.{300}")
        program.send_signal(signal.SIGINT)
        read_until(rb"stopped \xc2\xb7 TTFT .* answer ([\d,]+)")
        read_until(rb"> ")
        read_until(rb"nothing to stop.*> ", presses=True)
        os.write(user, b"/sessions\r")
        read_until(rb"\* 1 +tell me +1 ")
        read_until(rb"> ")
        os.write(user, b"/quit\r")
        with contextlib.suppress(OSError):  # The terminal is gone with the program.
            while os.read(user, 4096):
                pass
        _, errors = program.communicate(timeout=60)
    os.close(user)
    assert program.returncode == 0, errors.decode()
    assert "reading weights" in errors.decode()


def test_the_program_answers_from_the_chunks_of_a_file_and_goes_on_where_it_left_off(tiny_model, tmp_path):
    text = tmp_path / "passages.txt"
    text.write_text("The sky is green.\n---\nGrass is blue.\n---\n\n", encoding="utf-8")
    flags = [f"--model={tiny_model}", "--context_window=512", "--max-tokens=4", f"--ssd-dir={tmp_path / 'store'}"]
    flags += ["--session_id=trip", "--dram_gib=0.02", "--ssd_gib=0.02", "--ssd_free_floor_gib=0"]
    flags += ["--no-recompute-if-faster", "--blend_recompute_ratio=0.5"]
    first = run_script("chat", *flags, f"--context_file={text}", said="hello\n")
    second = run_script("chat", *flags, said="more\n")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    resolved = r"^EngineConfig\(dtype='float32', .*\bcontext_window=512, .*\bmax_batch_size=1,"
    assert re.search(resolved, first.out, re.MULTILINE)
    assert "max_tokens=4" in first.out
    assert "BlendConfig(mode='blend', recompute_ratio=0.5," in first.out
    assert "context: 2 chunks in front of the next message · 2 computed now, in " in first.out
    assert re.search(r"TTFT .* · cached 35 of \d+ prompt tokens .* · recomputed \d+ · ", first.out, re.MULTILINE)
    assert "kept: hello · --session_id=trip" in first.out
    goes_on = re.search(r"^session trip goes on: (\d+) tokens, 2 messages$", second.out, re.MULTILINE)
    assert f"(ssd {int(goes_on[1]) - 1})" in second.out


# A file as context, and processes that serve as one.


def chunks(path=None, model=None, **cut):
    return context_chunks(model or kit.tiny_model(), path, **cut)


@pytest.fixture
def file_of(tmp_path):
    def make(text: str | bytes) -> str:
        path = tmp_path / "context.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return make


@pytest.mark.parametrize(
    "text", ["one\n---\ntwo\n  more\n", "one\n\n---\n\ntwo\n  more", "one\r\n---\r\ntwo\r\n  more\r\n"]
)
def test_a_file_is_cut_at_lines_of_dashes(file_of, text):
    assert chunks(file_of(text)) == ["one", "two\n  more"]
    assert chunks() == []


def test_it_is_cut_where_it_is_said_to_be(file_of):
    path = file_of("one\n\ntwo\n---\n\n\nthree ## four")
    assert chunks(path, separator="##") == ["one\n\ntwo\n---\n\n\nthree ", " four"]
    assert chunks(path, separator=r"\n\n") == ["one", "two\n---", "three ## four"]
    assert chunks(path, separator="\n\n") == ["one", "two\n---", "three ## four"]
    assert [bytes(chunk) for chunk in chunks(file_of("one two\n"), num_tokens=3)] == [b"one", b" tw", b"o\n"]


@pytest.mark.parametrize(
    ("text", "cut", "error", "message"),
    [
        (" \n", {}, EmptyMessageError, "blank"),
        (" \n", {"num_tokens": 4}, EmptyMessageError, "at least one token"),
        ("a", {"separator": ""}, InvalidRequestError, "at least one character"),
        ("a", {"separator": "#", "num_tokens": 4}, ValueError, "chunk_separator or by chunk_tokens, got both"),
        (b"\xff\xfe", {}, ValueError, "context_file must be text in UTF-8, got other bytes in .*context.txt"),
        (None, {"num_tokens": 4}, ValueError, "must come with a context_file to cut, got none"),
    ],
)
def test_what_is_no_context_is_said(file_of, text, cut, error, message):
    with pytest.raises(error, match=message):
        chunks(None if text is None else file_of(text), **cut)
    with pytest.raises(FileNotFoundError, match="/nonesuch"):
        chunks("/nonesuch")


def test_tokens_of_a_model_without_tokenizer_cannot_be_counted(file_of):
    model = dataclasses.replace(kit.tiny_model(), tokenizer=None)
    with pytest.raises(InvalidRequestError, match="chunk_tokens must come with a model that has a tokenizer"):
        chunks(file_of("a"), model, num_tokens=4)


ADDRESS = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 2, None), "coordinator_address, num_processes, process_id must be given together, got num_proc"),
        ((ADDRESS, None, 0), "got coordinator_address, process_id alone"),
        ((ADDRESS, 2, 2), "process_id must be a number from 0 to 1, got 2"),
        ((ADDRESS, 0, 0), "num_processes must be at least 1, got 0"),
    ],
)
def test_processes_that_cannot_be_are_refused_before_anybody_is_waited_for(given, message):
    assert join_processes(None, None, None).count == 1
    with pytest.raises(ValueError, match=message):
        join_processes(*given)
