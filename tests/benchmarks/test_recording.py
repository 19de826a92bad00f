"""What is recorded of a round: the turns in it, one behind the other, and nothing else."""

import json

import pytest

from benchmarks.harness import BenchError
from benchmarks.recording import Recorder


def take_turns(recorder):
    """Two turns, and something between them that is none."""
    timeline = recorder.timeline
    for name in ("one", "other"):
        with recorder.turn(name), timeline.span("compute", f"prefill of {name}"):
            pass
        with timeline.span("compute", "between turns"):
            pass


def names(trace):
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [event["name"] for event in events if event["ph"] == "X"]


def test_a_trace_has_the_turns_of_the_round_alone(tmp_path):
    trace = tmp_path / "new" / "trace.json"
    recorder = Recorder(trace_out=trace)
    take_turns(recorder)
    with recorder.round():
        take_turns(recorder)
    take_turns(recorder)
    recorder.write(title="", caption="")
    assert names(trace) == ["one", "prefill of one", "other", "prefill of other"]


def test_a_figure_has_the_first_turn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "benchmarks.recording.plot_timeline",
        lambda path, spans, **text: drawn.append((path, [span.name for span in spans], text)),
    )
    recorder = Recorder(plot_out=tmp_path / "turn.png")
    with recorder.round():
        take_turns(recorder)
    recorder.write(title="tiny", caption="here")
    assert drawn == [(tmp_path / "turn.png", ["one", "prefill of one"], {"title": "tiny: one", "caption": "here"})]


def test_a_profile_is_of_the_round_and_needs_no_spans(tmp_path):
    recorder = Recorder(profile_dir=tmp_path / "profile")
    assert recorder.is_wanted
    assert not recorder.timeline.enabled
    take_turns(recorder)
    assert not (tmp_path / "profile").exists()
    with recorder.round():
        take_turns(recorder)
    recorder.write(title="", caption="")
    assert [path for path in (tmp_path / "profile").rglob("*") if path.is_file()]


def test_a_round_without_turns_leaves_nothing_to_write(tmp_path):
    recorder = Recorder(trace_out=tmp_path / "trace.json")
    with recorder.round():
        pass
    with pytest.raises(BenchError, match="a recorded round must have at least one turn, got none"):
        recorder.write(title="", caption="")
    assert not (tmp_path / "trace.json").exists()
