"""Compiling what serving needs before anybody waits for it, in a thread of its own or on the engine's.

A function is compiled by the shapes of what it will be given, and where those lie: nothing is run, no buffer is read or
taken. jax finds it when it is called.

Not here: what is compiled for recomputing (recompute.recomputer), what is measured (runner, serving.core).
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from ca_jax.device import page_steps, state_steps, steps
from ca_jax.device.buckets import pad_to
from ca_jax.device.runner import Runner
from ca_jax.device.state_steps import Cells
from ca_jax.models.paged_attention import Rows

_LOG = logging.getLogger(__name__)

Compile = Callable[[], Any]
"""Compiles a function."""


class Shapes:
    """What a runner's functions will be given, as shapes."""

    def __init__(self, runner: Runner) -> None:
        self._sharding = sharding = runner.sharding
        self._put = None if sharding is None else sharding.replicated
        self.runner = runner
        """Whose."""
        self.params = self.of(runner.params)
        """Of the model."""
        self.layers = [self.of(layer) for layer in runner.layers]
        """Parameters of each layer."""
        self.outer = self.of(runner.outer)
        """The other parameters."""
        self.pages = self.of(runner.pool.buffers)
        """Of each layer with KV of its own."""
        self.states = self.of(runner.states.buffers)
        """Of each layer that keeps one."""
        self.tables = self.of(runner.tables)
        """Rotations of all places, of each of `config.ropes`."""
        self.num_parts, self.most_pages = runner.pool.size.num_parts, runner.pool.size.most_pages
        self._embedded: dict[int, Any] = {}

    def of(self, arrays: Any) -> Any:
        """Of a tree of arrays."""
        on_mesh = self._sharding is not None
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if on_mesh else None), arrays
        )

    def small(self, *shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        """Of what is put on all devices."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._put)

    def rows(self, num_rows: int, num_tokens: int) -> Any:
        """`Rows` of so many, and places for tokens of each part."""
        table, starts = self.small(num_rows, self.most_pages), self.small(num_rows + self.num_parts)
        return Rows(table, starts, self.small(self.num_parts * num_tokens))  # type: ignore[arg-type]

    def cells(self, num_rows: int) -> Cells:
        """Cells of so many rows."""
        return Cells(self.small(num_rows), self.small(num_rows))  # type: ignore[arg-type]

    def adapters(self, *shape: int) -> jax.ShapeDtypeStruct | None:
        """Of slots of adapters; None where there is no room for any."""
        return None if self.runner.adapters.are_off else self.small(*shape)

    def compiled(self, function: Any, *args: Any, **options: Any) -> Any:
        """Compiles a function; what it gives."""
        lowered = function.lower(*args, **options)
        found = lowered.compile()
        if self._sharding is None:
            return self.of(lowered.out_info)
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            lowered.out_info,
            found.output_shardings,
        )

    def embedded(self, width: int) -> Any:
        """Embeddings of so many tokens of each part, what gives which is compiled."""
        if width not in self._embedded:
            tokens = self.small(self.num_parts, width)
            self._embedded[width] = self.compiled(steps.embed, self.runner.config, self.outer, tokens, self._sharding)
        return self._embedded[width]


def functions_of(shapes: Shapes, max_new: int) -> list[Compile]:
    """What passes of so many new tokens at most need, and decoding, sampling, loading and saving.

    Args:
      shapes: of the runner's.
      max_new: new tokens in one pass.
    """
    runner = shapes.runner
    config, sharding, sampler = runner.config, runner.sharding, runner.sampler
    width, num_slots, scalar = runner.step_tokens, runner.pool.size.num_rows, shapes.small()
    each_part = num_slots // shapes.num_parts
    most = pad_to(runner.token_buckets, min(max_new, runner.chunk_tokens))
    table, first = shapes.small(shapes.most_pages), dict[tuple[int, int, int], Any]()
    attention = {"with_attention": runner.with_attention, "sharding": sharding}

    def layer(layer: int, num_tokens: int) -> None:
        x, rows, kind = shapes.embedded(width), shapes.rows(num_slots, width), config.kind_of(layer)
        if kind.is_recurrent:
            given = shapes.layers[layer], x, shapes.states[0], shapes.cells(num_slots), rows, num_tokens, kind
            shapes.compiled(state_steps.layer_step, config, *given, sharding=sharding)
            return
        given_out = compile_layer(shapes, layer, num_tokens, with_attention=runner.with_attention)
        if kind.has_kv:
            first[config.kv_shape(layer)] = given_out[2]

    def whole(num_tokens: int) -> None:
        tokens, rows = shapes.small(shapes.num_parts, width), shapes.rows(num_slots, width)
        given = config, shapes.params, shapes.pages, tokens, rows, shapes.tables, num_tokens, each_part
        adapters = shapes.adapters(shapes.num_parts, width)
        shapes.compiled(steps.model_step, *given, packs=runner.packs_kv, adapters=adapters, **attention)

    def stack() -> None:
        of_each = [first[shape] for shape in config.kv_shapes]
        shapes.compiled(steps.stack_layers, config, of_each, runner.packs_kv, sharding)

    def decode(size: int) -> None:
        num_rows = size * shapes.num_parts
        tokens, rows = shapes.small(num_rows), shapes.rows(num_rows, size)
        if config.num_states:
            of_states = shapes.states, shapes.cells(num_rows), tokens, rows, shapes.tables
            given_out = config, shapes.params, shapes.pages, *of_states
            shapes.compiled(state_steps.decode, *given_out, packs=runner.packs_kv, sharding=sharding)
            return
        given = config, shapes.params, shapes.pages, tokens, rows, shapes.tables
        adapters = shapes.adapters(num_rows)
        shapes.compiled(steps.decode, *given, packs=runner.packs_kv, adapters=adapters, **attention)

    def check(size: int) -> None:
        tokens = shapes.small(size * shapes.num_parts)
        given = config, shapes.params, shapes.pages, tokens, shapes.rows(num_slots, size), shapes.tables
        adapters = shapes.adapters(shapes.num_parts, size)
        options = {"one_each": False, "packs": runner.packs_kv, "sharding": sharding, "adapters": adapters}
        logits, found, *_ = shapes.compiled(steps.decode, *given, **options)
        if size not in runner.batch_buckets:
            sampler.compile(shapes.compiled, shapes.small, logits, found)

    def draw(size: int) -> None:
        index = shapes.small(size * shapes.num_parts)
        logits, tokens = shapes.compiled(
            steps.row_logits, config, shapes.outer, shapes.embedded(width), index, sharding
        )
        sampler.compile(shapes.compiled, shapes.small, logits, tokens)

    def fill(layer: int, size: int) -> None:
        kv = runner.loaded_shape(layer, size)
        shapes.compiled(page_steps.fill_pages, shapes.pages[layer], kv, table, scalar, scalar, scalar, sharding)

    def turn_end() -> None:
        state, part = runner.states.restored_shapes, None if sharding is None else scalar
        shapes.compiled(state_steps.read_state, shapes.states, scalar, sharding=sharding)
        shapes.compiled(state_steps.write_state, shapes.states, scalar, state, part, sharding=sharding)

    def read() -> None:
        for layer in runner.shapes:
            given = shapes.pages[layer], table, scalar, runner.read_tokens, runner.packs_kv, sharding
            shapes.compiled(page_steps.read_pages, *given)
        shapes.compiled(page_steps.copy_page, shapes.pages, scalar, scalar, scalar, sharding)

    sizes = [size for size in runner.token_buckets if size <= most]
    found: list[Compile] = [partial(shapes.embedded, width)]
    found += [partial(layer, kind, size) for size in sizes for kind in runner.kinds]
    found += [partial(step, size) for size in runner.batch_buckets for step in (decode, draw)]
    found += [turn_end] if config.num_states else []
    found += [partial(check, size) for size in runner.draft_buckets]
    found += [partial(whole, size) for size in sizes if size <= runner.whole_tokens]
    fills = (partial(fill, layer, size) for size in runner.history_buckets[1:] for layer in runner.shapes)
    return [*found, stack, *fills, read]


def compile_layer(shapes: Shapes, layer: int, num_tokens: int, *, with_attention: bool) -> Any:
    """Compiles a layer with KV over so many tokens; what it gives, see `steps.layer_step`."""
    runner, width, kind = shapes.runner, shapes.runner.step_tokens, shapes.runner.config.kind_of(layer)
    x, rows = shapes.embedded(width), shapes.rows(runner.pool.size.num_rows, width)
    pages = shapes.pages[runner.config.kv_number(layer)]
    given = runner.config, shapes.layers[layer], x, pages, rows, shapes.tables[kind.rope], num_tokens, kind
    options = {"packs": runner.packs_kv, "sharding": runner.sharding, "with_attention": with_attention}
    adapters = shapes.adapters(shapes.num_parts, width)
    return shapes.compiled(
        steps.layer_step, *given, runner.pool.size.num_rows // shapes.num_parts, adapters=adapters, **options
    )


def compile_all(
    functions: Sequence[Compile],
    progress: Callable[[str, int, int], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Compiles functions one after the other, unless it is to stop."""
    for done, function in enumerate(functions, start=1):
        if stopped():
            return
        function()
        if progress is not None:
            progress("compile", done, len(functions))


class Background:
    """Compiles functions in a thread, until it is closed, or let go of. An interpreter ends when that has."""

    def __init__(self, functions: Sequence[Compile]) -> None:
        closed = threading.Event()

        def run() -> None:
            try:
                compile_all(functions, stopped=closed.is_set)
            except Exception:  # A turn that needs the function raises it again.
                _LOG.warning("what serving needs could not be compiled ahead", exc_info=True)
            atexit.unregister(end)

        def end() -> None:
            closed.set()
            thread.join()

        self.thread = thread = threading.Thread(target=run, name="ca_jax-warmup", daemon=True)
        """What compiles."""
        self.close = end
        """Ends it; waits for what is being compiled."""
        weakref.finalize(self, closed.set)
        atexit.register(end)
        thread.start()
