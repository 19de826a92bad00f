#!/bin/sh
# Measures all of results/blend.md again: CacheBlend's figures, quality, time to the first token, throughput, the gate.
#
#   tools/blend.sh DATA [TASK...]    DATA has musique_first50.json; without it (""), texts are ShareGPT's conversations
#
# Tasks: quality, figures, gate, bench, page; all by default. Let nothing else run meanwhile. Hours on 2 CPU cores.
set -eu
data=${1:+--data=$1/musique_first50.json}
[ $# -eq 0 ] || shift
tasks=${*:-quality figures gate bench page}
python=${PYTHON:-.venv/bin/python}
out=results/blend
mkdir -p "$out" build/ssd

evaluate() { # name, flags
    name=$1
    shift
    "$python" -m ca_jax.launch.evaluate $data --json_out="$out/$name.json" "$@"
}

bench() { # suite, name of its figure
    "$python" -m ca_jax.launch.bench --suite="$1" $data --ssd_dir=build/ssd --json_out="results/bench_$1.json" \
        --plot_out="$out/$2.png"
}

for task in $tasks; do
    case $task in
    quality)
        for tokens in 256 512; do
            evaluate "quality_$tokens" --task=rag --chunk_tokens="$tokens" --ratios=0.05,0.15,0.3,0.5 \
                --selections=hkvd,spread,random,first --other_ratios=0.15 --plot_out="$out/quality_$tokens.png"
        done
        ;;
    figures)
        for figure in 6 7 8 12 15 16 17; do
            evaluate "figure_$figure" --task=rag --figure="$figure" --selections=hkvd \
                --plot_out="$out/figure_$figure.png"
        done
        ;;
    gate)
        # It exits with 1 where no ratio passes, which is an answer too.
        evaluate gate --task=blend_gate || [ $? -eq 1 ]
        ;;
    bench)
        bench blend ttft
        bench blend_throughput throughput
        ;;
    page)
        "$python" -m tools.blend_page
        ;;
    *)
        echo "wanted one of quality, figures, gate, bench, page; found $task" >&2
        exit 1
        ;;
    esac
done
