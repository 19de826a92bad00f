"""Records what `transformers` says of tiny random models, for tests on machines without torch.

Writes tests/data/llama_<variant>/ and tests/data/family_<case>/ with
  config.json, model.safetensors   the model, as a Hugging Face directory without tokenizer
  expected.npz                     prompt_<n> int32 [n] and logits_<n> float32 [n, V], for each prompt length n
  expected_greedy.json             {"max_new_tokens": m, "cases": [{"prompt": [...], "token_ids": [...]}, ...]}

Run it with `make setup-parity && .venv/bin/python -m tools.record_expectations`; on one machine it gives the same files
again.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.testing import tiny
from tests import families_kit

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
"""The Llama models recorded, by the name of their directory."""

FAMILIES = {
    "mistral": {},
    "mixtral": {"intermediate_size": 16},
    "qwen2": {},
    "qwen3": {},
    "falcon_7b": {"ffn_hidden_size": 48},
    "falcon_40b": {"ffn_hidden_size": 48},
    "neox": {"hidden_size": 32, "num_attention_heads": 2},
}
"""Models of other families: cases of `families_kit`, and how they are made smaller."""
FAMILY_VOCAB_SIZE = 64


def _greedy(model: transformers.PreTrainedModel, prompt: np.ndarray) -> tuple[list[int], float]:
    """Decodes greedily without cache and returns the new tokens and the least margin of any step."""
    token_ids = prompt.tolist()
    least_margin = float("inf")
    for _ in range(MAX_NEW_TOKENS):
        logits, ids = torch.topk(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1], 2)
        least_margin = min(least_margin, float(logits[0] - logits[1]))
        token_ids.append(int(ids[0]))
    return token_ids[len(prompt) :], least_margin


def _record_llama(directory: Path, config: ModelConfig, seed: int) -> float:
    tiny.write_tiny_hf(directory, config, tiny.tiny_params(config, seed), tokenizer=False)
    return _record(directory, config.vocab_size, seed)


def _record_family(directory: Path, case: str, seed: int) -> float:
    families_kit.make(case, directory, seed, vocab_size=FAMILY_VOCAB_SIZE, **FAMILIES[case])
    return _record(directory, FAMILY_VOCAB_SIZE, seed)


def _record(directory: Path, vocab_size: int, seed: int) -> float:
    """Writes what one model is to say; returns the least margin of any greedy step."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    cases = []
    least_margin = float("inf")
    for length in PROMPT_LENGTHS:
        prompt = rng.integers(0, vocab_size, length, dtype=np.int32)
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
    recorders = {f"llama_{name}": partial(_record_llama, config=config) for name, config in VARIANTS.items()}
    recorders |= {f"family_{case}": partial(_record_family, case=case) for case in FAMILIES}
    for name, record in recorders.items():
        directory = out_dir / name
        seed = 0
        while (margin := record(directory, seed=seed)) < MIN_MARGIN:
            seed += 1
        size = sum(file.stat().st_size for file in directory.iterdir())
        print(f"{directory}: seed {seed}, least greedy margin {margin:.3f}, {size:,} bytes")


if __name__ == "__main__":
    main()
