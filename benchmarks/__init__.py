"""Benchmarks of ca_jax, which are not part of the installed package: `python -m ca_jax.launch.bench --suite=NAME`.

A suite is a function that yields rows. Flags, validation, JSON, table and figure follow from its config and its rows.
This file, put into `benchmarks/suites/`, is one; `--suite=tokenize --num_words=1000,5000 --json_out=F` runs it:

    import dataclasses
    from benchmarks import harness

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class TokenizeConfig(harness.ServingConfig):
        num_words: tuple[int, ...] = (1000,)
        \"""Words of the text, a row each.\"""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class TokenizeRow(harness.Row):
        num_words: int
        \"""Words of the text.\"""
        encode_s: float
        \"""Until it is token ids.\"""

    @harness.suite(TokenizeConfig)
    def tokenize(run):
        for num_words in run.config.num_words:
            ways = {"ours": lambda: harness.timed("encode_s", run.model.tokenizer.encode, "word " * num_words)}
            rounds = run.rounds(lambda: ways)
            yield harness.make_row(TokenizeRow, harness.samples(rounds), num_words=num_words)

Ways that are compared are entries of `ways`: `rounds` takes their samples in turn, a warm-up round first. Rows have
medians, and the least and the largest sample in `spread`.

- `harness`: configs, rows, rounds, the registry. `flags`, `tables`, `figures`, `main`: what follows from them.
- `suites`: one file a suite; `overflow_*`, `host_turns` and `servers` are parts of `overflow`, `policy` and `serving`.
- `engines`, `paced`, `conversations`, `apart`, `disk`, `peers`, `recording`: what several suites use.
- `gpu`: the benchmark of an accelerator, `python -m ca_jax.launch.gpu_bench`.
- `evaluate`, `demo`: `python -m ca_jax.launch.evaluate` and `demo`, which share flags, tables and figures with these.
"""
