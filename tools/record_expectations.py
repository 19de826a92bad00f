"""Records what `transformers` says of tiny random Llama models, for tests on machines without torch.

Writes tests/data/llama_<variant>/ with
  config.json, model.safetensors   the model, as a Hugging Face directory without tokenizer
  expected.npz                     prompt_<n> int32 [n] and logits_<n> float32 [n, V], for each prompt length n
  expected_greedy.json             {"max_new_tokens": m, "cases": [{"prompt": [...], "token_ids": [...]}, ...]}

Run it with `make setup-parity && .venv/bin/python tools/record_expectations.py`; on one machine it gives the same files
again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers

from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.testing import tiny

DATA_DIR = Path(__file__).resolve().parent.parent / "tests" / "data"
PROMPT_LENGTHS = (1, 9, 40, 120)
MAX_NEW_TOKENS = 24
# Between the best and the second-best logit at every greedy step: far above float32 noise, so that no other order of
# summation changes a token.
MIN_MARGIN = 0.01


def _config(**overrides: object) -> ModelConfig:
    small = {"vocab_size": 96, "embed_dim": 32, "mlp_dim": 64, "num_layers": 3, "head_dim": 8, "max_positions": 256}
    return tiny.tiny_config(**(small | overrides))


VARIANTS = {
    "mha_untied": _config(num_kv_heads=4),
    "gqa_tied": _config(tie_embeddings=True, norm_eps=1e-6),
    "gqa_llama3_rope": _config(
        head_dim=16,
        rope=RopeConfig(
            theta=5000.0,
            scaling="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=64,  # so that a wavelength falls into each of the three bands
        ),
    ),
    "gqa_linear_rope": _config(num_kv_heads=1, rope=RopeConfig(theta=500.0, scaling="linear", factor=2.5)),
    "wide_heads": _config(head_dim=12, num_layers=2),  # num_heads * head_dim != embed_dim
}
"""The models recorded, by the name of their directory."""


def _greedy(model: transformers.PreTrainedModel, prompt: np.ndarray) -> tuple[list[int], float]:
    """Decodes greedily without cache and returns the new tokens and the least margin of any step."""
    token_ids = prompt.tolist()
    least_margin = float("inf")
    for _ in range(MAX_NEW_TOKENS):
        logits, ids = torch.topk(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1], 2)
        least_margin = min(least_margin, float(logits[0] - logits[1]))
        token_ids.append(int(ids[0]))
    return token_ids[len(prompt) :], least_margin


def _record(directory: Path, config: ModelConfig, seed: int) -> float:
    """Writes one model and its expectations; returns the least margin of any greedy step."""
    tiny.write_tiny_hf(directory, config, tiny.tiny_params(config, seed), tokenizer=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    cases = []
    least_margin = float("inf")
    for length in PROMPT_LENGTHS:
        prompt = rng.integers(0, config.vocab_size, length, dtype=np.int32)
        logits = model(torch.from_numpy(prompt.astype(np.int64))[None], use_cache=False).logits[0]
        arrays[f"prompt_{length}"] = prompt
        arrays[f"logits_{length}"] = logits.numpy().astype(np.float32)
        token_ids, margin = _greedy(model, prompt)
        least_margin = min(least_margin, margin)
        cases.append({"prompt": prompt.tolist(), "token_ids": token_ids})
    np.savez_compressed(directory / "expected.npz", **arrays)
    greedy = {"max_new_tokens": MAX_NEW_TOKENS, "cases": cases}
    (directory / "expected_greedy.json").write_text(json.dumps(greedy) + "\n", encoding="utf-8")
    return least_margin


def main() -> None:
    """Records every variant, each with the first seed whose greedy tokens are not a matter of rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", type=Path, default=DATA_DIR, help="where to write (default: %(default)s)")
    out_dir = parser.parse_args().out_dir
    torch.set_grad_enabled(False)
    for name, config in VARIANTS.items():
        directory = out_dir / f"llama_{name}"
        seed = 0
        while (margin := _record(directory, config, seed)) < MIN_MARGIN:
            seed += 1
        size = sum(file.stat().st_size for file in directory.iterdir())
        print(f"{directory}: seed {seed}, least greedy margin {margin:.3f}, {size:,} bytes")


if __name__ == "__main__":
    main()
