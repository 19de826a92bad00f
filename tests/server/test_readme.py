"""What README.md has a reader send to a server is sent to one, as it stands there but for the address."""

import shlex
import subprocess
import sys

import pytest

from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server.test_tools import model_with
from tests.test_documents import REPOSITORY, blocks

README = REPOSITORY / "README.md"
ADDRESS = "http://127.0.0.1:8000"
PYTHON = [block for block in blocks(README, "python") if "client." in block]
CURL = [block for block in blocks(README, "bash") if block.startswith("curl")]


@pytest.fixture(scope="module")
def server():
    settings = {"served_model_name": "smollm2-135m-instruct"}
    with sk.running(server=settings, make_engine=lambda: kit.small_engine(model_with())) as running:
        yield running


def test_python_runs(server):
    assert len(PYTHON) >= 2
    script = "\n".join(PYTHON).replace(ADDRESS, server.url)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    held = [session.messages for session in server.engine.sessions]
    assert any([each["role"] for each in messages] == ["user", "assistant"] * 2 for messages in held)
    assert any("tool" in [each["role"] for each in messages] for messages in held), "the agent has called its tool"


def test_curl_is_answered(server):
    [block] = CURL
    _, url, *options = shlex.split(block.replace(ADDRESS, server.url))
    given = dict(zip(options[::2], options[1::2], strict=True))
    with server.http() as http:
        name, _, value = given["-H"].partition(": ")
        answer = http.post(url, content=given["-d"], headers={name: value})
    assert answer.json()["choices"][0]["message"]["content"]
