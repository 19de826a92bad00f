"""Size on paper: what a model and an engine's config take of each device, and how many sessions each tier holds.

    python -m ca_jax.launch.plan --model_preset=llama2-70b --tensor_parallel_size=4

The arithmetic is the engine's own: where each weight lies (`models.sharding`), lengths that are padded to (`buckets`),
staging (`kv.layout`), blocks (`KVLayout`) and what they take on SSD. Nothing is read, written or put on a device.

Not here: how long anything takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import rich.console
from absl import app, flags

from ca_jax.config import EngineConfig
from ca_jax.device.adapters import array_bytes
from ca_jax.device.buckets import history_buckets
from ca_jax.errors import check
from ca_jax.kv.layout import kept_window, pool_bytes, pool_size, rest_layout, state_bytes, wanted_bytes
from ca_jax.kv.snapshots import NUM_KEPT, StateForm
from ca_jax.launch.flags import DTYPES, ConfigFlags, refuse
from ca_jax.launch.script import make_table, note, run
from ca_jax.models.config import ModelConfig
from ca_jax.models.presets import PRESETS
from ca_jax.models.sharding import ModelSharding, model_sharding
from ca_jax.models.small_weights import form_of, parts_of
from ca_jax.models.weights import parameter_slots, resolve_dtype
from ca_jax.overflow.config import OverflowConfig
from ca_jax.serving.core import DEFAULT_WINDOW_TOKENS, adapter_sizes
from ca_jax.serving.drafts import draft_pool
from ca_jax.storage.codec import KVCodec
from ca_jax.storage.config import GIB

_READ = {
    *("model_preset", "dtype", "device_gib", "context_window", "session_tokens", "max_batch_size", "page_tokens"),
    *("max_num_batched_tokens", "tensor_parallel_size", "data_parallel_size", "read_buffer_gib", "write_buffer_gib"),
    *(
        "draft_model",
        "kv_pool_gib",
        "weight_dtype",
        "kv_rest_dtype",
        "dram_gib",
        "ssd_gib",
        "ssd_driver",
        *ConfigFlags(OverflowConfig()).names(),
    ),
}  # Flags that sizes depend on.
_ENGINE = ConfigFlags(EngineConfig(), without=("dtype",))  # A plan may be of a dtype that no engine computes in.

FLAG_NAMES = ("model_preset", "dtype", "device_gib", "session_tokens", *_ENGINE.names())
"""Flags that `define` defines."""


@dataclasses.dataclass(frozen=True)
class Tier:
    """What one tier (HBM, DRAM or SSD) holds of sessions' KV."""

    name: str
    num_bytes: int
    """Of it, over all devices."""
    num_tokens: int
    """Whose KV fits."""
    num_sessions: int
    """That fit, each of `Plan.session_tokens`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes of each device, and sessions of each tier. Made by `make_plan`."""

    num_devices: int
    """Of the mesh."""
    device_bytes: int
    """Memory of each."""
    window: int
    """Tokens of a context at most."""
    session_tokens: int
    """Tokens of a session, as tiers are counted in."""
    total_weight_bytes: int
    """All weights, each counted once."""
    token_bytes: int
    """KV of one token in all layers, each counted once, as it is computed."""
    stored_token_bytes: int
    """The same as it is stored."""
    state_bytes: int
    """What a row holds of layers that keep a state, each counted once; 0 where none does."""
    snapshot_bytes: int
    """The same as it is stored behind a turn. A session has two: `kv.snapshots`."""
    parts: Mapping[str, int]
    """What is taken of each device, by what it is for: see `kv.layout.wanted_bytes`; and the states of rows."""
    tiers: tuple[Tier, ...]
    """HBM (the pool of KV and what is left), DRAM and SSD."""

    @property
    def left_bytes(self) -> int:
        """What is left of each device: activations and compiled code come out of it, and it would hold more slots."""
        return self.device_bytes - sum(self.parts.values())


def make_plan(
    config: ModelConfig,
    engine: EngineConfig,
    *,
    dtype: str,
    device_bytes: int,
    session_tokens: int | None = None,
    draft: ModelConfig | None = None,
) -> Plan:
    """Lays a model out on accelerators that need not exist.

    Args:
      config: the model's architecture.
      engine: how it is served: sizes of the mesh, slots, buffers and the store.
      dtype: of weights and KV: float32, bfloat16 or float16.
      device_bytes: memory of each device.
      session_tokens: of each session that tiers are counted in; None: a full context window.
      draft: the draft model's architecture; None: there is none.

    Raises:
      ValueError: heads that cannot be divided so, a window beyond the model's, an unknown dtype, or more than a device
        holds; the message says which sizes would do.
    """
    window = engine.context_window or min(config.steady_positions, DEFAULT_WINDOW_TOKENS)
    check(
        window <= config.max_positions, "context_window", f"at most the model's {config.max_positions} tokens", window
    )
    session_tokens = window if session_tokens is None else session_tokens
    check(session_tokens > 0, "session_tokens", "positive", session_tokens)
    layout = rest_layout(config, dtype, engine)
    sharding = _sharding(config, engine, engine.tensor_parallel_size)
    draft_bytes = 0
    if draft is not None:
        draft_bytes = _weight_bytes(draft, engine, dtype, None)
        draft_bytes += pool_bytes(draft, dtype, draft_pool(draft, engine, window), None)
    wanted = _wanted_bytes(config, engine, dtype, sharding, window)
    wanted |= {"the draft model": draft_bytes} if draft_bytes else {}
    left_bytes = device_bytes - sum(wanted.values())
    if left_bytes < 0:
        parts = ", ".join(f"{num_bytes / GIB:.2f} for {name}" for name, num_bytes in wanted.items())
        raise ValueError(
            f"a device's memory must be {sum(wanted.values()) / GIB:.2f} GiB ({parts}), got {device_bytes / GIB:.2f}; "
            f"{_what_fits(config, engine, dtype, window, device_bytes - draft_bytes)}"
        )
    num_data, num_kv = (1, 1) if sharding is None else (sharding.num_data, sharding.num_kv)
    kv_bytes = left_bytes + wanted["the pool of KV"]
    token_bytes = config.kv_bytes_per_token(resolve_dtype(dtype).itemsize)
    part_bytes = token_bytes // num_kv  # Each device has the part of a token that its heads are.
    num_tokens, num_sessions = (num_data * (kv_bytes // (part_bytes * num)) for num in (1, session_tokens))
    stored_tokens, kept = session_tokens, kept_window(layout, engine, window)
    if kept is not None:
        stored_tokens = min(session_tokens, kept + layout.block_tokens - 2)

    form = StateForm.of(config, dtype, layout)
    snapshot_blocks = layout.num_blocks(form.num_tokens) if config.num_states else 0
    coded_bytes = layout.stored_block_bytes
    if engine.store.ssd_codec is not None:
        coded_bytes = KVCodec.load(engine.store.ssd_codec).stored_bytes(layout)

    def of_blocks(name: str, num_bytes: int, block_bytes: int) -> Tier:
        num_blocks = num_bytes // block_bytes
        num_sessions = num_blocks // (layout.num_blocks(stored_tokens) + NUM_KEPT * snapshot_blocks)
        return Tier(name, num_bytes, num_blocks * layout.block_tokens, num_sessions)

    return Plan(
        num_devices=engine.data_parallel_size * engine.tensor_parallel_size,
        device_bytes=device_bytes,
        window=window,
        session_tokens=session_tokens,
        total_weight_bytes=_weight_bytes(config, engine, dtype, None),
        token_bytes=token_bytes,
        stored_token_bytes=layout.token_bytes,
        state_bytes=sum(math.prod(shape) * of.itemsize for shape, of in form.shapes),
        snapshot_bytes=snapshot_blocks * layout.block_bytes,
        parts=wanted,
        tiers=(
            Tier("HBM", kv_bytes * num_data * num_kv, num_tokens, num_sessions),
            of_blocks("DRAM", engine.store.dram_bytes, layout.block_bytes),
            of_blocks("SSD", engine.store.ssd_bytes, coded_bytes),
        ),
    )


def _sharding(config: ModelConfig, engine: EngineConfig, tensor_parallel_size: int) -> ModelSharding | None:
    sizes = {"data_parallel_size": engine.data_parallel_size, "tensor_parallel_size": tensor_parallel_size}
    return model_sharding(config, **sizes, on_paper=True)


def _wanted_bytes(
    config: ModelConfig, engine: EngineConfig, dtype: str, sharding: ModelSharding | None, window: int
) -> dict[str, int]:
    """What an accelerator of the mesh is asked for."""
    sizes, size = adapter_sizes(engine), pool_size(config, dtype, engine, window)
    wanted = wanted_bytes(
        engine,
        rest_layout(config, dtype, engine),
        max_tokens=history_buckets(window)[-1],
        num_parts=1 if sharding is None else sharding.num_kv,
        param_bytes=_weight_bytes(config, engine, dtype, sharding) + array_bytes(config, sizes, dtype, sharding),
        pool_bytes=pool_bytes(config, dtype, size, sharding),
    )
    of_states = state_bytes(config, dtype, size, sharding)
    return wanted | ({"the states of rows": of_states} if of_states else {})


def _weight_bytes(config: ModelConfig, engine: EngineConfig, dtype: str, sharding: ModelSharding | None) -> int:
    """Of the weights on each device; without a mesh, of all."""
    num_bytes, itemsize = 0, resolve_dtype(dtype).itemsize
    for slot in parameter_slots(config):
        form = form_of(config, slot, engine.weight_dtype, dtype)
        if form is None:
            shape = slot.shape if sharding is None else sharding.of_slot(slot).shard_shape(slot.shape)
            num_bytes += math.prod(shape) * itemsize
            continue
        for part in parts_of(slot, form):
            shape = part.shape if sharding is None else sharding.of(part.axes, part.units).shard_shape(part.shape)
            num_bytes += math.prod(shape) * part.dtype.itemsize
    return num_bytes


def _what_fits(config: ModelConfig, engine: EngineConfig, dtype: str, window: int, device_bytes: int) -> str:
    """The smallest size of tensor parallelism with which everything fits, as the end of a message."""
    for size in range(1, config.num_heads + 1):
        try:
            sharding = _sharding(config, engine, size)
        except ValueError:  # Heads are not divided so.
            continue
        if sum(_wanted_bytes(config, engine, dtype, sharding, window).values()) <= device_bytes:
            return f"tensor_parallel_size={size} would do"
    return "no tensor_parallel_size would do"


def print_plan(plan: Plan, title: str, console: rich.console.Console) -> None:
    """Shows a plan: a table of each device's memory, and one of the tiers."""
    is_packed = plan.stored_token_bytes != plan.token_bytes
    stored = f", {plan.stored_token_bytes / (1 << 20):.2f} stored" if is_packed else ""
    note(
        console,
        f"{title}: {plan.total_weight_bytes / 1e9:.1f} GB of weights, {plan.token_bytes / (1 << 20):.2f} MiB of KV a "
        f"token{stored}; {plan.num_devices} {'device' if plan.num_devices == 1 else 'devices'} of "
        f"{plan.device_bytes / GIB:.1f} GiB, {plan.device_bytes * plan.num_devices / 1e9:.0f} GB in all",
        None,
    )
    if plan.state_bytes:
        of_row, of_turn = (num_bytes / (1 << 20) for num_bytes in (plan.state_bytes, plan.snapshot_bytes))
        said = (
            f"{of_row:.2f} MiB of states a row; behind each of a session's last {NUM_KEPT} turns {of_turn:.2f} stored"
        )
        note(console, said, None)
    parts = {
        name.removeprefix("the ").removesuffix("_gib").replace("_", " "): size for name, size in plan.parts.items()
    }
    parts["left, activations included"] = plan.left_bytes
    of_device = [(name, f"{num_bytes:,}", f"{num_bytes / GIB:.2f}") for name, num_bytes in parts.items()]
    console.print(make_table(("of each device", ">bytes", ">GiB"), of_device))
    tiers = [
        (tier.name, f"{tier.num_bytes / GIB:.1f}", f"{tier.num_tokens:,}", f"{tier.num_sessions:,}")
        for tier in plan.tiers
    ]
    columns = ("tier", ">GiB", ">tokens", f">sessions of {plan.session_tokens:,} tokens")
    console.print(make_table(columns, tiers))
    note(console, "HBM: the pool of KV, and as much more as what is left would hold.", None)


def define() -> None:
    """Defines the flags."""
    flags.DEFINE_enum("model_preset", None, sorted(PRESETS), "Architecture that a plan is made for.")
    text = "Of weights and KV in a plan, by default bfloat16; of weights that are converted, by default float32."
    flags.DEFINE_enum("dtype", None, [*DTYPES, "float16"], text)
    flags.DEFINE_float("device_gib", 80.0, "Memory of each device, GiB.", lower_bound=0.0)
    text = "Tokens of the sessions that tiers are counted in; by default a full context window."
    flags.DEFINE_integer("session_tokens", None, text)
    _ENGINE.define()


def main(_: Sequence[str] = ()) -> None:
    """Makes the plan that parsed flags ask for, and prints it."""
    values = flags.FLAGS
    if values.model_preset is None:
        raise app.UsageError(f"--model_preset must be one of {', '.join(sorted(PRESETS))}; got none")
    refuse(set(FLAG_NAMES) - _READ, "a plan")
    dtype, engine = values.dtype or "bfloat16", _ENGINE.read()
    if engine.draft_model not in (None, *PRESETS):
        raise app.UsageError(f"--draft_model must be one of {', '.join(sorted(PRESETS))}; got {engine.draft_model}")
    plan = make_plan(
        PRESETS[values.model_preset],
        engine,
        dtype=dtype,
        device_bytes=int(values.device_gib * GIB),
        session_tokens=values.session_tokens,
        draft=None if engine.draft_model is None else PRESETS[engine.draft_model],
    )
    print_plan(plan, f"{values.model_preset} in {dtype}", rich.console.Console(soft_wrap=True))


if __name__ == "__main__":
    define()
    run(main, errors=(ValueError,))
