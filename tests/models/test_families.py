"""Every architecture and every rope scaling against `transformers`, on small random checkpoints that it wrote."""

import numpy as np
import pytest

from tests import families_kit as kit
from tests.tolerances import LOGITS_ATOL

ATOL = LOGITS_ATOL["float32"]
LENGTHS = (1, 9, 40, 120)
ROOM = 128
NUM_GREEDY = 4


@pytest.mark.parametrize("name", kit.CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name):
    pair = kit.pair(name)
    for length in LENGTHS:
        ids = kit.prompt(length)
        for _ in range(NUM_GREEDY):
            ours = kit.our_logits(pair.model, ids, room=ROOM, context=ROOM)
            theirs = pair.their_logits(ids)
            np.testing.assert_allclose(ours, theirs, atol=ATOL, rtol=0)
            assert ours[-1].argmax() == theirs[-1].argmax()
            ids.append(int(theirs[-1].argmax()))
