"""The plot of acceptance by position."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence


def acceptance_plot(series: Mapping[str, Sequence[float]], title: str) -> bytes:
    """Bars of per-position acceptance, one colour a series.

    Args:
        series: P(draft token k accepted), k from 0, by the name shown in the legend.
        title: Shown above.

    Returns:
        A PNG image.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    positions = max(len(values) for values in series.values())
    figure = Figure(figsize=(max(5.5, 1.5 * positions + 2), 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        bars = axes.bar([k + offset for k in range(len(values))], values, width * 0.92, label=name)
        axes.bar_label(bars, [f"{value:.0%}" for value in values], padding=2, fontsize=8)
    axes.set_title(title)
    axes.set_xlabel("Position in the draft")
    axes.set_ylabel("Accepted")
    axes.set_xticks(range(positions), [str(k + 1) for k in range(positions)])
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
