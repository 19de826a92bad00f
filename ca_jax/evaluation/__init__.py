"""Quality with plain arrays: ways to overflow and to reuse chunks, over the pure model; statistics, metrics, items."""
