"""The command-line scripts; each is run as `python -m ca_jax.launch.NAME` and has `--help`."""
