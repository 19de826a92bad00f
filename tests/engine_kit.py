"""What the engine's tests share: one tiny chat model, one small configuration, and answers computed without the engine.

Every test uses the same model and sizes, so that functions compiled for one serve the others.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

import ca_jax
from ca_jax.config import EngineConfig
from ca_jax.device.processes import Processes
from ca_jax.device.transfer import params_to_device
from ca_jax.engine import Engine
from ca_jax.models.small_weights import Int4Matrix, Int8Matrix, SmallMatrix, as_small, form_of
from ca_jax.models.transformer import Transformer
from ca_jax.models.weights import Slot, parameter_slots
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Session
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import LoadTicket
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline
from ca_jax.testing import tiny
from ca_jax.turns.requests import Usage
from tests.tolerances import LOGITS_ATOL

WINDOW = 512
BLOCK_TOKENS = 16
NUM_LAYERS = tiny.tiny_config().num_layers
TOKEN_BYTES = tiny.tiny_config().kv_bytes_per_token(itemsize=4)
SSD_FILE_BYTES = 8192
"""On top of a block's KV, at most, on SSD."""
ATOL = LOGITS_ATOL["float32"]

SMALL = EngineConfig(
    dtype="float32",
    context_window=WINDOW,
    max_batch_size=8,
    max_num_batched_tokens=64,
    max_draft_tokens=0,  # Steps are one token of each job, and fewer functions are compiled.
    page_tokens=BLOCK_TOKENS,
    keep_pages=False,  # So that turns load what is stored.
    save_group_tokens=8,
    compile_cache_dir=None,
    recompute_if_faster=False,  # As it is for a model as small as this.
    store=StoreConfig(dram_gib=0.05, block_tokens=BLOCK_TOKENS),
)
"""The configuration of every engine here, but for what a test is about."""

STORE_OFF = StoreConfig(dram_gib=0, block_tokens=BLOCK_TOKENS)


def store_of(num_blocks: int) -> StoreConfig:
    """A store of so many blocks, in DRAM alone."""
    return StoreConfig(dram_gib=num_blocks * BLOCK_TOKENS * TOKEN_BYTES / GIB, block_tokens=BLOCK_TOKENS)


def ssd_store(directory: object, dram_blocks: int = 1000, ssd_blocks: int = 1000, **changes: object) -> StoreConfig:
    """A store of so many blocks in DRAM and, at least, on SSD."""
    block_bytes = BLOCK_TOKENS * TOKEN_BYTES + SSD_FILE_BYTES
    tier = {"ssd_dir": str(directory), "ssd_gib": ssd_blocks * block_bytes / GIB, "ssd_free_floor_gib": 0.0}
    return dataclasses.replace(store_of(dram_blocks), **{**tier, **changes})


def write_tiny_model(directory: str | os.PathLike[str]) -> None:
    """Writes a chat model whose tokens are bytes, and whose likeliest token is always a printable one."""
    config = tiny.tiny_config(max_positions=WINDOW)
    params = tiny.tiny_params(config, seed=1)
    unprintable = [i for i in range(config.vocab_size) if not 0x20 <= i < 0x7F]
    params["params"]["head"]["kernel"][:, unprintable] = 0.0
    tiny.write_tiny_hf(directory, config, params)


@functools.cache
def tiny_model() -> LoadedModel:
    """That model."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(directory)
        return ca_jax.load_model(directory, dtype="float32")


@functools.cache
def model_of(*, seed: int = 1, fingerprint: str = "", **changes: object) -> LoadedModel:
    """A tiny model without tokenizer, whose config differs so from that of the others.

    Args:
      seed: of its weights.
      fingerprint: of these; as the changes are written where it is not given.
      **changes: of the config.
    """
    config = tiny.tiny_config(**{"max_positions": WINDOW, **changes})
    params = params_to_device(tiny.tiny_params(config, seed=seed))
    fingerprint = fingerprint or repr((seed, sorted(changes.items())))
    return LoadedModel(
        name="tiny", config=config, model=Transformer(config), params=params, tokenizer=None, fingerprint=fingerprint
    )


def held_small(model: LoadedModel, weight_dtype: str) -> LoadedModel:
    """The same model with its matrices held in 8 or 4 bits, all else in float32: so rounding decides no token."""
    leaves = flax.traverse_util.flatten_dict(model.params)
    for slot in parameter_slots(model.config):
        if (form := form_of(model.config, slot, weight_dtype, "bfloat16")) is not None:
            path = ("params", *slot.path)
            leaves[path] = form(*map(jnp.asarray, as_small(slot, np.asarray(leaves[path]), form)))
    return dataclasses.replace(model, params=flax.traverse_util.unflatten_dict(leaves), weight_dtype=weight_dtype)


def wide_but_small(model: LoadedModel) -> LoadedModel:
    """The same model with what is not held small in float32, so that rounding decides no token."""
    params = jax.tree.map(
        lambda held: held if isinstance(held, SmallMatrix) else held.astype(jnp.float32),
        model.params,
        is_leaf=lambda held: isinstance(held, SmallMatrix),
    )
    return dataclasses.replace(model, params=params)


def spelled_out(model: LoadedModel) -> LoadedModel:
    """The same model with all that is held small in float32, by numpy."""
    leaves = flax.traverse_util.flatten_dict(model.params)
    for slot in parameter_slots(model.config):
        held = leaves["params", *slot.path]
        if isinstance(held, Int8Matrix):
            scales = np.expand_dims(np.asarray(held.scales), inputs_of(slot))
            held = np.asarray(held.numbers, np.float32) * scales
        elif isinstance(held, Int4Matrix):
            held = in_float32(held).reshape(slot.shape)
        leaves["params", *slot.path] = jnp.asarray(held, jnp.float32)
    return dataclasses.replace(model, params=flax.traverse_util.unflatten_dict(leaves), weight_dtype="model")


def in_float32(held: Int4Matrix) -> np.ndarray:
    """What 4 bits stand for, `[…, inputs, outputs]`: a row of bytes has one of a group's first 16 inputs, and one of
    the others."""
    numbers, scales, offsets = (np.asarray(each) for each in held)
    *before, num_groups, num_outputs = scales.shape
    rows = numbers.reshape(*before, num_groups, 16, num_outputs)
    codes = np.concatenate([rows % 16, rows // 16], axis=-2).astype(np.float32)
    wide = codes * scales.astype(np.float32)[..., None, :] + offsets.astype(np.float32)[..., None, :]
    return wide.reshape(*before, -1, num_outputs)


def inputs_of(slot: Slot) -> tuple[int, ...]:
    """Which axes of a matrix are its inputs; of a table those behind its rows."""
    if slot.num_inputs is None:
        return (1,)
    first = 0 if slot.num_stacked is None else 1
    return tuple(range(first, first + slot.num_inputs))


def small_engine(
    model: LoadedModel | None = None,
    *,
    timeline: Timeline = NO_TIMELINE,
    store_wrapper: Callable[[AttentionStore], AttentionStore] | None = None,
    processes: Processes | None = None,
    draft_model: LoadedModel | None = None,
    **changes: object,
) -> Engine:
    """An engine of the tiny model, or of another, with `SMALL` but for the changes."""
    config = dataclasses.replace(SMALL, **changes)
    parts = {"timeline": timeline, "store_wrapper": store_wrapper, "processes": processes, "draft_model": draft_model}
    return Engine(model or tiny_model(), config, **parts)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids of random printable text."""
    return np.random.default_rng((num_tokens, seed)).integers(0x20, 0x7F, num_tokens).tolist()


# What the model says, without an engine.


@functools.partial(jax.jit, static_argnames=("model",))
def _pass(model, params, tokens):
    return model.apply(params, tokens, jnp.arange(tokens.shape[1])[None])


def full_pass(token_ids: Sequence[int], model: LoadedModel | None = None) -> tuple[np.ndarray, np.ndarray]:
    """One pass over all tokens, without engine, history or buckets: logits `[T, V]` and unrotated KV `[L, 2, T, K, H]`.

    Padded behind to one length, which no token sees, so that it compiles once.
    """
    model = model or tiny_model()
    padded = np.zeros((1, WINDOW), np.int32)
    padded[0, : len(token_ids)] = token_ids
    logits, kv = _pass(model.model, model.params, padded)
    layers = stacked([np.stack([part[0] for part in layer.parts]) for layer in kv.layers])
    return np.asarray(logits)[0, : len(token_ids)], layers[:, :, : len(token_ids)]


def greedy_answer(token_ids: Sequence[int], max_tokens: int, model: LoadedModel | None = None) -> list[int]:
    """The greedy answer to a prompt, by a full pass for each token."""
    ids = list(token_ids)
    for _ in range(max_tokens):
        ids.append(int(full_pass(ids, model)[0][-1].argmax()))
    return ids[len(token_ids) :]


def num_wrong(token_ids: Sequence[int], answers: Iterable[range], model: LoadedModel | None = None) -> int:
    """How many tokens at these places are not the likeliest there, by one pass without engine, store or buckets.

    Of tokens whose logits differ by no more than rounding each is right.
    """
    logits = full_pass(token_ids, model)[0]
    places = np.array([place for places in answers for place in places], int)
    chosen = logits[places - 1, np.asarray(token_ids)[places]]
    return int(np.sum(~(chosen >= logits[places - 1].max(-1) - ATOL)))


def last_answer(session: Session) -> range:
    """Where the last turn's generated tokens are."""
    return range(session.usage.prompt_tokens, len(session.token_ids))


def expect_right(*sessions: Session, model: LoadedModel | None = None) -> None:
    """Checks that the last answers are the greedy ones."""
    for session in sessions:
        wrong = num_wrong(session.token_ids, [last_answer(session)], model)
        assert wrong == 0, f"{session.session_id} answered wrongly"


# Turns.


def drain(*answers: Iterator[str]) -> list[str]:
    """Takes a piece of each answer in turn until all have ended; their texts."""
    texts = [""] * len(answers)
    pending = dict(enumerate(answers))
    while pending:
        for index, answer in list(pending.items()):
            piece = next(answer, None)
            if piece is None:
                del pending[index]
            else:
                texts[index] += piece
    return texts


def say(session: Session, message: str | list[int], max_tokens: int = 12, **options: object) -> list[int]:
    """Sends a turn to its end; the generated tokens."""
    send = session.send if isinstance(message, str) else session.send_ids
    drain(send(message, max_tokens=max_tokens, **options))
    return session.token_ids[session.usage.prompt_tokens :]


def converse(session: Session, messages: Iterable[str | list[int]], max_tokens: int = 12) -> list[list[int]]:
    """Sends turns one after the other; the generated tokens of each."""
    return [say(session, message, max_tokens) for message in messages]


def check_turn(
    session: Session, message: str | list[int], max_tokens: int = 12, *, model: LoadedModel | None = None
) -> Usage:
    """Sends a turn to its end and checks its answer against a full pass; what the turn used."""
    before = session.token_ids
    answer = say(session, message, max_tokens)
    assert len(answer) == max_tokens
    if not isinstance(message, str):
        assert session.token_ids == [*before, *message, *answer]
    expect_right(session, model=model)
    return session.usage


def until(engine: Engine, holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Keeps an engine going until something holds that its threads bring about."""
    give_up_s = time.monotonic() + deadline_s
    while True:
        seen = engine._wakeup.count
        engine.keep()
        if holds():
            return
        assert time.monotonic() < give_up_s, "what was waited for did not come"
        engine._wakeup.wait(seen, 0.05)  # What was put off comes with time alone.


def store_in(engine: Engine) -> AttentionStore:
    """The engine's store, once all saves are in it."""
    engine.wait_for_saves()
    return engine._kv.store


def stored_kv(engine: Engine, session: Session) -> np.ndarray:
    """What the store holds of a session."""
    store = store_in(engine)
    key, lineage = session.key, session.conversation.lineage
    return loaded(store, store.prepare_load(key, session.token_ids, num_dropped=lineage))


def loaded(store: AttentionStore, ticket: LoadTicket) -> np.ndarray:
    """All that a ticket loads, as it is at rest: `[L, 2, T, K, H]`, zeros behind what layers of other shapes have."""
    layout = store.layout
    layers = [
        np.zeros(layout.layer_shape(layer, ticket.num_tokens), layout.numpy_dtype) for layer in range(layout.num_layers)
    ]
    for layer, kv in enumerate(layers):
        ticket.read(layer, kv).result()
    store.complete_load(ticket)
    return stacked(layers)


def stacked(layers: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of layers as one, zeros behind those that are smaller."""
    sizes = np.max([kv.shape for kv in layers], axis=0)
    padded = [np.pad(kv, [(0, size - own) for size, own in zip(sizes, kv.shape, strict=True)]) for kv in layers]
    return np.stack(padded)
