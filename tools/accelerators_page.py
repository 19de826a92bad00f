"""Writes results/accelerators.md: what compilers say of the engine's steps, of what `make accelerators` has left.

    .venv/bin/python -m tools.accelerators_page

The words are results/accelerators/notes.md: its sections `## memory`, `## copies` and so on come behind their tables,
the first lines before and all other sections after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables import make_markdown
from tools.pages import Report, assemble, read_json, read_notes, table, write_page

_GIB = 1 << 30
_MIB = 1 << 20


def main() -> None:
    """See the module."""
    write_page(__doc__, "accelerators.md", page)


def page(results: Path) -> str:
    """The page of a directory of results."""
    folder = results / "accelerators"
    return make_page(read_notes(folder / "notes.md"), read_json(folder / "steps.json"))


def make_page(notes: Mapping[str, str], report: Report) -> str:
    """The page of these words, and of a report of all steps.

    Raises:
      ValueError: the report lacks what a table shows.
    """
    try:
        parts = [(name, title, list(lines(report))) for name, (title, lines) in SECTIONS.items()]
    except KeyError as error:
        raise ValueError(f"steps.json must have {error.args[0]}, got none") from error
    return assemble(notes, (), parts)


def _of_versions(report: Report) -> Iterator[str]:
    yield from make_markdown(
        ("chip", "compiled by"), ((each["chip"], each["by"]) for each in report["versions"].values())
    )


def _of_defects(report: Report) -> Iterator[str]:
    found: dict[tuple[str, str, str], list[Any]] = {}
    for step in report["step"].values():
        for check, said in step["wrong"].items():
            found.setdefault((check, step["step"].split(",")[0], step["chip"]), []).append((step, said))
    rows = [
        (check, name, chip, ", ".join(dict.fromkeys(step["preset"] for step, _ in each)), f"{_step_of(each[0])}")
        for (check, name, chip), each in sorted(found.items())
    ]
    total, wrong = len(report["step"]), sum(bool(step["wrong"]) for step in report["step"].values())
    yield f"{total} compiled steps, {total - wrong} of them as they should be."
    if rows:
        yield from ("", *make_markdown(("check", "step", "chip", "models", "for instance"), rows))


def _step_of(pair: tuple[Any, str]) -> str:
    step, said = pair
    return f"{step['preset']}, {step['step']}: `{said}`"


def _of_memory(report: Report) -> Iterator[str]:
    of_setups: dict[str, list[Any]] = {}
    for step in report["step"].values():
        of_setups.setdefault(step["setup"], []).append(step)
    rows = []
    for setup, steps in of_setups.items():
        parts = steps[0]["parts"]
        planned = parts["the weights"] + parts["the pool of KV"]
        buffers = sum(parts.values()) - planned
        taken = max(step["figures"]["argument_bytes"] for step in steps)
        largest = max(steps, key=lambda step: step["figures"]["temp_bytes"])
        temp_bytes = largest["figures"]["temp_bytes"]
        left = steps[0]["memory_bytes"] - sum(parts.values()) - temp_bytes
        numbers = (parts["the weights"], parts["the pool of KV"], buffers, taken)
        others = (
            f"{taken / planned - 1:+.2%}",
            f"{temp_bytes / _MIB:,.0f} MiB, {largest['step']}",
            f"{left / _GIB:.2f}",
        )
        rows.append((setup, *(f"{number / _GIB:.2f}" for number in numbers), *others))
    headings = ("of each device, GiB", "weights", "pool", "buffers", "compiler: weights and pool", "off", "temporaries")
    yield from table((*headings, "left"), rows)
    yield ""
    unfit = [(each["setup"], f"{each['memory_bytes'] / _GIB:.2f}", each["said"]) for each in report["unfit"].values()]
    yield from make_markdown(("does not fit, and is refused", ">GiB there", "what `plan` says"), unfit)


def _of_copies(report: Report) -> Iterator[str]:
    rows = []
    for step in _with_pages(report):
        figures = step["figures"]
        donated, alias = figures["donated_bytes"], figures["alias_bytes"]
        copies, copied = figures["num_copies"], figures["copied_bytes"]
        numbers = (f"{donated / _MIB:,.1f}", f"{alias / _MIB:,.1f}", f"{figures['temp_bytes'] / _MIB:,.1f}")
        copies = f"{copies}, {copied / _MIB:,.0f} MiB" if copies else "0"
        rows.append((f"{step['setup']}, {step['step']}", *numbers, f"{figures['num_pool_copies']}", copies))
    headings = ("step", "donated, MiB", "in place", "temporaries", "copies of a layer's pages")
    yield from table((*headings, "all copies of 1 MiB and more"), rows)


def _with_pages(report: Report) -> Iterator[Mapping[str, Any]]:
    """Steps that take pages, but for those that differ from others only in what they take or give beside them."""
    for step in report["step"].values():
        if step["figures"]["donated_bytes"] and not step["step"].endswith("int8"):
            yield step


def _of_collectives(report: Report) -> Iterator[str]:
    rows = []
    for step in report["step"].values():
        sent = step["figures"]["collectives"]
        if step["devices"] > 1 and sent:
            kinds = [_sent(sent.get(kind)) for kind in ("all-reduce", "all-gather")]
            others = sum(each["count"] for kind, each in sent.items() if kind not in ("all-reduce", "all-gather"))
            rows.append((f"{step['setup']}, {step['step']}", *kinds, f"{others}"))
    yield from table(("step", "all-reduces", "all-gathers", "others"), rows)
    single = [step for step in report["step"].values() if step["devices"] == 1]
    num_sent = sum(bool(step["figures"]["collectives"]) for step in single)
    yield from ("", f"On one device: {num_sent} of {len(single)} steps have any.")


def _sent(sent: Mapping[str, Any] | None) -> str:
    return f"{sent['count']} of {sent['largest_bytes'] / 1024:,.0f} KiB at most" if sent else "0"


def _of_counts(report: Report) -> Iterator[str]:
    rows = []
    for step in report["step"].values():
        moved, least = step["figures"].get("moved_bytes"), step.get("product_bytes")
        if moved is None or not least:
            continue
        times = (step["flops"] / step["rates"]["flops"], least / step["rates"]["bytes_per_s"])
        waits = "memory" if times[1] > times[0] else "arithmetic"
        ratio = f"{moved / least:.2f}"
        numbers = (f"{step['figures']['num_launches']}", f"{least / 1e6:,.1f}", f"{moved / 1e6:,.1f}", ratio)
        rows.append((f"{step['setup']}, {step['step']}", *numbers, waits))
    yield from table(("step", "kernels", "MB: least", "MB: read and written", "ratio", "it waits for"), rows)


def _of_estimates(report: Report) -> Iterator[str]:
    rows = []
    for step in report["step"].values():
        figures, rates = step["figures"], step["rates"]
        if figures["flops"] is None or not step["read_bytes"]:
            continue
        ideal_s = max(step["flops"] / rates["flops"], step["read_bytes"] / rates["bytes_per_s"])
        of_xla = (figures["flops"] / 1e9, figures["accessed_bytes"] / 1e6, figures["optimal_s"] * 1e3)
        own = (step["flops"] / 1e9, step["read_bytes"] / 1e6, ideal_s * 1e3)
        numbers = (f"{mine:,.2f}; {xla:,.2f}" for mine, xla in zip(own, of_xla, strict=True))
        share = f"{ideal_s / figures['optimal_s']:.0%}" if not figures["num_unknown"] else "unknown"
        rows.append((f"{step['setup']}, {step['step']}", *numbers, share, f"{figures['num_unknown']}"))
    headings = ("step", "GFLOP: least; XLA", "MB: least; XLA", "ms: roofline; XLA", "of the roofline")
    yield from table((*headings, "not estimated"), rows)


def _of_kernels(report: Report) -> Iterator[str]:
    rows = []
    for step in report["step"].values():
        figures, kernel = step["figures"], step["figures"]["kernel"]
        if kernel is not None and not step["step"].endswith("int8"):
            numbers = (figures["num_kernels"], figures["num_launches"], *kernel.values())
            rows.append((f"{step['setup']}, {step['step']}", *(f"{number:,}" for number in numbers)))
    headings = ("step", "calls", "launches in all", "registers of a thread", "spilled, bytes a thread")
    yield from table((*headings, "shared memory, bytes"), rows)


SECTIONS: dict[str, tuple[str, Callable[[Report], Iterable[str]]]] = {
    "versions": ("What compiled", _of_versions),
    "defects": ("What is wrong", _of_defects),
    "memory": ("Memory and fit", _of_memory),
    "copies": ("What stays in place, and what is copied", _of_copies),
    "collectives": ("What is sent between devices", _of_collectives),
    "counts": ("What a GPU is given, by count", _of_counts),
    "estimates": ("What XLA thinks a TPU takes", _of_estimates),
    "kernels": ("Our kernel on GPUs", _of_kernels),
}
"""Titles and tables, by the titles of their words in the notes."""


if __name__ == "__main__":
    main()
