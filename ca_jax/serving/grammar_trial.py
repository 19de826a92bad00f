"""Grammars tried in a process of their own, which is ended where one takes too long or too much memory.

llguidance bounds almost all of its work, but not how long it asks whether patterns that must all hold can: that is
exponential in how many there are. What compiles there compiles here in the same time.

Not here: grammars for answers (serving.grammars).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

TRIAL_S = 2.0
"""Most seconds that a grammar may take to compile."""
_START_S = 60.0  # Most that the process may take to begin.
_MOST_BYTES = 2 << 30  # Of its memory.
_PROGRAM = """
import json, resource, sys, llguidance
limits = llguidance.LLParserLimits(**json.loads(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
print(json.dumps(""), flush=True)
for line in sys.stdin:
    print(json.dumps(llguidance.LLMatcher.validate_grammar(json.loads(line), limits=limits)), flush=True)
"""


class Trial:
    """Tries grammars, one after the other. Threads may share it; each waits for those before it.

    Args:
      limits: llguidance's, of each.
    """

    def __init__(self, limits: Mapping[str, Any]) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wrong(self, grammar: str) -> str:
        """What is wrong with a grammar in llguidance's form; empty where nothing is."""
        with self._lock:
            process = self._running()
            with contextlib.suppress(OSError):  # It has ended.
                print(json.dumps(grammar), file=process.stdin, flush=True)
            try:
                answer = self._answers.get(timeout=TRIAL_S)
            except queue.Empty:
                answer = ""
            if not answer:
                self._end()
                return (
                    "it takes too long, or too much memory, to be compiled; fewer patterns that must all hold take less"
                )
            return str(json.loads(answer))

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            arguments = [sys.executable, "-c", _PROGRAM, json.dumps(self._limits), str(_MOST_BYTES)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            self._answers = queue.SimpleQueue()
            threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()
            atexit.register(self._end)
            self._answers.get(timeout=_START_S)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        atexit.unregister(self._end)
        if process is not None:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()


def _read(process: subprocess.Popen[str], answers: queue.SimpleQueue[str]) -> None:
    """Takes what a process says, and an empty line once it has ended."""
    if process.stdout is not None:
        with process.stdout as told:
            for line in told:
                answers.put(line)
    answers.put("")
