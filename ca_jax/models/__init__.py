"""Models: architecture, unrotated KV, attention, checkpoints, tokenizers. Knows nothing of the engine or the store."""
