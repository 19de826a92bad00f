"""The flags of a script that runs as several processes, and how it joins them.

    for i in 0 1; do script --coordinator_address=HOST:PORT --num_processes=2 --process_id=$i & done

Not here: what processes agree upon (`ca_jax.device.processes`).
"""

from __future__ import annotations

import jax
from absl import flags

from ca_jax.device.processes import JaxProcesses, OneProcess, Processes

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

_START_S = 300
_USER_S = 7 * 24 * 3600.0  # What a user is waited for. A process that died ends the others long before.


def define(*, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags."""
    flags.DEFINE_string(
        "coordinator_address",
        None,
        "HOST:PORT of the first process, where several serve as one; each has its share of the devices.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer("num_processes", None, "How many processes there are.", flag_values=flag_values)
    flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.", flag_values=flag_values)


def join(name: str, *, flag_values: flags.FlagValues = flags.FLAGS) -> Processes:
    """Joins the other processes, if flags say that there are any. To be called before jax is used.

    Args:
      name: of the script, which agrees with the others on what its user does; they are waited for as long as it takes.
      flag_values: where the flags were defined.

    Raises:
      ValueError: only some of the flags are given, or no such process.
      RuntimeError: the others do not come.
    """
    names = ("coordinator_address", "num_processes", "process_id")
    address, count, index = (flag_values[each].value for each in names)
    given = [each for each in names if flag_values[each].value is not None]
    if not given:
        return OneProcess()
    if address is None or count is None or index is None:
        raise ValueError(f"wanted all of {', '.join(names)} or none, found {', '.join(given)} alone")
    if count < 1:
        raise ValueError(f"num_processes wanted at least 1, found {count}")
    if not 0 <= index < count:
        raise ValueError(f"process_id wanted a number from 0 to {count - 1}, found {index}")
    jax.distributed.initialize(address, count, index, initialization_timeout=_START_S)
    return JaxProcesses(name, _USER_S) if count > 1 else OneProcess()
