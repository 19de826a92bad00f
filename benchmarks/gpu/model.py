"""Measures a model on the accelerator against what bounds it: prefill by matrix products, decode by memory.

Prefill and decode go through the engine's own `Runner`, without an engine around it: rows that decode together would
each be prefilled between two decode steps, and every number of rows on the way there be compiled.

Not here: what bounds it (`probes`), turns over stored histories (`ttft`), the paper's figures (`paper`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from benchmarks import harness
from benchmarks.engines import random_ids
from benchmarks.gpu.rows import MATMUL_FLOOR, ROOFLINE_FLOOR, Findings, Floor, GpuBenchConfig, Probes
from ca_jax.config import EngineConfig
from ca_jax.device.pages import PoolSize
from ca_jax.device.passes import PassPart, Prefill, RunnerSizes
from ca_jax.device.runner import Runner
from ca_jax.models.paged_attention import paged_attention
from ca_jax.models.transformer import Transformer
from ca_jax.pretrained import LoadedModel, random_model

_SETTLING_STEPS = 2  # Decode steps before the first sample.


def shaped_model(preset: str, config: GpuBenchConfig, num_tokens: int) -> LoadedModel:
    """A model of random weights with room for so many tokens, whatever its preset was trained for."""
    model = random_model(preset, dtype=config.dtype, seed=config.seed)
    if num_tokens <= model.config.max_positions:
        return model
    longer = dataclasses.replace(model.config, max_positions=num_tokens)
    return dataclasses.replace(model, config=longer, model=Transformer(longer))


def compute_bytes(model: LoadedModel) -> int:
    """Of the weights that a token goes through: all but an embedding table that is looked up only."""
    embedding = model.params["params"]["embed"]["embedding"]
    # The head has as many numbers as the table, whether it is the same one or not.
    return _layer_numbers(model) * embedding.dtype.itemsize + embedding.nbytes


def prefill_flops(model: LoadedModel, num_tokens: int) -> int:
    """Floating-point operations of prefilling so many tokens over no history, logits of the last one included.

    Two for each weight and token, and four for each number of a head and each pair of tokens that attention sees.
    """
    c = model.config
    pairs = num_tokens * (num_tokens + 1) // 2
    attended = 4 * pairs * c.num_layers * c.num_heads * c.head_dim
    return 2 * _layer_numbers(model) * num_tokens + 2 * c.embed_dim * c.vocab_size + attended


def _layer_numbers(model: LoadedModel) -> int:
    layers = [part for name, part in model.params["params"].items() if name.startswith("layer_")]
    return sum(leaf.size for leaf in jax.tree.leaves(layers))


class RunnerBench:
    """Prefill and decode of one model, judged by what the device gives."""

    def __init__(self, model: LoadedModel, config: GpuBenchConfig, probes: Probes) -> None:
        self.model, self.config = model, config
        self._probes = probes
        longest = config.context_tokens + _SETTLING_STEPS + (1 + config.repeats) * config.decode_steps
        window = max(longest, config.prefill_tokens)
        self._runner = Runner(
            model.config,
            model.params,
            RunnerSizes(
                pool=PoolSize.for_window(window, config.batch_size, 1, EngineConfig.page_tokens),
                chunk_tokens=config.chunk_tokens,
            ),
        )
        self.notes = [model_note(model), f"attention: {paged_attention(self._runner.pool.buffers[0])}"]
        self.tokens = random_ids(np.random.default_rng(config.seed), model, window)

    def prefill(self) -> Findings:
        """Time of a prefill without history, against the matmul peak."""
        num_tokens = self.config.prefill_tokens
        rounds = harness.interleave(
            lambda: {"ours": lambda: harness.timed("prefill_s", self.compute, 0, num_tokens)}, self.config.repeats
        )
        samples = harness.samples(rounds)
        prefill_s = harness.must_median(samples, "prefill_s")
        flops_per_s = prefill_flops(self.model, num_tokens) / prefill_s
        share = flops_per_s / self._probes.matmul_flops_per_s
        row = {
            "new_tokens": num_tokens,
            "prefill_s": prefill_s,
            "tflop_per_s": flops_per_s / 1e12,
            "share_of_matmul_peak": share,
            "recompiles": harness.recompiles(rounds),
        }
        return Findings(
            rows=[row],
            floors=[Floor(what="prefill, share of the matmul peak", value=share, bound=MATMUL_FLOOR)],
            notes=[*self.notes, *_spread_notes(samples, "prefill_s")],
        )

    def begin_decode(self) -> tuple[Sequence[Sequence[int]], Callable[[], dict[str, float]]]:
        """Prompts of a full batch, computed already; and what decodes some of its steps, and says how long one took."""
        config, num_rows = self.config, self.config.batch_size
        prompt = self.tokens[: config.context_tokens]
        for slot in range(num_rows):
            self.compute(slot, config.context_tokens)
        lengths = np.full(num_rows, config.context_tokens, np.int32)
        tokens = self._steps(_SETTLING_STEPS, jax.numpy.zeros(num_rows, np.int32), lengths)

        def step() -> dict[str, float]:
            nonlocal tokens
            started_s = time.perf_counter()
            tokens = self._steps(config.decode_steps, tokens, lengths)
            elapsed_s = time.perf_counter() - started_s
            return {"step_s": elapsed_s / config.decode_steps, "length": float(lengths[0])}

        return [prompt] * num_rows, step

    def decode(self) -> Findings:
        """Time of a decode step of a full batch, against reading all weights and all KV once."""
        config, num_rows = self.config, self.config.batch_size
        _, step = self.begin_decode()
        rounds = harness.interleave(lambda: {"ours": step}, config.repeats)
        samples = harness.samples(rounds)
        step_s = harness.must_median(samples, "step_s")
        num_context = int(np.mean([sample["length"] for sample in samples]))
        dtype = self.model.params["params"]["embed"]["embedding"].dtype
        kv_bytes = self.model.config.kv_bytes_per_token(dtype.itemsize) * num_rows * num_context
        roofline_s = (compute_bytes(self.model) + kv_bytes) / self._probes.memory_read_bytes_per_s
        row = {
            "rows": num_rows,
            "context_tokens": num_context,
            "step_s": step_s,
            "tokens_per_s": num_rows / step_s,
            "weight_gb": compute_bytes(self.model) / 1e9,
            "kv_gb": kv_bytes / 1e9,
            "roofline_s": roofline_s,
            "share_of_roofline": roofline_s / step_s,
            "recompiles": harness.recompiles(rounds),
        }
        return Findings(
            rows=[row],
            floors=[
                Floor(
                    what=f"decode of {num_rows} rows, share of the bandwidth's roofline",
                    value=roofline_s / step_s,
                    bound=ROOFLINE_FLOOR,
                )
            ],
            notes=[*self.notes, *_spread_notes(samples, "step_s")],
        )

    def compute(self, slot: int, num_tokens: int) -> None:
        """Computes a prompt into the pages of a row, which holds nothing else then, and waits for it."""
        prefill, pool = Prefill(slot, self.tokens[:num_tokens], 0), self._runner.pool
        pool.end(slot)
        pool.begin(slot, self._runner.window)
        while prefill.num_left:
            part = PassPart(prefill, min(prefill.num_left, self.config.chunk_tokens), draws_behind=num_tokens)
            draw = self._runner.run_pass([part]).draw
        jax.block_until_ready((draw and draw.tokens, prefill.outputs))

    def _steps(self, num_steps: int, tokens: jax.Array, lengths: np.ndarray) -> jax.Array:
        """Decodes greedily, and waits for the last tokens; `lengths` grow in place."""
        slots: list[int | None] = [*range(len(lengths))]
        for _ in range(num_steps):
            none_gone = np.zeros_like(lengths)
            _, tokens = self._runner.dispatch((), slots, tokens, lengths.copy(), none_gone, draws=False).found
            lengths += 1
        return jax.block_until_ready(tokens)


def model_note(model: LoadedModel) -> str:
    """Which model a section is of."""
    return f"{model.name} in {model.dtype}"


def _spread_notes(samples: Sequence[harness.Sample], name: str) -> list[str]:
    taken = [1e3 * sample[name] for sample in samples]
    return [f"{name}: {min(taken):.2f} to {max(taken):.2f} ms, {len(taken)} samples"]
