"""One turn of a batch by the simulator's costs: the paper's figures 18 to 20, of loads and saves beside computing.

Computing takes what `RooflineCost` says, the same for each layer; the link between host and device has its data sheet's
rate, each way. Which layer waits for which is the engine's own model of it (`kv.costs.pipeline_s`), and `saving_s`.

Not here: measuring the same on an accelerator (`gpu.paper`) or over paced links (`suites.preload`, `suites.save`), the
figures of whole workloads (`paper_figures`).
Source: CachedAttention (Gao et al., USENIX ATC 2024), sections 3.2, 4.3.1 and 4.3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from ca_jax.kv import costs
from ca_jax.launch.simulate import SimulateConfig
from ca_jax.simulate.config import DEVICES, MODELS, Device, RooflineCost, SimModel

Row = tuple[str, str, str, float, float | None]
"""Case, metric, unit, ours, the paper's."""

FLOPS_SHARE = 0.6
"""Share of its operations a second that a prefill reaches here, unless a flag says otherwise: that of the paper's own
360 ms (section 2.3). The share that its times to first token come to is 0.085, by which no load of these figures would
take as long as its prefill."""
READ_BUFFER = 15
"""Layers, of figure 18: with as many the paper hides all of a load (section 4.3.2)."""

_HISTORY_OF_1K = (500, 600, 700, 800, 900)  # Figure 18.
_PRELOADED = {
    0: 0.35,
    5: None,
    10: None,
    READ_BUFFER: 0.61,
}  # Figure 19: by layers of the read buffer, less prefill time.
_ENOUGH = "enough layers"
_PROMPTS = (1000, 1200, 1400, 1600)  # Figure 20.
_SAVED_BESIDE = {"least of these": 0.13, "most of these": 0.15}  # Less time: the paper does not say for which prompts.
_ANSWER_TOKENS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A batch of jobs of the same lengths on one device, all loaded, prefilled, decoded and saved together."""

    model: SimModel
    device: Device
    flops_share: float = FLOPS_SHARE
    bytes_share: float = 0.7
    step_s: float = 0.0
    num_jobs: int = 16
    """As in the paper."""

    def prefill_s(self, history_tokens: int, new_tokens: int) -> float:
        """Seconds of computing new tokens, the histories on the device."""
        return self._cost.prefill_s(history_tokens, new_tokens, self.num_jobs)

    def link_s(self, num_tokens: int) -> float:
        """Seconds that the KV of so many tokens a job is on the link."""
        return self.num_jobs * num_tokens * self.model.token_bytes / self.device.link_bytes_per_s

    def without_preloading_s(self, history_tokens: int, new_tokens: int) -> float:
        """Seconds of a prefill behind its load."""
        return costs.blocking_s(*self._of_layer(history_tokens, new_tokens), self.model.num_layers)

    def preloading_s(self, history_tokens: int, new_tokens: int, read_buffer: int) -> float:
        """Seconds of a prefill beside its load, with a read buffer of so many layers, full as the last job ends."""
        num_layers = self.model.num_layers
        return costs.pipeline_s(*self._of_layer(history_tokens, new_tokens), num_layers, read_buffer)

    def least_read_buffer(self, history_tokens: int, new_tokens: int) -> int:
        """The smallest read buffer, in layers, with which nothing shortens a prefill any more."""
        deepest = self.model.num_layers
        least_s = self.preloading_s(history_tokens, new_tokens, deepest) * (1 + 1e-9)
        depths = range(deepest + 1)
        return next(each for each in depths if self.preloading_s(history_tokens, new_tokens, each) <= least_s)

    def saved_at_end_s(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Seconds of prefill, decoding, and the save of all of it behind them."""
        computing_s = self.prefill_s(0, prompt_tokens) + sum(self._decode_s(prompt_tokens, answer_tokens))
        return computing_s + self.link_s(prompt_tokens + answer_tokens)

    def saved_beside_s(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Seconds of the same with each layer's save, and each decoded token's, beside what is computed next."""
        num_layers = self.model.num_layers
        prefill_layer_s = self.prefill_s(0, prompt_tokens) / num_layers
        computed = [(prefill_layer_s, self.link_s(prompt_tokens) / num_layers)] * num_layers
        computed += [(step_s, self.link_s(1)) for step_s in self._decode_s(prompt_tokens, answer_tokens)]
        return saving_s(computed)

    @property
    def _cost(self) -> RooflineCost:
        return RooflineCost(
            model=self.model,
            device=self.device,
            num_devices=1,
            flops_share=self.flops_share,
            bytes_share=self.bytes_share,
            step_s=self.step_s,
        )

    def _of_layer(self, history_tokens: int, new_tokens: int) -> tuple[float, float]:
        """Load and compute of one layer."""
        num_layers = self.model.num_layers
        return self.link_s(history_tokens) / num_layers, self.prefill_s(history_tokens, new_tokens) / num_layers

    def _decode_s(self, prompt_tokens: int, answer_tokens: int) -> list[float]:
        """Of each step, behind a prompt of so many tokens."""
        contexts = (self.num_jobs * (prompt_tokens + number) for number in range(1, answer_tokens + 1))
        return [self._cost.decode_s(self.num_jobs, context) for context in contexts]


def saving_s(computed: Iterable[tuple[float, float]]) -> float:
    """Seconds until all that is computed is saved, each part's save beginning as it is there and the link is free.

        device    [C0][C1][C2]
        link          [ S0 ][ S1 ][ S2 ]
                  0                     ^ saving_s

    Args:
      computed: seconds of computing each part, and of its save, in order.

    Source: CachedAttention (Gao et al., USENIX ATC 2024), figure 8.
    """
    computed_s = saved_s = 0.0
    for compute_s, save_s in computed:
        computed_s += compute_s
        saved_s = max(saved_s, computed_s) + save_s
    return saved_s


def turn_of(config: SimulateConfig) -> Turn:
    """LLaMA-13B on one of the config's devices, at its shares."""
    return Turn(
        model=MODELS["llama-13b"],
        device=DEVICES[config.device],
        flops_share=FLOPS_SHARE if config.flops_share is None else config.flops_share,
        bytes_share=config.bytes_share,
        step_s=config.step_ms / 1e3,
    )


def _reuse(turn: Turn) -> Iterable[Row]:
    """Figure 18: 1K tokens, by how many of them are history. The paper prints no number of it."""
    recomputed_s = turn.prefill_s(0, 1000)
    for history in _HISTORY_OF_1K:
        case, new = f"{history}/{1000 - history}", 1000 - history
        preloaded_s = turn.preloading_s(history, new, READ_BUFFER)
        yield case, "prefill, recomputing", "s", recomputed_s, None
        yield case, "loading alone", "s", turn.link_s(history), None
        yield case, "prefill of new tokens alone", "s", turn.prefill_s(history, new), None
        yield case, f"prefill, PL-B{READ_BUFFER}", "s", preloaded_s, None
        yield case, "less than recomputing", "%", 1 - preloaded_s / recomputed_s, None


def _preloading(turn: Turn) -> Iterable[Row]:
    """Figure 19: 1K tokens of history, 100 new ones, by layers of the read buffer."""
    off_s = turn.without_preloading_s(1000, 100)
    yield "NO-PL", "prefill", "s", off_s, None
    least = turn.least_read_buffer(1000, 100)
    ways = [(f"PL-B{depth}", depth, paper) for depth, paper in _PRELOADED.items()]
    for case, depth, paper in [*ways, (_ENOUGH, least, None)]:
        time_s = turn.preloading_s(1000, 100, depth)
        yield case, "prefill", "s", time_s, None
        yield case, "less than NO-PL", "%", 1 - time_s / off_s, paper
    yield _ENOUGH, "read buffer", "layers", least, READ_BUFFER


def _saving(turn: Turn) -> Iterable[Row]:
    """Figure 20: prompts of 1K to 1.6K tokens, and 20 steps of decoding."""
    less = []
    for prompt in _PROMPTS:
        blocking_s, beside_s = (each(prompt, _ANSWER_TOKENS) for each in (turn.saved_at_end_s, turn.saved_beside_s))
        case = f"{prompt:,} tokens"
        yield case, "save alone", "s", turn.link_s(prompt + _ANSWER_TOKENS), None
        yield case, "saved at the end", "s", blocking_s, None
        yield case, "saved beside", "s", beside_s, None
        less.append(1 - beside_s / blocking_s)
        yield case, "less than at the end", "%", less[-1], None
    for (case, paper), ours in zip(_SAVED_BESIDE.items(), (min(less), max(less)), strict=True):
        yield case, "less than at the end", "%", ours, paper


_MAKERS: dict[str, Callable[[Turn], Iterable[Row]]] = {"18": _reuse, "19": _preloading, "20": _saving}
FIGURES = tuple(_MAKERS)
"""Figures of one turn."""


def rows(figure: str, config: SimulateConfig) -> Iterable[Row]:
    """A figure's rows. The paper's numbers, of an A100, are beside those of an A100 alone."""
    is_papers = config.device.startswith("a100")
    for case, metric, unit, ours, paper in _MAKERS[figure](turn_of(config)):
        yield case, metric, unit, ours, paper if is_papers else None
