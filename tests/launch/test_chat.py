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

from ca_jax import FinishReason, SamplingParams
from ca_jax.launch.chat import COMMANDS, Chat, lines_of

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
    """Types lines; at `interrupt_at` (by index) Ctrl-C falls into the answer, at `None` lines into the prompt."""

    def __init__(self, *lines, interrupt_at=None):
        self.terminal = Terminal()
        self._lines = list(enumerate(lines))
        self._interrupt_at = interrupt_at

    def __call__(self):
        if not self._lines:
            raise EOFError
        index, line = self._lines.pop(0)
        if line is None:
            raise KeyboardInterrupt
        self.terminal.armed = index == self._interrupt_at
        return line


def chat_of(engine, user, max_tokens=MAX_TOKENS, system=None):
    console = rich.console.Console(file=user.terminal, width=120)
    sampling = SamplingParams(max_tokens=max_tokens)
    return Chat(engine, read_line=user, console=console, sampling=sampling, system=system)


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
    assert listed == [["1", "first", "1", listed[0][-1]], ["*", "2", "second", "1", str(len(other.token_ids))]]


def test_stats_and_help_say_what_there_is(engine):
    _, output = talk(engine, "hello", "/stats", "/help")
    assert f"generated tokens      {engine.metrics.completion_tokens}" in output
    assert f"({engine.store_stats().num_evictions} evicted)" in output
    assert all(re.search(rf"^{command} ", output, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/foo bar", "wanted one of /new, /sessions, /switch, /stats, /help, /quit; found /foo"),
        ("/switch 2", "/switch wanted the number of a conversation, 1 to 1; found '2'"),
        ("/switch", "found ''"),
        ("  ", "wanted a message with text in it, found a blank one"),
        ("long " * 200, "wanted a prompt under the context window of 512 tokens, found "),
    ],
)
def test_bad_input_is_said_and_the_chat_goes_on(engine, line, message):
    chat, output = talk(engine, "hello", line, "again")
    assert re.search(rf"error: .*{re.escape(message)}", output)
    assert [m["content"] for m in chat.session.messages if m["role"] == "user"] == ["hello", "again"]
    assert chat.session.usage.num_cached_tokens > 0


def test_quit_ends_the_chat_before_what_follows(engine):
    chat, output = talk(engine, "/quit", "hello")
    assert chat.session.messages == []
    assert "TTFT" not in output


def test_ctrl_c_stops_the_answer_and_keeps_its_part(engine):
    user = User("tell me", "go on", interrupt_at=0)
    chat = chat_of(engine, user, max_tokens=200)
    handler = signal.getsignal(signal.SIGINT)
    reasons = []
    adopt = chat.session.adopt

    def note(job):
        adopt(job)
        reasons.append((job.finish_reason, len(job.output_ids), job.output.text))

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
    assert "EngineConfig(dtype='float32', context_window=8192, max_batch_size=1" in output
    assert "max_tokens=8000" in output
    stopped = re.search(r"^stopped · TTFT .* answer ([\d,]+)", output, re.MULTILINE)
    assert stopped is not None, output[-2000:]
    assert int(stopped[1].replace(",", "")) < 8000
    assert re.search(r"^\* 1 +tell me +1 ", output, re.MULTILINE)
    assert "reading weights" in errors.decode()


def test_the_program_says_what_is_wrong_with_its_flags():
    for flag, message in (("--model=nonesuch", "unknown model 'nonesuch'"), ("--max_tokens=0", "max_tokens wanted")):
        command = [sys.executable, "-m", "ca_jax.launch.chat", flag]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert f"error: {message}" in done.stderr
        assert "Traceback" not in done.stderr
