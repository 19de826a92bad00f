#!/bin/sh
# Measures all of results/server.md again: what HTTP adds, many clients, the side channel, load generators, fuzzing.
#
#   tools/server.sh [TASK...]
#
# Tasks: overhead, soak, side_channel, load, fuzz, page; all by default. Let nothing else run meanwhile. Half an hour on 2
# CPU cores. load wants $GUIDELLM and $AIPERF, fuzz wants $SCHEMATHESIS: executables of environments of their own.
set -eu
tasks=${*:-overhead soak side_channel load fuzz page}
python=${PYTHON:-.venv/bin/python}
out=results/server
mkdir -p "$out"

for task in $tasks; do
    case $task in
    overhead) "$python" -m tools.server_overhead --json_out="$out/overhead.json" ;;
    soak) "$python" -m tools.server_soak --json_out="$out/soak.json" --plot_out="$out/soak.png" ;;
    side_channel) "$python" -m tools.side_channel --json_out="$out/side_channel.json" ;;
    load) "$python" -m tools.load_generators ;;
    fuzz) "$python" -m tools.fuzz_server --schemathesis="${SCHEMATHESIS:-schemathesis}" --json_out="$out/fuzz.json" ;;
    page) "$python" -m tools.server_page ;;
    *)
        echo "wanted overhead, soak, side_channel, load, fuzz or page, found $task" >&2
        exit 2
        ;;
    esac
done
