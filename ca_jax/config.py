"""What a user may say about the engine. One config per owner; each field is read by that owner alone.

Not here: the model's architecture (`models.config`), sizes of the store (`storage.config`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from ca_jax.errors import check, is_count
from ca_jax.overflow.config import OverflowConfig
from ca_jax.storage.config import StoreConfig

READ_BUFFERS = ("auto", "all", "off")
"""What `EngineConfig.read_buffer` may be besides a number."""
QUEUE_ORDERS = ("shortest", "arrival")
"""See `EngineConfig.queue_order`."""
WEIGHT_DTYPES = ("model", "int8", "int4")
"""What `EngineConfig.weight_dtype` may be."""
KV_REST_DTYPES = ("model", "int8")
"""What `EngineConfig.kv_rest_dtype` may be."""


BLEND_MODES = ("blend", "reuse", "prefix", "recompute")
"""What becomes of the stored KV of chunks. `blend`: CacheBlend, it is put at its new positions and the tokens that
deviate most are computed anew. `reuse`: full reuse, it is put at its new positions and nothing of it is computed anew.
`prefix`: prefix caching, chunks are ordinary text, and only KV that was computed with the very same text before it is
used. `recompute`: full recompute, no stored KV is used for a prompt with chunks."""

Selection = Literal["hkvd", "spread", "query", "first"]
"""Which tokens of chunks are computed anew. `hkvd`: the paper's, those whose KV deviates most (High KV Deviation),
fewer from layer to layer. `spread`: the first two of every chunk and others evenly apart; all the rest are moved as
these have moved, by a linear map in each layer and head. `query`: those that the question attends to most in the first
quarter of the layers, and others evenly apart, by which the rest is moved likewise. `first`: the first ones of every
chunk, to compare with."""

SELECTIONS: tuple[Selection, ...] = get_args(Selection)
"""All of them."""

ChunkHead = Literal["template", "none"]
"""What a chunk's KV is computed behind. `template`: what the model's chat template writes before a conversation's first
message, see `serving.prompts.chunk_head`; none of that is stored. `none`: nothing."""

CHUNK_HEADS: tuple[ChunkHead, ...] = get_args(ChunkHead)
"""All of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendConfig:
    """How a prompt with chunks is served: what becomes of the KV of chunks that was stored before.

    Raises:
      ValueError: a value outside its range; the message says what must be.

    Source: CacheBlend (Yao et al., EuroSys 2025), sections 4 and 5.1; what it is compared with: section 7.1.
    """

    mode: str = "blend"
    """What becomes of the stored KV of chunks, one of `BLEND_MODES`."""
    recompute_ratio: float | None = None
    """Share of the chunks' tokens that is computed anew, in the mean over the layers behind the check layers, in
    [0, 1]. None: what measured rates say that loading hides, see `costs.choose_ratio`."""
    min_recompute_ratio: float = 0.15
    """Least ratio that is chosen by measured rates, in [0, 1]. The paper saw next to no loss of quality from there on
    (section 7.3)."""
    check_layers: int = 1
    """First layers in which all tokens are computed, to see which deviate; `hkvd` alone has any."""
    selection: Selection = "spread"
    """Which tokens are computed anew, a `Selection`: what answered most (`docs/design/blending.md`)."""
    chunk_head: ChunkHead = "template"
    """What a chunk's KV is computed behind, a `ChunkHead`. A text's first token takes much attention and says nothing:
    behind a head no chunk has such a token."""

    def __post_init__(self) -> None:
        ratio, least = self.recompute_ratio, self.min_recompute_ratio
        check(self.mode in BLEND_MODES, "blend mode", f"one of {', '.join(BLEND_MODES)}", self.mode)
        check(ratio is None or 0 <= ratio <= 1, "recompute_ratio", "a share in [0, 1] or None", ratio)
        check(0 <= least <= 1, "min_recompute_ratio", "a share in [0, 1]", least)
        check(is_count(self.check_layers, 1), "check_layers", "a number of layers >= 1", self.check_layers)
        check(self.chunk_head in CHUNK_HEADS, "chunk_head", f"one of {', '.join(CHUNK_HEADS)}", self.chunk_head)
        check(self.selection in SELECTIONS, "blend selection", f"one of {', '.join(SELECTIONS)}", self.selection)

    @property
    def reuses_chunks(self) -> bool:
        """Whether the stored KV of chunks is used."""
        return self.mode in ("blend", "reuse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model.

    Raises:
      ValueError: a size that is not positive.
    """

    dtype: str | None = None
    """Of weights and KV: `float32` or `bfloat16`. None: float32 on CPU (bfloat16 is slow there), else bfloat16."""
    weight_dtype: str = "model"
    """Of weights as they are computed with: `model`, what the files hold, or `int8` or `int4`, rounded to so many bits.
    In float32 with a scale for each 32 inputs (in 4 bits an offset, too), of which decoding on a CPU then reads a
    quarter or a sixth of the bytes. In bfloat16 they are held so on the device: in 8 bits with a scale for each output,
    in 4 with a scale and an offset for each 32 inputs. What makes keys and values of latents and tables that are only
    looked up are not; with `int4` tied tables are in 8 bits."""
    kv_rest_dtype: str = "model"
    """Of KV in DRAM and on SSD: `model`, as it was computed, or `int8` with a scale for each head and token: half the
    bytes of bfloat16, and a history that is loaded is rounded. KV of one kind is never served for the other."""
    context_window: int | None = None
    """Most tokens a session may hold, answer included; None: the model's, at most 4,096."""
    overflow: OverflowConfig | None = dataclasses.field(default_factory=OverflowConfig)
    """What happens when a conversation outgrows the window. None: it is an error, or ends the answer."""
    blend: BlendConfig = dataclasses.field(default_factory=BlendConfig)
    """How prompts with chunks are served: what of the chunks' KV is used as it is stored."""
    special_tokens_in_content: bool = False
    """Whether special tokens that messages and chunks of text spell become those tokens, so that their writer may
    end a message and begin another's. False: only the chat template makes special tokens. A prompt of `Engine.generate`
    is read as a whole either way."""
    max_batch_size: int = 8
    """Most jobs that run together."""
    max_num_batched_tokens: int = 512
    """Most tokens of a step: of prompts, several in one pass, and of jobs that decode along with them."""
    max_draft_tokens: int = 7
    """Most tokens of an answer that are guessed ahead, from what its context says already, and checked in one step: an
    answer that quotes comes faster, and is the same. How many are checked is what gives most tokens a second by what
    was measured, often none. 0: none ever are."""
    draft_model: str | None = None
    """A smaller model that guesses tokens, too, where by what was measured that pays: named as a model is, and of the
    same tokens. Answers stay the same. It is on one device, and so is the model then. None: what is guessed is guessed
    from the context alone."""
    page_tokens: int = 128
    """Tokens of a page of KV on the devices, a multiple of 8. Contexts take pages as they grow."""
    kv_pool_gib: float | None = None
    """Pages of KV on the devices, GiB in all. None: room for `max_batch_size` full windows, or half of what the weights
    leave of the devices' memory where that is less, on a CPU a quarter. A job begins once what it may come to need is
    free."""
    tensor_parallel_size: int = 1
    """Devices that share the heads of the model, of its KV and of its weights. A size that divides the query heads, and
    divides the KV heads or is a multiple of them."""
    data_parallel_size: int = 1
    """Parts that running jobs are in, each on `tensor_parallel_size` devices of its own, which hold all weights."""
    keep_pages: bool = True
    """Keep conversations' pages on the devices between turns, until running jobs need them: what is there still is not
    loaded. With `kv_rest_dtype="int8"` none are kept, since what is loaded is rounded."""
    queue_order: str = "shortest"
    """Which of the waiting jobs of a priority whose KV is at hand goes first: `shortest`, that which takes least up to
    its first token, by what of it is stored and where, and by measured rates, but none is overtaken more than 32 times;
    or `arrival`. Several processes of one engine go by arrival."""
    max_tpot_ms: float | None = None
    """Most milliseconds between two tokens of a decoding job for the sake of others' prefill: passes are shortened to
    what measured rates say fits. None: passes of `max_num_batched_tokens`."""
    read_buffer: int | str = "auto"
    """Layers of a history that are loaded ahead of the one that computes, from before its job begins: a number, `all`,
    `auto` (where `read_buffer_gib` is set the paper's `S_buf` from measured rates, else all), or `off` (first all are
    loaded, then all computed)."""
    read_buffer_gib: float | None = None
    """Cap of that buffer, GiB in all: each device holds its heads' share. Two layers come on top, one that is computed
    on and one that is filled; and between the passes of a prompt that takes several, its history. None: room for all
    layers of a full context window."""
    write_buffer_gib: float = 1.0
    """Cap of new KV on the devices that waits to be saved, GiB in all. Where it is full no prefill begins."""
    async_save: bool = True
    """Save while computing; False saves at the end of a turn, which waits for it."""
    recompute_if_faster: bool = True
    """Recompute a stored history, or its end, where measured rates say that this is faster than to load it."""
    share_prefixes: bool = True
    """Begin new sessions with the stored KV of their tenant's that begin with the same tokens, its blocks shared."""
    save_group_tokens: int = 64
    """Decoded tokens are saved in groups of this many, and at the end of a turn."""
    compile_cache_dir: str | None = "~/.cache/ca_jax/xla"
    """Where compiled functions are kept between runs; None turns that off. A directory set in jax already is left."""
    max_adapters: int = 0
    """Most LoRA adapters that may be loaded at a time, see `Engine.load_adapter`. The room for all is there, and
    computed with in each step, whether they are loaded or not; 0: there is none, and nothing is computed for any."""
    max_adapter_rank: int = 16
    """Largest rank of an adapter's matrices: all are padded to it."""
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)
    """The AttentionStore."""

    def __post_init__(self) -> None:
        check(self.dtype in (None, "float32", "bfloat16"), "dtype", "float32, bfloat16 or None", self.dtype)
        check(self.weight_dtype in WEIGHT_DTYPES, "weight_dtype", " or ".join(WEIGHT_DTYPES), self.weight_dtype)
        check(self.kv_rest_dtype in KV_REST_DTYPES, "kv_rest_dtype", " or ".join(KV_REST_DTYPES), self.kv_rest_dtype)
        sizes = ("context_window", "max_batch_size", "max_num_batched_tokens", "save_group_tokens")
        for name in (*sizes, "tensor_parallel_size", "data_parallel_size"):
            value = getattr(self, name)
            check(value is None or value > 0, name, "positive", value)
        num_tokens, num_slots, num_parts = self.max_num_batched_tokens, self.max_batch_size, self.data_parallel_size
        check(num_tokens % 64 == 0, "max_num_batched_tokens", "a multiple of 64", num_tokens)
        check(num_tokens > num_slots, "max_num_batched_tokens", f"above max_batch_size={num_slots}", num_tokens)
        check(is_count(self.max_draft_tokens), "max_draft_tokens", "a number of tokens >= 0", self.max_draft_tokens)
        is_page = is_count(self.page_tokens, 8) and self.page_tokens % 8 == 0
        check(is_page, "page_tokens", "a multiple of 8", self.page_tokens)
        pool = self.kv_pool_gib
        check(pool is None or 0 < pool < math.inf, "kv_pool_gib", "a number > 0", pool)
        wanted = f"a multiple of data_parallel_size={num_parts}"
        check(num_slots % num_parts == 0, "max_batch_size", wanted, num_slots)
        if self.overflow is not None and self.context_window is not None:
            self.overflow.check_window(self.context_window)
        check(self.queue_order in QUEUE_ORDERS, "queue_order", " or ".join(QUEUE_ORDERS), self.queue_order)
        is_known = is_count(self.read_buffer) or self.read_buffer in READ_BUFFERS
        wanted = f"a number of layers >= 0 or one of {', '.join(READ_BUFFERS)}"
        check(is_known, "read_buffer", wanted, self.read_buffer)
        check(is_count(self.max_adapters), "max_adapters", "a number >= 0", self.max_adapters)
        check(is_count(self.max_adapter_rank, 1), "max_adapter_rank", "a rank >= 1", self.max_adapter_rank)
        has_both = self.max_adapters and self.store.objects_url is not None
        check(not has_both, "max_adapters", "0 with an objects_url: replicas share no adapters", self.max_adapters)
        tpot_ms = self.max_tpot_ms
        check(tpot_ms is None or 0 < tpot_ms < math.inf, "max_tpot_ms", "a number > 0", tpot_ms)
        for name in ("read_buffer_gib", "write_buffer_gib"):
            value = getattr(self, name)
            check(value is None or 0 <= value < math.inf, name, "a number >= 0", value)
        wanted = "None with read_buffer off, which loads all of a history before it computes"
        check(
            self.read_buffer != "off" or self.read_buffer_gib is None, "read_buffer_gib", wanted, self.read_buffer_gib
        )
