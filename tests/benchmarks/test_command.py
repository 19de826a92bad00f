"""What the commands of the benchmarks say is wrong, in a line."""

import json

import pytest

import ca_jax
from tests.benchmarks.traces_kit import lines_file
from tests.scripts_kit import run_script

REFUSED = [
    ("bench", "--suite=tiers --ssd_dir=/dev/null/below", "ssd_dir must be a directory"),
    ("bench", "--suite=tiers --peer=transformers", "peer must go with one of the suites reuse, prefill, decode, got"),
    ("bench", "--suite=reuse --peer=vllm", "value should be one of <transformers>"),
    ("bench", "--suite=reuse --history_tokens=9000", "no engine at this size"),
    ("bench", "--suite=reuse --trace_out=t.json", "trace_out must go with one of the suites throughput, ttft, got"),
    ("bench", "--suite=ttft --model_preset=llama2-7b", "model and model_preset must not both be given"),
    ("bench", "--suite=overflow --num_sessions=0 --plot_out=o.png", "plot_out must have num_sessions"),
    ("evaluate", "--task=ppl --data=text.txt --window=9000", "at most the model's 8192 tokens"),
    ("evaluate", "--task=chess", "value should be one of <ppl|longeval|mmlu|agreement|rag|blend_gate|kv_gate>"),
    ("evaluate", "--task=rag --data=none.json", "none.json: No such file"),
    ("replay", "--trace_format=mooncake --trace=unsorted.jsonl", "unsorted.jsonl, line 2: `timestamp`"),
    ("demo", "--sharegpt_file=said.json --conversation_id=nonesuch", "no conversation 'nonesuch'"),
    ("demo", "--sharegpt_file=said.json --conversation_id=silent", "must have at least 2 user turns"),
]


@pytest.mark.parametrize(("module", "line", "message"), REFUSED)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_written(
    tiny_model, tmp_path, monkeypatch, module, line, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A text that is too short. " * 4, encoding="utf-8")
    silent = [{"id": "silent_0", "conversations": [{"from": "gpt", "value": "Nobody asked."}]}]
    (tmp_path / "said.json").write_text(json.dumps(silent), encoding="utf-8")
    row = {"timestamp": 5, "input_length": 9, "output_length": 2, "hash_ids": [1]}
    lines_file(tmp_path / "unsorted.jsonl", row, {**row, "timestamp": 1})
    out = [] if module == "demo" else ["--json_out=out.json"]
    done = run_script(module, *line.split(), *out, f"--model={tiny_model}")
    assert done.code == 1
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    "line", ["bench", "demo", "evaluate", "gpu_bench", "replay", "tpu_bench", "simulate --figure=13"]
)
def test_a_package_without_its_checkout_says_where_benchmarks_are(tmp_path, monkeypatch, line):
    monkeypatch.setattr(ca_jax, "__file__", str(tmp_path / "ca_jax" / "__init__.py"))
    done = run_script(*line.split())
    assert done.code == 1
    assert done.err.startswith("error: the benchmarks are not part of the installed package: clone its repository")
    assert len(done.err.splitlines()) == 1
