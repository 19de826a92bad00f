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

from ca_jax.device.transfer import to_host
from ca_jax.errors import CaJaxError
from ca_jax.launch.machine import describe_machine
from ca_jax.pretrained import LoadedModel
from ca_jax.testing.tiny import hf_config, hf_tensors


class PeerUnavailableError(CaJaxError):
    """A peer whose packages are not installed, or that cannot run where our model does."""


class TransformersPeer:
    """Hugging Face `transformers`: `LlamaForCausalLM` with sdpa attention and its default, growing KV cache.

    Weights are copies of the model's. PeerUnavailableError: torch or transformers is not installed, or torch lacks the
    device our model is on. Every method waits until the work is done.
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
        self._torch = torch
        self._device = torch.device("cuda" if on_gpu else "cpu")
        torch.set_num_threads(describe_machine()["cores"])
        transformers.utils.logging.disable_progress_bar()
        tensors = hf_tensors(model.config, jax.tree.map(to_host, model.params))
        llama: Any = transformers.LlamaForCausalLM.from_pretrained(
            None,
            config=transformers.LlamaConfig(**hf_config(model.config)),
            state_dict={name: _to_torch(torch, tensor) for name, tensor in tensors.items()},
            dtype=getattr(torch, model.dtype),
            attn_implementation="sdpa",
        )
        self._model = llama.to(self._device).eval()
        self._cache: Any = None
        self._last: Any = None

    def save(self, directory: Path) -> None:
        """Writes the model as a directory of Hugging Face's, without a tokenizer."""
        self._model.save_pretrained(directory)

    def prefill(self, token_ids: Sequence[int]) -> tuple[int, float]:
        """Computes a prompt from scratch; the likeliest next token, and seconds until it is known.

        The KV cache is built as for a turn that goes on, logits are computed of the last token only.
        """
        started_s = time.perf_counter()
        with self._torch.inference_mode():
            _, token = self._forward(self._torch.tensor([list(token_ids)], device=self._device), None)
            first = int(token.item())
        return first, time.perf_counter() - started_s

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


def _to_torch(torch: Any, array: np.ndarray) -> Any:
    """A copy as a torch tensor; numpy's bfloat16 is not one torch knows."""
    if array.dtype == np.float32:
        return torch.from_numpy(array.copy())
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    raise PeerUnavailableError(f"the peer's weights must be float32 or bfloat16, got {array.dtype}")
