"""One turn of a batch, layer by layer, against what a pencil says of it."""

import dataclasses

import pytest

from benchmarks import paper_turns
from benchmarks.paper_turns import Turn, saving_s
from ca_jax.launch.simulate import SimulateConfig
from ca_jax.simulate.config import DEVICES, MODELS, Device, SimModel

# Two jobs of 6 tokens of history and 4 new ones: 2 x 936 x 8 operations by weights, and 4 x 4 for each of 2 x 32 pairs
# of tokens, 16,000 in all, are 4 s. Their history is 2 x 6 x 16 bytes, 8 s on the link.
MODEL = SimModel(name="m", num_params=936, num_layers=4, num_heads=1, num_kv_heads=1, head_dim=1, window=64)
DEVICE = Device(name="d", flops=4000, hbm_bytes=1e9, hbm_bytes_per_s=1e12, link_bytes_per_s=24)
TURN = Turn(model=MODEL, device=DEVICE, flops_share=1, num_jobs=2)


def test_a_load_and_a_prefill_without_preloading_are_one_behind_the_other():
    assert TURN.prefill_s(6, 4) == pytest.approx(4)
    assert TURN.link_s(6) == pytest.approx(8)
    assert TURN.without_preloading_s(6, 4) == pytest.approx(12)


@pytest.mark.parametrize(("read_buffer", "expected_s"), [(0, 9), (1, 7), (2, 5), (3, 4), (4, 4)])
def test_layers_of_a_read_buffer_take_their_loads_off_a_prefill(read_buffer, expected_s):
    """Loads take 2 s a layer, computes 1 s: with a buffer of one the other loads end at 2, 4 and 6, all of it at 7."""
    assert TURN.preloading_s(6, 4, read_buffer) == pytest.approx(expected_s)
    assert TURN.least_read_buffer(6, 4) == 3


@pytest.mark.parametrize(
    ("computed", "expected_s"),
    [
        ([(1, 2)] * 3, 7),  # The link never rests from 1 on.
        ([(2, 1)] * 3, 7),  # All but the last save are beside what is computed next.
        ([(1, 2)] * 2 + [(4, 1)], 7),  # 6 s of computing, in which the first two are saved.
        ([], 0),
    ],
)
def test_saves_wait_for_what_they_save_and_for_the_link(computed, expected_s):
    assert saving_s(computed) == pytest.approx(expected_s)


def test_a_turn_s_saves_are_beside_it():
    """A prompt of 4 tokens takes (2 x 936 x 8 + 16 x 16) / 4000 s, two steps behind it (3744 + 16 x 10) / 4000 and
    (3744 + 16 x 12) / 4000; each token of both jobs is 32 / 24 s on the link, which is the slower one."""
    assert TURN.saved_at_end_s(4, 2) == pytest.approx(3.808 + 0.976 + 0.984 + 8)
    assert TURN.saved_beside_s(4, 2) == pytest.approx(3.808 / 4 + 8)
    quick = dataclasses.replace(TURN, device=dataclasses.replace(DEVICE, link_bytes_per_s=2400))
    assert quick.saved_beside_s(4, 2) == pytest.approx(3.808 + 0.976 + 0.984 + 32 / 2400)


@pytest.mark.parametrize(("device", "load_s"), [("a100-80", 0.504123), ("h100", 0.252062)])
def test_the_paper_s_batch_loads_over_the_link_of_its_device(device, load_s):
    """16 x 1,000 tokens of 2 x 40 x 40 x 128 x 2 bytes at 26 and 52 GB/s."""
    turn = paper_turns.turn_of(SimulateConfig(device=device))
    assert turn == Turn(model=MODELS["llama-13b"], device=DEVICES[device], flops_share=0.6)
    assert turn.link_s(1000) == pytest.approx(load_s, rel=1e-5)


def test_shares_are_those_of_the_flags():
    turn = paper_turns.turn_of(SimulateConfig(flops_share=0.3, bytes_share=0.5, step_ms=2))
    assert (turn.flops_share, turn.bytes_share, turn.step_s) == (0.3, 0.5, 0.002)


def test_what_the_paper_has_of_an_a100_is_beside_an_a100_alone():
    papers = {
        device: [row[-1] for row in paper_turns.rows("19", SimulateConfig(device=device))]
        for device in ("a100-80", "h100")
    }
    assert [each for each in papers["a100-80"] if each is not None] == [0.35, 0.61, 15]
    assert set(papers["h100"]) == {None}
