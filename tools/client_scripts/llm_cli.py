"""llm: a model of `extra-openai-models.yaml`, asked on the command line, then gone on with."""

import os
import pathlib
import subprocess
import sys
import tempfile

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    told = f"- model_id: served\n  model_name: {model}\n  api_base: {url}/v1\n"
    (pathlib.Path(folder) / "extra-openai-models.yaml").write_text(told)
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    for words in (["Who wrote Faust?"], ["-c", "When?"], ["--no-stream", "Who wrote Emma?"]):
        command = [sys.executable, "-m", "llm", "-m", "served", "-o", "max_tokens", "16", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        print("$ llm", *command[3:], "\n" + done.stdout + done.stderr)
        if done.returncode or not done.stdout.strip():
            sys.exit("llm must print an answer")
