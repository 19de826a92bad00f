"""Which of a session's blocks is in which tier, and how much of it."""

import numpy as np
import pytest

from ca_jax.storage.records import BlockTiers, Owner
from ca_jax.storage.sessions import Entry
from ca_jax.storage.store import block_map
from ca_jax.storage.tokens import SsdCopy, TokenPlaces

BLOCK_TOKENS = 4


class Save:
    """As much of an open save as the books look at."""

    def __init__(self, stop_token: int) -> None:
        self.stop_token = self.stop_place = stop_token


def entry(dram: int, ssd: int | None = None, same: int = 0, saving: int = 0) -> Entry:
    made = Entry(key="k", owner=Owner(), created_s=0.0, last_used_s=0.0)
    made.token_ids, made.places = np.zeros(dram, np.int32), TokenPlaces.dense(dram)
    made.block_ids = list(range(-(-(dram + saving) // BLOCK_TOKENS)))
    if ssd is not None:
        made.ssd = SsdCopy(places=TokenPlaces.dense(ssd), block_ids=np.arange(-(-ssd // BLOCK_TOKENS)))
    made.num_same_tokens = same
    if saving:
        made.open_saves.append(Save(dram + saving))
    return made


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (entry(0), []),
        (entry(6), [(0, 4, 0, 0), (4, 2, 0, 0)]),
        (entry(6, ssd=5, same=5), [(0, 4, 4, 0), (4, 2, 1, 0)]),
        (entry(0, ssd=5), [(0, 0, 4, 0), (4, 0, 1, 0)]),
        (entry(6, ssd=6, same=6, saving=4), [(0, 4, 4, 0), (4, 2, 2, 2), (8, 0, 0, 2)]),
        (entry(0, saving=5), [(0, 0, 0, 4), (4, 0, 0, 1)]),
        (entry(5, ssd=8, same=0), [(0, 4, 0, 0), (4, 1, 0, 0)]),  # SSD has another state of it.
    ],
    ids=["nothing", "dram", "both", "ssd", "saving", "first save", "another state"],
)
def test_each_block_with_a_token_is_told_of(made, expected):
    assert block_map(made, BLOCK_TOKENS) == tuple(BlockTiers(*each) for each in expected)


def test_blocks_that_lost_tokens_are_told_by_those_that_stay():
    made = entry(12)
    kept = np.ones(12, bool)
    kept[[1, 2, 4, 5, 6, 7]] = False  # Of the first block two, all of the second.
    made.places, _ = made.places.keep(kept, BLOCK_TOKENS)
    made.token_ids = made.token_ids[kept]
    assert block_map(made, BLOCK_TOKENS) == (BlockTiers(0, 2, 0), BlockTiers(2, 4, 0))
