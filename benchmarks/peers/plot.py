"""The picture of a run: bars of tokens per second, prefill on one side and decode on the other."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hipfire.base.errors import UnsupportedError
from peers.contest import Case, Series, ratio_of_medians
from peers.report import OWN, PEER, Run, pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PEER_COLOR, OWN_COLOR = "#9aa5b1", "#d9480f"
_BAR = 0.38
_TITLES = {"pp": "Prefill", "tg": "Decode"}


def check_matplotlib() -> None:
    """Raise UnsupportedError if matplotlib is not installed."""
    if util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "the picture needs matplotlib, which is not installed", hint="pip install matplotlib"
        )


def draw(run: Run, path: Path) -> None:
    """Write the picture of a run as SVG; equal runs give equal bytes.

    Raises UnsupportedError if matplotlib is not installed.
    """
    check_matplotlib()
    # optional, and slow to import
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with rc_context({"svg.hashsalt": "cpu_peers", "svg.fonttype": "path", "font.size": 9}):
        groups = {kind: longest(run, kind) for kind in _TITLES}
        rows = max(map(len, groups.values()))
        figure = Figure(figsize=(10, 1.2 + 0.62 * rows), layout="constrained")
        for axes, (kind, found) in zip(figure.subplots(1, len(groups)), groups.items(), strict=True):
            _bars(axes, _TITLES[kind], found)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")


def longest(run: Run, kind: str) -> list[tuple[str, Case, Series, Series]]:
    """Return (label, case, own series, peer's) of each arm in its longest case of a kind."""
    found: dict[str, tuple[str, Case, Series, Series]] = {}
    for match in run.matches:
        for arm, case, own, other in pairs(match):
            label = f"{match.title.partition(',')[0]}\n{arm.format} against {other.arm.format}"
            key = f"{match.title} {arm.name}"
            if case.kind == kind and (key not in found or case.tokens > found[key][1].tokens):
                found[key] = (label, case, own, other)
    return list(found.values())


def _bars(axes: Axes, title: str, found: list[tuple[str, Case, Series, Series]]) -> None:
    for shift, name, color in ((-_BAR / 2, PEER, PEER_COLOR), (_BAR / 2, OWN, OWN_COLOR)):
        figures = [(own if name == OWN else other).tok_s for _, _, own, other in found]
        errors: Any = [
            [each.median - each.low for each in figures],
            [each.high - each.median for each in figures],
        ]
        axes.barh(
            [place + shift for place in range(len(found))],
            [each.median for each in figures],
            _BAR,
            xerr=errors,
            color=color,
            label=name,
            error_kw={"elinewidth": 0.8, "capsize": 2},
        )
    for place, (_, _, own, other) in enumerate(found):
        text = f" {ratio_of_medians(own, other):.2f}x"
        axes.annotate(text, (own.tok_s.high, place + _BAR / 2), va="center", fontweight="bold")
    axes.set_yticks(range(len(found)), [label for label, _, _, _ in found])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    names = " and ".join(dict.fromkeys(case.name for _, case, _, _ in found))
    axes.set_title(f"{title} ({names}), tokens per second", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
