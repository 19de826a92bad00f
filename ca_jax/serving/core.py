"""An engine's parts, put together: what runs, what computes, what is stored, and what they agree on.

Not here: sessions by name, locks, the public API (engine).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

from ca_jax import backend
from ca_jax.config import EngineConfig
from ca_jax.device import warmup
from ca_jax.device.adapters import AdapterSizes, array_bytes
from ca_jax.device.draft_model import DraftModel
from ca_jax.device.measuring import measure_prefill
from ca_jax.device.pages import PoolSize
from ca_jax.device.passes import RunnerSizes
from ca_jax.device.processes import Processes, check_alike
from ca_jax.device.runner import Runner
from ca_jax.device.runtime import ComputeWatch, Runtime
from ca_jax.device.transfer import device_memory_bytes
from ca_jax.device.warmup import Background, Compile, Shapes, compile_all
from ca_jax.errors import check
from ca_jax.kv.layout import check_buffers, kept_window, kv_layout, pool_size
from ca_jax.kv.save import TurnKV
from ca_jax.kv.session_kv import SessionKV
from ca_jax.models.config import ModelConfig
from ca_jax.models.sharding import bytes_per_device, model_sharding
from ca_jax.pretrained import Layout, LoadedModel, Progress, load_model
from ca_jax.private.at_exit import before_pools_end
from ca_jax.recompute import recomputer
from ca_jax.recompute.drift import Drift
from ca_jax.recompute.plan import blend_plan
from ca_jax.serving.adapters import LoadedAdapters
from ca_jax.serving.batch import Batch
from ca_jax.serving.drafts import draft_pool
from ca_jax.serving.prompts import TurnBuilder, chunk_head
from ca_jax.serving.scheduler import Scheduler
from ca_jax.serving.truncator import Truncator
from ca_jax.storage.records import Owner
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.telemetry.timeline import Timeline
from ca_jax.telemetry.wakeup import Wakeup
from ca_jax.turns.text import ChunkSpan

DEFAULT_WINDOW_TOKENS = 4096
"""Largest context window taken unless a larger one is asked for."""
_QUESTION_TOKENS = 64  # Behind a context that is warmed up for: rates say by them what ratio it will have.
_MEASURED_TOKENS = 1024  # Tokens of KV that rates are measured with.
_KEEP_S = 10.0  # How often times to live are looked at while nothing else happens.


class EngineCore:
    """The parts of one engine. Belongs to the engine's thread.

    Raises:
      ValueError: see `Engine`; so is ProcessesError.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        processes: Processes,
        timeline: Timeline,
        wake: Callable[[], None],
        store_wrapper: Callable[[AttentionStore], AttentionStore] | None = None,
        draft_model: LoadedModel | None = None,
    ) -> None:
        if config.special_tokens_in_content and model.tokenizer is not None:
            model = dataclasses.replace(model, tokenizer=model.tokenizer.reading_content())
        _check_states(model, config, processes)
        self.model = model = model.laid_out(layout_of(config))
        self.metrics = EngineMetrics(model_load_s=model.load_s)
        _check_alike(model, config, processes)
        wanted, found = config.weight_dtype, model.weight_dtype
        check(wanted in ("model", found), "weight_dtype of the loaded model", f"{wanted}, as the config says", found)
        self.window = window = config.context_window or min(model.config.steady_positions, DEFAULT_WINDOW_TOKENS)
        most, check_layers = model.config.max_positions, config.blend.check_layers
        num_layers = len(model.config.kv_layers)
        check(window <= most, "context_window", f"at most the model's {most} tokens", window)
        check(
            check_layers <= num_layers, "blend check_layers", f"at most the model's {num_layers} layers", check_layers
        )
        has_states = model.config.recurrence is not None
        check(
            not (has_states and config.store.ssd_codec),
            "ssd_codec",
            "none for a model whose layers keep states, which blocks hold too",
            config.store.ssd_codec,
        )
        layout, overflow, drift = kv_layout(model, config), config.overflow, None
        if overflow is not None:
            overflow.check_window(window)
            if overflow.drift is not None:
                drift = Drift.load(overflow.drift)
                drift.check_model(model.config, model.fingerprint)
            if kept_window(layout, config, window) is not None:
                # Tokens that leave are behind every layer's window: there is nothing to repair.
                overflow = dataclasses.replace(overflow, repair="none")
        self._config = config
        self.scheduler = Scheduler(config.max_batch_size, config.data_parallel_size)
        if draft_model is None and config.draft_model is not None:
            check_may_draft(model.config, config, processes)
            draft_model = load_model(config.draft_model, dtype=config.dtype, weight_dtype=config.weight_dtype)
        drafter = None
        if draft_model is not None:
            check_may_draft(model.config, config, processes)
            check_draft_model(draft_model, model)
            size = draft_pool(draft_model.config, config, window)
            vocab_size = model.config.vocab_size
            drafter = DraftModel(draft_model.config, draft_model.params, size, config.max_draft_tokens, vocab_size)
        self._draft_model, draft_bytes = drafter, 0 if drafter is None else drafter.num_bytes
        sizes = RunnerSizes(
            pool=_pool_size(model, config, window, draft_bytes),
            chunk_tokens=config.max_num_batched_tokens,
            with_attention=overflow is not None and overflow.token_discarder.needs_attention,
            packs_kv=config.kv_rest_dtype == "int8",
            adapters=adapter_sizes(config),
            max_draft_tokens=config.max_draft_tokens,
        )
        self.runner = Runner(model.config, model.params, sizes, timeline=timeline, sharding=model.sharding)
        check_buffers(config, layout, self.runner, draft_bytes)
        self._watch = watch = ComputeWatch(timeline)
        runtime = Runtime(
            config=config, metrics=self.metrics, timeline=timeline, watch=watch, processes=processes, wake=wake
        )
        # KV of other weights, and of other rotary frequencies where those are the window's, is other KV.
        is_steady = window <= model.config.steady_positions
        weights = model.fingerprint if is_steady else f"{model.fingerprint} window {window}"
        blend = config.blend  # With other modes a chunk is a text like others, and its KV that of a prompt's beginning.
        self._chunk_head = head = chunk_head(model, blend.chunk_head) if blend.reuses_chunks else []
        self.kv = SessionKV(
            layout, self.runner, runtime, fingerprint=weights, chunk_head=head, store_wrapper=store_wrapper
        )
        self.truncator = Truncator(overflow, drift, self.kv, self.runner, self.metrics)
        self.adapters = LoadedAdapters(self.runner, processes)
        self.turns = TurnBuilder(model, config, window, self.kv, self.truncator, processes, self.adapters)
        self.batch = Batch(self.scheduler, self.runner, self.kv, self.truncator, runtime, drafter)
        self._processes = processes
        self._warming: Background | None = None
        wants = overflow is not None and overflow.exact_when_idle and self.truncator.repairs
        self.recomputes_when_idle = wants and processes.count == 1 and not sizes.with_attention
        """Whether what a full context takes is computed while there is nothing else to do."""
        self.shares_prefixes = config.share_prefixes
        """Whether a session of which nothing is stored begins with the KV of another that begins alike."""

    def warm_up(
        self,
        max_history_tokens: int | None,
        max_new_tokens: int | None,
        contexts: Sequence[Sequence[int]],
        progress: Progress | None,
    ) -> None:
        """Compiles what turns need, by running it, and measures rates; see `Engine.warmup`. Nothing may run."""
        history = self.window if max_history_tokens is None else min(max_history_tokens, self.window)
        new = self._config.max_num_batched_tokens if max_new_tokens is None else max_new_tokens
        was_warming = self._stop_warming()
        shapes = Shapes(self.runner)
        compile_all(self._functions(shapes, new), progress)
        self.kv.meter.forget()
        for sample in measure_prefill(self.runner, history, new):
            self.kv.meter.add_prefill(*sample)
        self._measure_transfers()
        compile_all(list(self._of_contexts(shapes, contexts)), progress)
        if was_warming:  # What these sizes did not need.
            self.warm_in_background()

    def warm_in_background(self) -> None:
        """Compiles what turns may need in a thread, by the shapes of what it will be given; of one process alone."""
        if self._processes.count == 1:
            shapes = Shapes(self.runner)
            self._warming = warming = Background(self._functions(shapes, self._config.max_num_batched_tokens))
            self.batch.may_check = lambda: not warming.thread.is_alive()

    def _stop_warming(self) -> bool:
        """Ends what is compiled in the background; whether anything was."""
        warming, self._warming = self._warming, None
        if warming is not None:
            warming.close()
        return warming is not None

    def _functions(self, shapes: Shapes, max_new: int) -> list[Compile]:
        of_drafts = [] if self._draft_model is None else self._draft_model.functions()
        return [*warmup.functions_of(shapes, max_new), *of_drafts, *self.truncator.functions(shapes)]

    def _of_contexts(self, shapes: Shapes, contexts: Sequence[Sequence[int]]) -> Iterator[Compile]:
        for chunk_tokens in contexts if self._config.blend.reuses_chunks else ():
            num_tokens = sum(chunk_tokens)
            ratio = self.kv.histories.recompute_ratio(num_tokens, 0, _QUESTION_TOKENS)
            starts = list(itertools.accumulate(chunk_tokens, initial=0))
            exact = [not start and not self._chunk_head for start in starts]
            spans = [ChunkSpan("", *each) for each in zip(starts, chunk_tokens, exact, strict=False)]
            by = partial(blend_plan, self._config.blend, len(self.model.config.kv_layers), num_tokens, 0, spans)
            plan = by(ratio)
            yield from recomputer.functions_of(shapes, plan)
            if self._config.blend.selection == "query" and plan.moves is not None:
                yield from recomputer.functions_of(shapes, by(0.0))
                yield from recomputer.asking_functions(shapes)

    def _measure_transfers(self) -> None:
        """Saves, loads and forgets made-up KV of two lengths, so that there are rates before there are turns."""
        kv, runner = self.kv, self.runner
        key = kv.key("", "rates are measured with this")
        longest = min(_MEASURED_TOKENS, runner.history_buckets[-1])
        for num_tokens in (longest // 4, longest):
            token_ids, layers = [0] * num_tokens, range(len(runner.config.kv_layers))
            saver = kv.write_buffer.begin(TurnKV(key, Owner(), 0))
            saver.add_pass(token_ids, 0, (runner.empty_kv(layer, num_tokens) for layer in layers))
            kv.write_buffer.end(saver)
            kv.write_buffer.collect(wait=True, key=key)
            loaded = kv.store.prepare_load(key, token_ids)
            if loaded is not None:
                kv.histories.measure(loaded)
            kv.drop(key)

    def close(self) -> None:
        """Finishes saves and lets go of memory. No job may run."""
        self._stop_warming()
        self.kv.close()
        self._watch.close()


def layout_of(config: EngineConfig) -> Layout:
    """Where a config has a model's parameters lie."""
    return partial(
        model_sharding,
        data_parallel_size=config.data_parallel_size,
        tensor_parallel_size=config.tensor_parallel_size,
    )


def adapter_sizes(config: EngineConfig) -> AdapterSizes:
    """The room for adapters that a config asks for."""
    return AdapterSizes(config.max_adapters, config.max_adapter_rank)


def _pool_size(model: LoadedModel, config: EngineConfig, window: int, draft_bytes: int) -> PoolSize:
    """As `pool_size`, on the devices there are: by itself it takes no more than a share of what weights leave, and a
    draft model of so many bytes.
    """
    most_bytes = device_memory_bytes()
    if most_bytes is not None:
        num_devices = 1 if model.sharding is None else model.sharding.mesh.size
        taken_bytes = bytes_per_device(model.params) + draft_bytes
        taken_bytes += array_bytes(model.config, adapter_sizes(config), model.dtype, model.sharding)
        most_bytes = (most_bytes - taken_bytes) * num_devices // backend.here().pool_share
    return pool_size(model.config, model.dtype, config, window, most_bytes)


def enable_compile_cache(directory: str | None) -> None:
    """Keeps compiled functions in `directory` between runs, unless jax has been given one already."""
    if directory is None or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_going(engine: weakref.ref[Any], wakeup: Wakeup) -> None:
    """Has a thread keep saves and tiers going while no thread runs the engine, for as long as it lives and is open.

    Its threads end while the interpreter still stands: one that gives up the last hold of an array of the device later
    aborts the process.
    """

    def keep() -> None:
        seen, going = 0, True
        while going:
            seen = wakeup.wait(seen, _KEEP_S)
            alive = engine()
            going = alive is not None and alive.keep()
            del alive

    def close() -> None:
        if (alive := engine()) is not None:
            alive.close()
        wakeup.tell()
        keeper.join()

    keeper = threading.Thread(target=keep, name="ca_jax-keeper", daemon=True)
    before_pools_end(close)
    keeper.start()


def _check_states(model: LoadedModel, config: EngineConfig, processes: Processes) -> None:
    """Checks that nothing is asked for that is not served with layers that keep states."""
    if not model.config.num_states:
        return
    of = f"with {model.config.architecture}, layers of which keep states"
    check(processes.count == 1, f"the processes {of}", "one", processes.count)
    check(config.store.objects_url is None, f"objects_url {of}", "None", config.store.objects_url)
    if config.overflow is not None:
        discarder = config.overflow.token_discarder
        looks = discarder.needs_attention or discarder.needs_kv
        check(not looks, f"discarder {of}", "one that looks at neither attention nor KV", discarder.name)


def check_may_draft(model: ModelConfig, config: EngineConfig, processes: Processes) -> None:
    """Checks that a draft model may be given to an engine of that config.

    Raises:
      ValueError: what it writes could not be checked, or it is not served so.
    """
    with_it = "with a draft model"
    check(config.max_draft_tokens > 0, f"max_draft_tokens {with_it}", "at least 1", config.max_draft_tokens)
    num_devices = config.data_parallel_size * config.tensor_parallel_size
    check(num_devices == 1, f"devices of the model {with_it}", "one", num_devices)
    check(processes.count == 1, f"processes {with_it}", "one", processes.count)
    wanted = "one whose layers keep no states, which cannot go back behind a wrong guess"
    check(not model.num_states, f"model {with_it}", wanted, model.architecture)
    looks = config.overflow is not None and config.overflow.token_discarder.needs_attention
    name = None if config.overflow is None else config.overflow.token_discarder.name
    check(not looks, f"discarder {with_it}", "one that looks at no attention, which is not measured in drafts", name)


def check_draft_model(draft: LoadedModel, model: LoadedModel) -> None:
    """Checks that a draft model's guesses are tokens of the model: of as many, or of equal tokenizers.

    Raises:
      ValueError: they are not, or its layers keep states, or it is on a mesh.
    """
    check(not draft.config.num_states, "draft_model", "one whose layers keep no states", draft.config.architecture)
    check(draft.sharding is None, "draft_model", "on one device", draft.name)
    wanted, found = model.config.vocab_size, draft.config.vocab_size
    if draft.tokenizer is None or model.tokenizer is None:
        check(found == wanted, "draft_model", f"of the model's vocabulary, {wanted} tokens", found)
        return
    of_each = [each.tokenizer.backend.get_vocab(with_added_tokens=True) for each in (draft, model)]  # type: ignore[union-attr]
    if of_each[0] != of_each[1]:
        spelled = [{number: token for token, number in vocab.items()} for vocab in of_each]
        numbers = range(max(wanted, found))
        at = min(number for number in numbers if spelled[0].get(number) != spelled[1].get(number))
        token, other = spelled[1].get(at), spelled[0].get(at)
        check(False, "draft_model", f"of the model's vocabulary, with token {at} {token!r}", other)


def _check_alike(model: LoadedModel, config: EngineConfig, processes: Processes) -> None:
    """Checks that all processes serve the same, and that none needs what is another's."""
    if processes.count == 1:
        return
    store = dataclasses.replace(config.store, ssd_dir=None, ssd_url=None)
    same = dataclasses.replace(config, compile_cache_dir=None, store=store)
    described = {"model config": repr(model.config), "engine config": repr(same)}
    check_alike(processes, {"weights": model.fingerprint, **described})
    if config.overflow is not None:
        discarder = config.overflow.token_discarder
        check(not discarder.needs_kv, f"the processes of discarder {discarder.name}", "one", processes.count)
