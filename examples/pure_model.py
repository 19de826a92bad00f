"""The model as pure functions, for research: an explicit KV history that one's own code appends to, cuts and moves.

    python examples/pure_model.py

Keys in the history are unrotated. `positions` are those of the new tokens alone; the history's follow from its length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import ca_jax
from ca_jax.models import kv

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."


def main() -> None:
    loaded = ca_jax.load_model("smollm2-135m-instruct", dtype="float32")
    apply = jax.jit(loaded.model.apply)
    ids = jnp.array([loaded.tokenizer.encode(TEXT)])
    num_tokens = ids.shape[1]
    positions = jnp.arange(num_tokens)[None]

    # All at once, and in two parts over an explicit history: the same logits.
    whole, _ = apply(loaded.params, ids, positions)
    half = num_tokens // 2
    _, history = apply(loaded.params, ids[:, :half], positions[:, :half])
    part, new = apply(loaded.params, ids[:, half:], positions[:, half:], history)
    print(f"in two parts: logits differ by {float(jnp.abs(part - whole[:, half:]).max()):.1e}")

    # The first layer's keys know nothing of their neighbours: without a position they are valid wherever they stand.
    history = kv.append(history, new)
    _, alone = apply(loaded.params, ids[:, 4:], positions[:, : num_tokens - 4])
    cut = kv.drop_oldest(history, 4)
    for layer in (0, len(cut.layers) - 1):
        mine, fresh = cut.layers[layer].k, alone.layers[layer].k
        distance = float(jnp.linalg.norm(mine - fresh) / jnp.linalg.norm(fresh))
        print(f"layer {layer}: keys after drop_oldest are {distance:.3f} from keys computed afresh")

    # What follows "... at all.", by a history that was cut: greedy, a token at a time.
    token, said = int(part[0, -1].argmax()), []
    for _ in range(8):
        said.append(token)
        at = jnp.array([[int(cut.lengths[0])]])
        logits, new = loaded.model.apply(loaded.params, jnp.array([[token]]), at, cut)
        cut, token = kv.append(cut, new), int(logits[0, -1].argmax())
    print("goes on:", repr(loaded.tokenizer.decode(said)))

    # Like any pure function it has a gradient: how much each token's embedding matters for the loss of the text.
    def loss(params):
        logits, _ = loaded.model.apply(params, ids, positions)
        likely = jax.nn.log_softmax(logits[0, :-1])
        return -jnp.take_along_axis(likely, ids[0, 1:, None], axis=1).mean()

    value, gradient = jax.value_and_grad(loss)(loaded.params)
    rows = jnp.linalg.norm(gradient["params"]["embed"]["embedding"][ids[0]], axis=1)
    print(f"loss {float(value):.2f} nats a token; largest gradient at token {int(rows.argmax())}")


if __name__ == "__main__":
    main()
