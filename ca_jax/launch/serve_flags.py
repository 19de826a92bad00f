"""The flags of the server: each stands for the field of `ServerConfig` of its name, but for where it listens.

Not here: what the fields mean to the server (`server.config`), flags of engine and store.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from ca_jax.server.config import ServerConfig

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

_INTEGERS = {
    "max_queue": "Most turns that wait for a decode slot; a request that comes then gets status 429.",
    "max_body_bytes": "Most bytes of a request's body; a larger one gets status 413.",
    "max_choices": "Most answers that one request may ask for.",
    "max_chunks": "Most chunks of text that one request may give; each may be a prefill of its own.",
    "max_chunk_tokens": "Most tokens of all chunks of one /v1/chunks.",
    "max_lookups": "Most requests of one tenant at a time for anything but answers; others get status 429.",
    "max_open_sessions": "Most conversations held in memory between turns; of others SSD's copy is gone on with.",
}
_NUMBERS = {
    "request_timeout_s": "Most seconds that a request takes, waiting included; it may ask for less.",
    "max_step_s": "Seconds that a step of the engine, which may compile, takes before /health says that it is stuck.",
    "shutdown_grace_s": "Seconds that running answers have to end once the server is told to stop.",
}


def define_server_flags(*, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    default = ServerConfig()
    flags.DEFINE_string(
        "host", "127.0.0.1", "Address to listen on; 0.0.0.0 for all of the machine's.", flag_values=flag_values
    )
    flags.DEFINE_integer("port", 8000, "Port to listen on.", 0, 65535, flag_values=flag_values)
    flags.DEFINE_string(
        "served_model_name", None, "Name that clients give; by default --model.", flag_values=flag_values
    )
    flags.DEFINE_string(
        "api_keys_file",
        None,
        "TOML file of tenants and their keys; by default keys are not asked for.",
        flag_values=flag_values,
    )
    flags.DEFINE_list(
        "allowed_hosts",
        [],
        "Names by which the server is reached, beside addresses and localhost; a request for another Host gets 403. By "
        "default none where keys are not asked for, and any where they are.",
        flag_values=flag_values,
    )
    for name, text in _INTEGERS.items():
        flags.DEFINE_integer(name, getattr(default, name), text, flag_values=flag_values)
    for name, text in _NUMBERS.items():
        flags.DEFINE_float(name, getattr(default, name), text, flag_values=flag_values)


def server_config(*, flag_values: flags.FlagValues = flags.FLAGS) -> ServerConfig:
    """The config that parsed flags stand for; the model's name is --model's where none is given.

    Raises:
      ValueError: a value outside its range; the message names the flag.
    """
    values: dict[str, Any] = {name: flag_values[name].value for name in (*_INTEGERS, *_NUMBERS)}
    name = flag_values["served_model_name"].value or flag_values["model"].value
    hosts = tuple(flag_values["allowed_hosts"].value or ())
    return dataclasses.replace(ServerConfig(), served_model_name=name, allowed_hosts=hosts, **values)
