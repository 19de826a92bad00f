"""What was said and what is asked: host data, no jax."""
