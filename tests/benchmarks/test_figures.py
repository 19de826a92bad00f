"""The figure of a timeline: what is drawn where, and what cannot be drawn."""

import matplotlib.image
import pytest
from matplotlib.axes import Axes

from benchmarks.figures import plot_timeline
from ca_jax.telemetry.timeline import Span

TURN = [
    Span("engine", "prefill", 2.0, 2.5),
    *(Span("load", "layer", 2.0 + 0.1 * i, 2.1 + 0.1 * i, {"layer": i}) for i in range(3)),
    *(Span("compute", "layer", 2.1 + 0.1 * i, 2.2 + 0.1 * i, {"layer": i}, 1) for i in range(3)),
    Span("compute", "pass", 2.1, 2.4, {}, 1),
    Span("save", "a name too long for its bar", 2.35, 2.36),
]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws spans; gives the bars as (start ms, duration ms, top) and the labels as (text, y)."""
    bars, texts = [], []
    bar, text = Axes.broken_barh, Axes.text

    def record_bar(axes, xranges, yrange, **kwargs):
        bars.extend((round(start, 6), round(width, 6), round(yrange[0], 6)) for start, width in xranges)
        return bar(axes, xranges, yrange, **kwargs)

    def record_text(axes, x, y, label, **kwargs):
        texts.append((label, y))
        return text(axes, x, y, label, **kwargs)

    monkeypatch.setattr(Axes, "broken_barh", record_bar)
    monkeypatch.setattr(Axes, "text", record_text)

    def draw(spans):
        plot_timeline(tmp_path / "turn.png", spans, title="a turn", caption="made up")
        return bars, texts

    return draw


def test_every_span_is_a_bar_in_the_rows_of_its_track(drawn, tmp_path):
    bars, texts = drawn(reversed(TURN))
    assert sorted(bars, key=lambda bar: (bar[2], bar[0])) == [
        (0.0, 500.0, 0.06),  # engine
        (0.0, 100.0, 1.46),  # load
        (100.0, 100.0, 1.46),
        (200.0, 100.0, 1.46),
        (100.0, 300.0, 2.86),  # compute: the pass, and below it its layers
        (100.0, 100.0, 3.86),
        (200.0, 100.0, 3.86),
        (300.0, 100.0, 3.86),
        (350.0, 10.0, 5.26),  # save
    ]
    labels = [text for text, _ in sorted(texts, key=lambda text: text[1])]
    assert labels == ["prefill", "0", "1", "2", "pass", "0", "1", "2"], "the name too long for its bar is left out"
    height, width, _ = matplotlib.image.imread(tmp_path / "turn.png").shape
    assert width == 9 * 150
    assert height < width


@pytest.mark.parametrize(
    ("spans", "message"), [([], "got none"), ([Span("load", "x", 1.0, 1.0)], "all of them at one instant")]
)
def test_what_cannot_be_drawn_is_refused(tmp_path, spans, message):
    with pytest.raises(ValueError, match=message):
        plot_timeline(tmp_path / "turn.png", spans, title="", caption="")
    assert not (tmp_path / "turn.png").exists()
