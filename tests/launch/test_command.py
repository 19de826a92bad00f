"""The console command: its version, the scripts that it runs, and flags that these would ignore, refused by name."""

import importlib.metadata
import subprocess
import sys

import pytest

from ca_jax.__main__ import COMMANDS, main
from ca_jax.launch.plots import PlotError, new_figure
from tests.scripts_kit import run_script


def test_the_command_has_a_version_and_runs_what_it_is_told_to(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ca_jax", "--version"])
    main()
    assert capsys.readouterr().out == f"ca_jax {importlib.metadata.version('ca-jax')}\n"
    monkeypatch.setattr(sys, "argv", ["ca_jax", "serv"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, "did you mean serve?" in capsys.readouterr().err) == (2, True)
    command = [sys.executable, "-m", "ca_jax", "plan", "--model_preset=llama2-70b", "--tensor_parallel_size=4"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "llama2-70b in bfloat16: 138.0 GB of weights" in ran.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("plan", [], "--model_preset must be one of"),
        ("plan", ["--model_preset=llama2-7b", "--eviction_policy=lru"], "--eviction_policy must be left out of a plan"),
        ("convert", ["--model=m", "--output_dir=d", "--dram_gib=1"], "--dram_gib must be left out of a conversion"),
        ("convert", ["--dry_run"], "--model_preset must be one of"),
        ("convert", ["--model=somewhere"], "must be --model and --output_dir"),
        ("convert", ["--dry_run", "--model=m"], "--model must be left out of a dry run"),
        ("chat", ["--model=nonesuch"], "error: unknown model 'nonesuch'"),
        ("chat", ["--max_tokens=0"], "error: max_tokens"),
    ],
)
def test_what_is_wrong_or_would_be_ignored_is_refused(script, arguments, message):
    ran = run_script(script, *arguments)
    assert ran.code == 1
    assert message in ran.out + ran.err


def test_only_a_figure_needs_matplotlib(monkeypatch):
    scripts = ", ".join(f"ca_jax.launch.{name}" for name in COMMANDS)
    code = f"import sys, {scripts}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"to draw figures: pip install 'ca-jax\[plot\]'"):
        new_figure(1, 1)
