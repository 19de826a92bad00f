"""Ray is started as `ca_jax cluster` starts it: it reads its settings when the tests here import it."""

import os

from ca_jax.launch.cluster import RAY_SETTINGS

os.environ.update(RAY_SETTINGS)
