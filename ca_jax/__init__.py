"""Multi-turn LLM serving in JAX, from KV that is kept between turns.

The names here are the public ones; everything else may change.
"""

from ca_jax.config import BlendConfig, EngineConfig
from ca_jax.engine import Engine
from ca_jax.models.config import ModelConfig
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.session import Session
from ca_jax.storage.config import StoreConfig
from ca_jax.turns.grammars import Grammar
from ca_jax.turns.requests import Completion, FinishReason, SamplingParams, TokenLogprob, Usage

__all__ = [
    "BlendConfig",
    "Completion",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Grammar",
    "LoadedModel",
    "ModelConfig",
    "OverflowConfig",
    "SamplingParams",
    "Session",
    "StoreConfig",
    "TokenLogprob",
    "Usage",
    "load_model",
]
