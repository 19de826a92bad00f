"""What tests alone use of their dependencies without a promise; `test_private.py` says whether it still is as it was.

Not here: what the package uses so (`ca_jax.private`).
"""

import dataclasses
from typing import Any

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

__all__ = ["gen_ai_attributes", "passes_requests_on", "races_found", "watching_races"]


def watching_races(**options: Any) -> pltpu.InterpretParams:
    """Has the TPU's interpreter look for races, for `races_found`, and go on where it sees one.

    jax 0.10 and 0.11 always go on; 0.12 asks.
    """
    asks = "on_race" in {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    return pltpu.InterpretParams(detect_races=True, **({"on_race": "warn"} if asks else {}), **options)


def races_found() -> bool:
    """Whether the interpreter has seen a race since it began, or since `pltpu.reset_tpu_interpret_mode_state`.

    jax 0.10 to 0.12 keep that in a variable that is not public, and say it on the terminal.
    """
    races = interpret_pallas_call.races
    return races is not None and races.races_found


def passes_requests_on() -> set[str]:
    """Of the ways to pass requests on that `ca_jax cluster` chooses by the environment, those that Ray Serve takes."""
    from ray.serve._private import constants

    ways = ("PROXY_USE_GRPC", "USE_GRPC_BY_DEFAULT", "ENABLE_DIRECT_INGRESS")
    threads = ("RUN_USER_CODE_IN_SEPARATE_THREAD", "RUN_ROUTER_IN_SEPARATE_LOOP")
    return {name for name in (*ways, *threads) if getattr(constants, f"RAY_SERVE_{name}")}
