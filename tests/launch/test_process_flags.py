"""Flags of a script that runs as several processes: what they refuse before anybody is waited for."""

from __future__ import annotations

import pytest
from absl import flags

from ca_jax.device.processes import OneProcess
from ca_jax.launch import process_flags


def join(*given: str):
    values = flags.FlagValues()
    process_flags.define(flag_values=values)
    values(["script", *given])
    return process_flags.join("script", flag_values=values)


def test_without_them_there_is_one_process():
    assert isinstance(join(), OneProcess)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--num_processes=2"], "wanted all of coordinator_address, num_processes, process_id or none, found num_proc"),
        (["--coordinator_address=127.0.0.1:1", "--process_id=0"], "found coordinator_address, process_id alone"),
        (
            ["--coordinator_address=127.0.0.1:1", "--num_processes=2", "--process_id=2"],
            "process_id wanted a number from 0 to 1, found 2",
        ),
        (
            ["--coordinator_address=127.0.0.1:1", "--num_processes=0", "--process_id=0"],
            "num_processes wanted at least 1, found 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        join(*given)
