"""Who runs, and what a turn says."""
