"""The terminal chat: commands, errors that do not end it, and Ctrl-C, in the process and as a program."""

import fcntl
import io
import os
import re
import signal
import subprocess
import sys

import pytest
import rich.console

from ca_jax import BlendConfig, Engine, EngineConfig, FinishReason, OverflowConfig, SamplingParams, StoreConfig
from ca_jax.errors import ContextWindowError
from ca_jax.launch.chat import COMMANDS, Chat
from ca_jax.launch.chat_input import lines_of

MAX_TOKENS = 12


class Terminal(io.StringIO):
    """Where a chat prints; once armed, the next write is followed by Ctrl-C."""

    armed = False

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.armed and text.strip():
            self.armed = False
            signal.raise_signal(signal.SIGINT)
        return written


class User:
    """Types lines; at `interrupt_at` (by index) Ctrl-C falls into the answer, at `None` lines into the prompt.

    What can be called is called before the next line is typed.
    """

    def __init__(self, *lines, interrupt_at=None):
        self.terminal = Terminal()
        self._lines = list(enumerate(lines))
        self._interrupt_at = interrupt_at

    def __call__(self):
        while self._lines and callable(self._lines[0][1]):
            self._lines.pop(0)[1]()
        if not self._lines:
            raise EOFError
        index, line = self._lines.pop(0)
        if line is None:
            raise KeyboardInterrupt
        self.terminal.armed = index == self._interrupt_at
        return line


def chat_of(engine, user, max_tokens=MAX_TOKENS, **options):
    console = rich.console.Console(file=user.terminal, width=120)
    sampling = SamplingParams(max_tokens=max_tokens)
    return Chat(engine, read_line=user, console=console, sampling=sampling, **options)


def small_engine(tiny_model, **changes):
    store = StoreConfig(dram_gib=1 / 64)
    config = {"context_window": 512, "max_batch_size": 1, "compile_cache_dir": None, "store": store, **changes}
    return Engine.from_pretrained(str(tiny_model), EngineConfig(**config))


def talk(engine, *lines, **options):
    """Runs a chat to its end: the chat, and what it printed."""
    user = User(*lines)
    chat = chat_of(engine, user, **options)
    chat.run()
    return chat, user.terminal.getvalue()


def roles(session):
    return [message["role"] for message in session.messages]


def test_each_answer_is_followed_by_what_it_took(engine):
    chat, output = talk(engine, "Who wrote Faust?", "When?")
    usage = chat.session.usage
    assert roles(chat.session) == ["user", "assistant"] * 2
    first, second = re.findall(r"cached (\d+) of (\d+) prompt tokens", output)
    assert first[0] == "0"
    assert second == (str(usage.num_cached_tokens), str(usage.prompt_tokens))
    assert usage.num_cached_tokens == int(first[1]) + MAX_TOKENS - 1
    assert f"(dram {usage.num_cached_tokens})" in output
    assert f"new {usage.new_tokens} · answer {MAX_TOKENS} · decode" in output
    assert output.count("TTFT") == 2


def test_messages_go_to_the_conversation_switched_to(engine):
    chat, output = talk(
        engine, "first", "/new Be rude.", "second", "/sessions", "/switch 1", "third", system="Be kind."
    )
    assert [m["content"] for m in chat.session.messages if m["role"] == "user"] == ["first", "third"]
    assert chat.session.messages[0] == {"role": "system", "content": "Be kind."}
    other = next(s for s in engine.sessions if s.messages[0]["content"] == "Be rude.")
    assert roles(other) == ["system", "user", "assistant"]
    listed = [line.split() for line in output.splitlines() if line.strip().startswith(("1 ", "* 2 "))]
    assert listed == [
        ["1", "first", "1", listed[0][-2], "0"],
        ["*", "2", "second", "1", str(len(other.token_ids)), "0"],
    ]


def test_stats_and_help_say_what_there_is(engine):
    _, output = talk(engine, "hello", "/stats", "/help")
    assert f"generated tokens      {engine.metrics.completion_tokens}" in output
    assert f"({engine.store_stats().num_evictions} evicted)" in output
    assert all(re.search(rf"^{command} ", output, re.MULTILINE) for command in COMMANDS)


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
    assert [m["content"] for m in chat.session.messages if m["role"] == "user"] == ["hello", "again"]
    assert chat.session.usage.num_cached_tokens > 0


def long_message(number):
    """About a third of the window."""
    return f"message {number} " + "and so on " * 14


def test_it_is_shown_when_the_context_was_full(engine):
    turns = [long_message(number) for number in range(1, 5)]
    truncations = engine.metrics.truncations
    chat, output = talk(engine, *turns, "/sessions", "/stats")
    dropped = [
        re.search(r" · context full: dropped the oldest (\d+) tokens \((\d) turns?\)$", line)
        for line in output.splitlines()
        if line.startswith(("TTFT", "cut short"))
    ]
    assert [found is not None for found in dropped] == [False, False, True, False]
    assert (int(dropped[2][1]), int(dropped[2][2])) == (256, 1)
    assert chat.session.num_dropped == 256
    assert [m["content"] for m in chat.session.messages if m["role"] == "user"] == [turn.strip() for turn in turns[1:]]
    listed = next(line.split() for line in output.splitlines() if line.startswith("* 1 "))
    assert listed[-3:] == ["3", str(len(chat.session.token_ids)), "256"]
    metrics = engine.metrics
    assert metrics.truncations == truncations + 1
    shown = f"{metrics.dropped_tokens:,} in {metrics.truncations} truncations"
    assert re.search(rf"^dropped tokens +{shown} *$", output, re.MULTILINE)


def test_it_is_shown_when_the_context_filled_up_in_an_answer(engine):
    chat, output = talk(engine, long_message(1), "go on", max_tokens=200)
    (dropped,) = re.findall(
        r"^cut short · .*answer 200.* · context full: dropped the oldest (\d+) tokens", output, re.M
    )
    assert chat.session.usage.dropped_tokens == chat.session.num_dropped == int(dropped) == 256
    assert roles(chat.session)[-2:] == ["user", "assistant"]


def test_tokens_that_are_not_the_oldest_are_not_said_to_be(tiny_model):
    with small_engine(tiny_model, overflow=OverflowConfig(discarder="sinks", keep_first_tokens=0)) as engine:
        _, output = talk(engine, *(long_message(number) for number in range(3)))
    assert re.findall(r" · (context full: .*)$", output, re.MULTILINE) == ["context full: dropped 256 tokens (1 turn)"]


def test_the_oldest_turns_are_forgotten(engine):
    lengths = []
    chat, user = None, User("first", "second", "third", "/forget 2", lambda: lengths.append(starts()), "fourth")

    def starts():
        return len(chat.session.token_ids), chat.session.conversation.turn_starts

    chat = chat_of(engine, user)
    chat.run()
    output = user.terminal.getvalue()
    num_dropped, num_left = map(
        int, re.search(r"^dropped (\d+) tokens, (\d+) are left$", output, re.MULTILINE).groups()
    )
    assert lengths == [(num_left, [(4, 0)])]
    assert chat.session.num_dropped == num_dropped
    assert [m["content"] for m in chat.session.messages if m["role"] == "user"] == ["third", "fourth"]
    assert chat.session.usage.num_cached_tokens == num_left - 1  # What is left is used as it is stored.
    assert chat.session.usage.dropped_tokens == 0
    assert "context full" not in output


@pytest.mark.parametrize("line", ["/forget", "/forget 0", "/forget 3", "/forget -1", "/forget all"])
def test_only_turns_before_the_last_can_be_forgotten(engine, line):
    chat, output = talk(engine, "first", "second", "third", line)
    argument = line.partition(" ")[2]
    assert f"error: /forget must be given how many of the oldest turns to drop, 1 to 2; got {argument!r}" in output
    assert chat.session.num_dropped == 0


@pytest.mark.parametrize("line", ["/pin", "/unpin", "/drop"])
def test_what_is_not_stored_cannot_be_pinned_or_dropped(engine, line):
    chat, output = talk(engine, line, "hello")
    assert re.search(rf"error: .*'{chat.session.session_id}'", output)
    assert chat.session.usage is not None


def ssd_engine(tiny_model, directory):
    store = StoreConfig(dram_gib=1 / 64, ssd_dir=str(directory), ssd_gib=1 / 64, ssd_free_floor_gib=0.0)
    return small_engine(tiny_model, store=store)


def test_a_conversation_is_gone_on_with_by_its_name(tiny_model, tmp_path):
    with ssd_engine(tiny_model, tmp_path) as engine:
        chat, output = talk(engine, "hello", "more", "/new", system="Be kind.", session_id="my trip")
        known = len(chat._sessions[0].token_ids)
    assert "goes on" not in output
    assert re.findall("^kept: .*", output, re.MULTILINE) == ["kept: hello · --session_id='my trip'"]
    with ssd_engine(tiny_model, tmp_path) as engine:
        chat, output = talk(engine, "again", system="Be rude.", session_id="my trip")
        assert engine.store_stats().ssd.num_fetches == 1
    assert f"session my trip goes on: {known} tokens, 5 messages" in output
    assert chat.session.messages[0] == {"role": "system", "content": "Be kind."}
    assert roles(chat.session) == ["system"] + ["user", "assistant"] * 3
    assert chat.session.usage.cached_tokens == {"ssd": known - 1}
    assert f"(ssd {known - 1})" in output


def test_what_is_stored_is_listed_pinned_and_dropped(tiny_model, tmp_path):
    pinned = []

    def look():
        engine.wait_for_saves()
        pinned.append({info.session_id: info.pinned for info in engine.stored.list()})

    with ssd_engine(tiny_model, tmp_path) as engine:
        lines = ("/stored", "hello", look, "/pin", look, "/stored", "/stats", "/unpin", look, "/drop", look, "/stored")
        chat, output = talk(engine, *lines, session_id="[b]one[/b]")
        assert engine.store_stats().ssd.num_sessions == 0
    assert pinned == [{"[b]one[/b]": False}, {"[b]one[/b]": True}, {"[b]one[/b]": False}, {}]
    listed = [line.split() for line in output.splitlines() if line.startswith("*")]
    assert len(listed) == 1
    assert listed[0][:4] == ["*", "[b]one[/b]", str(len(chat.session.token_ids) - 1), "dram"]
    assert (listed[0][5], listed[0][-1]) == ("kB", "yes")
    assert output.count("nothing is stored\n") == 2
    assert re.search(r"^conversations on SSD +1 \(0 evicted\)", output, re.MULTILINE)
    assert re.search(r"^writes to SSD +[1-9]\d*, [\d.]+ kB; failed: none", output, re.MULTILINE)
    assert output.splitlines()[-1] == "not kept: hello"


def test_a_context_stands_in_front_of_the_first_message_that_is_sent(tiny_model, tmp_path):
    context = ["The sky is green.", "Grass is blue."]
    with ssd_engine(tiny_model, tmp_path) as engine:
        chat, output = talk(engine, "  ", "Which is green?", "/new", "And now?", context=context)
        assert engine.metrics.computed_chunks == 2
    assert re.findall(r"^context: .*", output, re.MULTILINE)[0].startswith(
        "context: 2 chunks in front of the next message · 2 computed now, in "
    )
    first, second = (session.messages for session in chat._sessions)
    assert first[0] == {"role": "user", "content": "Which is green?", "context": context}
    assert second[0]["content"] == "And now?"
    assert " · recomputed " in output
    assert "missed chunks" not in output
    with ssd_engine(tiny_model, tmp_path) as engine:
        _, output = talk(engine, "Which is green?", context=context[::-1])
        assert engine.metrics.computed_chunks == 0
    assert "context: 2 chunks in front of the next message · 0 computed now" in output


def test_a_context_whose_kv_is_not_used_by_chunk_is_not_computed_by_chunk(tiny_model):
    with small_engine(tiny_model, blend=BlendConfig(mode="prefix")) as engine:
        chat, output = talk(engine, "Which is green?", context=["The sky is green."])
        assert engine.metrics.computed_chunks == 0
    assert "context: 1 chunks in front of the next message\n" in output
    assert chat.session.messages[0] == {
        "role": "user",
        "content": "Which is green?",
        "context": ["The sky is green."],
    }


def test_a_context_too_long_for_the_window_ends_the_chat_before_it_begins(engine):
    with pytest.raises(ContextWindowError, match="chunk 1 of 1"):
        talk(engine, "hello", context=["long " * 200])


def test_ctrl_c_stops_the_answer_and_keeps_its_part(engine):
    user = User("tell me", "go on", interrupt_at=0)
    chat = chat_of(engine, user, max_tokens=200)
    handler = signal.getsignal(signal.SIGINT)
    reasons = []
    adopt = chat.session.adopt

    def note(job, reason):
        adopt(job, reason)
        reasons.append((reason, len(job.output_ids), job.output.text))

    chat.session.adopt = note
    chat.run()
    (first_reason, first_tokens, first_text), (second_reason, second_tokens, _) = reasons
    assert first_reason is FinishReason.CANCELLED
    assert 0 < first_tokens < 200
    assert (second_reason, second_tokens) == (FinishReason.LENGTH, 200)
    assert chat.session.messages[1] == {"role": "assistant", "content": first_text}
    assert "stopped · TTFT" in user.terminal.getvalue()
    assert chat.session.usage.num_cached_tokens > 0
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_at_the_prompt_does_not_end_the_chat(engine):
    chat, output = talk(engine, None, "hello")
    assert "nothing to stop" in output
    assert roles(chat.session) == ["user", "assistant"]


def test_lines_of_a_stream_are_echoed():
    output = io.StringIO()
    read_line = lines_of(io.StringIO("one\n[b]two[/b]"), rich.console.Console(file=output, width=10))
    assert [read_line().strip(), read_line()] == ["one", "[b]two[/b]"]
    with pytest.raises(EOFError):
        read_line()
    assert output.getvalue() == "> one\n> [b]two[/b]\n"


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="wants a pipe whose size can be set")
def test_the_program_outlives_ctrl_c_in_an_answer(tiny_model, tmp_path):
    """The answer is longer than the pipe, so that the program cannot be done with it before the signal comes."""
    command = [sys.executable, "-m", "ca_jax.launch.chat", f"--model={tiny_model}", "--dram_gib=0.05"]
    command += ["--context_window=8192", "--max_tokens=8000"]
    environment = os.environ | {"PYTHONUTF8": "1", "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, bufsize=0
    ) as program:
        fcntl.fcntl(program.stdout, fcntl.F_SETPIPE_SZ, 4096)
        program.stdin.write(b"tell me\n/sessions\n/quit\n")
        seen = b""
        while not re.search(rb"> tell me\n.", seen, re.DOTALL):
            chunk = program.stdout.read(256)
            assert chunk, program.stderr.read().decode()
            seen += chunk
        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate(timeout=120)
    output = (seen + rest).decode()
    assert program.returncode == 0, errors.decode()
    resolved = r"^EngineConfig\(dtype='float32', .*\bcontext_window=8192, .*\bmax_batch_size=1,"
    assert re.search(resolved, output, re.MULTILINE)
    assert "max_tokens=8000" in output
    stopped = re.search(r"^stopped · TTFT .* answer ([\d,]+)", output, re.MULTILINE)
    assert stopped is not None, output[-2000:]
    assert int(stopped[1].replace(",", "")) < 8000
    assert re.search(r"^\* 1 +tell me +1 ", output, re.MULTILINE)
    assert "reading weights" in errors.decode()


def program(*flags, said="", cache=None):
    """Runs the program over these lines."""
    environment = os.environ | {"PYTHONUTF8": "1", "JAX_PLATFORMS": "cpu"}
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "ca_jax.launch.chat", *flags]
    return subprocess.run(command, input=said, capture_output=True, encoding="utf-8", env=environment, timeout=120)


def test_the_program_goes_on_where_it_left_off(tiny_model, tmp_path):
    flags = (f"--ssd-dir={tmp_path / 'store'}", "--session_id=trip", "--dram_gib=0.02", "--ssd_gib=0.02")
    flags += (f"--model={tiny_model}", "--max-tokens=4", "--ssd_free_floor_gib=0", "--no-recompute-if-faster")
    first, second = (program(*flags, said=f"{line}\n", cache=tmp_path / "xla") for line in ("hello", "more"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "kept: hello · --session_id=trip" in first.stdout
    goes_on = re.search(r"^session trip goes on: (\d+) tokens, 2 messages$", second.stdout, re.MULTILINE)
    assert f"(ssd {int(goes_on[1]) - 1})" in second.stdout


def test_the_program_answers_from_the_chunks_of_a_file(tiny_model, tmp_path):
    text = tmp_path / "passages.txt"
    text.write_text("The sky is green.\n---\nGrass is blue.\n---\n\n", encoding="utf-8")
    flags = (f"--model={tiny_model}", "--max_tokens=4", f"--context_file={text}", "--dram_gib=0.02")
    done = program(*flags, "--blend_recompute_ratio=0.5", said="Which is green?\n", cache=tmp_path / "xla")
    assert done.returncode == 0, done.stderr
    assert "BlendConfig(mode='blend', recompute_ratio=0.5," in done.stdout
    assert "context: 2 chunks in front of the next message · 2 computed now, in " in done.stdout
    assert re.search(r"TTFT .* · cached 35 of \d+ prompt tokens .* · recomputed \d+ · ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--model=nonesuch", "unknown model 'nonesuch'"),
        ("--max_tokens=0", "max_tokens"),
        ("--ssd_driver=nonesuch", "ssd_driver"),
        ("--truncation_ratio=0", "truncation_ratio"),
    ],
)
def test_the_program_says_what_is_wrong_with_its_flags(flag, message):
    done = program(flag)
    assert done.returncode == 1
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr
