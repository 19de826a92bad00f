"""Evaluates what overflow does to a model's answers, and what reusing the KV of text chunks does to them.

    python -m ca_jax.launch.evaluate --task=ppl --method=tt,ca,nkvt --data=wikitext2.txt --window=1024 \\
        --truncation_ratio=0.5 --max_tokens=50000 --plot_out=ppl.png --json_out=ppl.json
    python -m ca_jax.launch.evaluate --task=ppl --method=tt,ca,ca:anchor_tokens=16,ca:repair_ratio=0.1 \\
        --data=c4_sample.jsonl --json_out=repair.json
    python -m ca_jax.launch.evaluate --task=longeval --method=tt,ca --data=longeval/200_lines.jsonl \\
        --max_items=100 --json_out=lines.json
    python -m ca_jax.launch.evaluate --task=mmlu --method=tt,ca --data=mmlu_dev --preamble=wikitext2.txt \\
        --json_out=mmlu.json
    python -m ca_jax.launch.evaluate --task=agreement --method=tt,ca,nkvt --data=wikitext2.txt --every=256 \\
        --json_out=agreement.json
    python -m ca_jax.launch.evaluate --task=rag --data=musique.json --chunk_tokens=256 --ratios=0.05,0.15,0.3 \\
        --selections=hkvd,random,first --json_out=rag.json
    python -m ca_jax.launch.evaluate --task=rag --data=musique.json --figure=6 --plot_out=6.png --json_out=6.json
    python -m ca_jax.launch.evaluate --task=blend_gate --max_kl_share=0.5 --json_out=gate.json

`ppl` is the perplexity of one long text. `longeval` asks for lines or topics of a record that has overflowed the
window, `mmlu` asks multiple-choice questions behind a text that has. `agreement` is how often a method goes on with a
text as `tt` does, which drops tokens as text and computes the rest anew: what the others are held against. `rag` asks
questions behind text chunks whose KV was computed alone, with each way to use it (CacheBlend), and redoes figures of
that paper. `blend_gate` says what share of the chunks' tokens a model must compute anew to stay close to computing all,
and exits with 1 where no ratio of those that are tried will do.

The pure model is evaluated, without engine and store: what these keep is what it computes. Intervals and standard
errors are printed and written as JSON, with the machine and the versions. `tools/quality_page.py` makes a page of many.

Not here: the tasks (`benchmarks.evaluate`, which is in a checkout of the repository alone), endless contexts
(`ca_jax.evaluation`).
"""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("evaluate.main")
