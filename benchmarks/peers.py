"""Other engines that the benchmark runs beside ours, on the same weights, dtype and threads, in the same process.

Not here: what is measured and when (`suites.reuse`); torch and transformers are imported only when a peer is made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ca_jax.errors import CaJaxError
from ca_jax.launch.machine import describe_machine
from ca_jax.pretrained import LoadedModel
from ca_jax.testing.tiny import hf_config, hf_views


class PeerUnavailableError(CaJaxError):
    """A peer whose packages are not installed, or that cannot run where our model does."""


class TransformersPeer:
    """Hugging Face `transformers`: `LlamaForCausalLM` with sdpa attention and its default, growing KV cache.

    On a GPU it computes with the model's own arrays. PeerUnavailableError: torch or transformers is not installed, or
    torch lacks the device our model is on, or its dtype. Every method waits until the work is done.
    """

    def __init__(self, model: LoadedModel) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise PeerUnavailableError(
                f"the peer needs torch and transformers, got: {error}; to install both: make setup-parity"
            ) from error
        on_gpu = jax.default_backend() == "gpu"
        if on_gpu and not torch.cuda.is_available():
            raise PeerUnavailableError("the model is on a GPU: torch must see one, got none")
        if model.dtype not in ("float32", "bfloat16"):
            raise PeerUnavailableError(f"the peer's weights must be float32 or bfloat16, got {model.dtype}")
        self._torch = torch
        self._device = torch.device("cuda" if on_gpu else "cpu")
        torch.set_num_threads(describe_machine()["cores"])
        transformers.utils.logging.disable_progress_bar()
        fields = {**hf_config(model.config), "attn_implementation": "sdpa", "dtype": model.dtype}
        config = transformers.LlamaConfig(**fields)
        with torch.device("meta"):
            llama: Any = transformers.LlamaForCausalLM(config)
        params = {"params": jax.tree.map(torch.from_dlpack, jax.block_until_ready(model.params["params"]))}
        weights = hf_views(model.config, params)
        if not on_gpu:  # Laid out as a file has them; a GPU has no room for both, and multiplies either as fast.
            weights = {name: weight.contiguous() for name, weight in weights.items()}
        llama.load_state_dict(weights, strict=not model.config.tie_embeddings, assign=True)
        llama.tie_weights()
        llama.model.rotary_emb = type(llama.model.rotary_emb)(config)  # Its frequencies are no weights.
        self._model = llama.to(self._device).eval()
        self._cache: Any = None
        self._last: Any = None

    def save(self, directory: Path) -> None:
        """Writes the model as a directory of Hugging Face's, without a tokenizer."""
        tensors = {name: tensor.contiguous() for name, tensor in self._model.state_dict().items()}
        self._model.save_pretrained(directory, state_dict=tensors)

    def prefill(self, token_ids: Sequence[int]) -> tuple[int, float]:
        """Computes a prompt from scratch; the likeliest next token, and seconds until it is known.

        The KV cache is built as for a turn that goes on, logits are computed of the last token only.
        """
        started_s = time.perf_counter()
        with self._torch.inference_mode():
            _, token = self._forward(self._torch.tensor([list(token_ids)], device=self._device), None)
            first = int(token.item())
        return first, time.perf_counter() - started_s

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every token of a text, f32 `[T, V]`."""
        with self._torch.inference_mode():
            out = self._model(self._torch.tensor([list(token_ids)], device=self._device), use_cache=False)
            return out.logits[0].float().cpu().numpy()

    def start_decode(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefills a batch of prompts, all of one length, for `decode` to continue."""
        with self._torch.inference_mode():
            tokens = self._torch.tensor([list(prompt) for prompt in prompts], device=self._device)
            self._cache, self._last = self._forward(tokens, None)

    def decode(self, num_steps: int) -> float:
        """Decodes greedily, as many tokens for each row of the batch; seconds it took.

        As `generate` does, every step's tokens are looked at before the next.
        """
        if self._cache is None:
            raise RuntimeError("start_decode must come before decode")
        started_s = time.perf_counter()
        with self._torch.inference_mode():
            for _ in range(num_steps):
                self._cache, self._last = self._forward(self._last, self._cache)
                self._last.tolist()
        return time.perf_counter() - started_s

    def end_decode(self) -> None:
        """Forgets the batch."""
        self._cache = self._last = None

    def _forward(self, tokens: Any, cache: Any) -> tuple[Any, Any]:
        """Tokens `[B, T]` over a cache, to the cache with them and the likeliest next tokens `[B, 1]`."""
        out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.past_key_values, out.logits[:, -1:].argmax(-1)


PEERS = {"transformers": TransformersPeer}
"""By the name of the flag."""
PEER_PACKAGES = {"transformers": ("torch", "transformers")}
"""The distributions whose versions matter."""
