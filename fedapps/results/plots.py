"""Figures of runs. Drawing needs the extra ``plots`` (matplotlib), and no display.

Colours are those of Okabe and Ito, told apart with colour-blind eyes too; a method keeps its colour and its line style
from figure to figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedapps.errors import FedAppsError
from fedapps.methods import METHODS
from fedapps.results.report import LOSS, Run, group_runs, measures_of
from fedapps.results.series import Series, series_of, train_loss
from fedapps.results.summary import RunStatus, smaller_is_better
from fedapps.results.units import byte_unit
from fedapps.results.views import TEST_VIEWS, VALIDATION_VIEWS, Measure, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

LOG_FROM = 20.0
"""Ratio of totals between methods from which their axis is logarithmic."""

HIGH = 0.9
"""Share from which an axis shows what is missing to 1 on a logarithmic scale: else 0.95 and 0.99 look the same."""

HIGH_TICKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
"""Ticks of such an axis; it ends at the last but three if nothing lies above."""

_DPI = 150


def plot_run(run: Run, path: Path) -> None:
    """Draw what one run measured over rounds, a panel a metric, a curve for each model and data.

    Args:
        run: The run.
        path: File to write, for example ``plot.png``; its ending chooses the format.

    Raises:
        FedAppsError: matplotlib is missing, or the run has no row to draw.
    """
    metrics = dict.fromkeys([*(measure.metric for measure in measures_of([run])), LOSS])
    panels: list[tuple[str, dict[str, dict[int, float]]]] = []
    for metric in metrics:
        curves = {
            measure.where: curve
            for view in (*TEST_VIEWS, *VALIDATION_VIEWS)
            if (curve := run.measured(measure := Measure(metric, view, str(run.clients_measured or ""))))
        }
        if metric == LOSS and (train := train_loss(run)):
            curves["training loss on the clients"] = train
        if curves:
            panels.append((metric, curves))
    if not panels:
        raise _nothing_to_draw([run])
    looks = {name: Look(place) for place, name in enumerate(dict.fromkeys(n for _, curves in panels for n in curves))}
    figure, axes = _figure(len(panels))
    for axis, (quantity, curves) in zip(axes, panels, strict=True):
        for name, curve in curves.items():
            axis.plot(list(curve), list(curve.values()), label=name, **looks[name].style(len(curve)))
        _label(axis, "round", quantity)
        _whole_numbers(axis)
        _scale_values(axis, quantity, [np.array(list(curve.values())) for curve in curves.values()])
    status = run.summary["status"]
    note = "" if status == RunStatus.COMPLETED else f" ({status})"
    figure.suptitle(f"{run.method} on {run.task}, seed {run.settings.get('seed', 0)}{note}", fontsize=11)
    _finish(figure, path)


class Over(StrEnum):
    """What a measure is drawn over."""

    ROUNDS = "rounds"
    """Rounds."""
    BYTES = "bytes"
    """Payload of training rounds, both ways, all clients."""
    SECONDS = "seconds"
    """Time in training rounds."""


def plot_compare(
    runs: Sequence[Run], path: Path, target: float | None = None, over: Sequence[Over] = tuple(Over)
) -> None:
    """Draw every measure over rounds, over bytes and over seconds, a row a measure and a line a method.

    A line is the mean, its band the standard deviation over seeds. Bytes and seconds are those of training rounds. A method
    that sends no model is a level over bytes.

    Args:
        runs: The runs; those that differ in the seed only form one line. A row holds the methods that have its measure.
        path: File to write; its ending chooses the format.
        target: Value drawn as a horizontal line, of the metric that the runs are judged by.
        over: A column each.

    Raises:
        FedAppsError: matplotlib is missing, or no run has a measure.
    """
    plot_comparisons({", ".join(dict.fromkeys(run.task for run in runs)): runs}, path, target, over)


def plot_comparisons(
    comparisons: Mapping[str, Sequence[Run]],
    path: Path,
    target: float | None = None,
    over: Sequence[Over] = tuple(Over),
    views: Sequence[View] = (*TEST_VIEWS, *VALIDATION_VIEWS),
) -> None:
    """Draw several comparisons as `plot_compare` does, one below the other.

    Args:
        comparisons: Title -> runs.
        path: File to write; its ending chooses the format.
        target: As there.
        over: A column each.
        views: What is drawn.

    Raises:
        FedAppsError: matplotlib is missing, or the runs of a comparison have no measure of these views.
    """
    rows: list[tuple[str, Sequence[Run], Measure, float | None]] = []
    for title, runs in (comparisons or {"": []}).items():
        measures = [measure for measure in measures_of(runs) if measure.view in views]
        if not measures:
            raise _nothing_to_draw(runs)
        front = f"{title}: " if len(comparisons) > 1 else ""
        aim = {measures[0].metric: target}
        rows += [(front + measure.where, runs, measure, aim.get(measure.metric)) for measure in measures]
    figure, axes = _figure(len(over), rows=len(rows), sharey=True)
    for number, (title, runs, measure, aim_of_row) in enumerate(rows):
        row = axes[number * len(over) : (number + 1) * len(over)]
        _draw_measure(row, runs, measure, aim_of_row, over)
        row[0].set_title(title, fontsize=10, loc="left")
    several = any(len(group) > 1 for runs in comparisons.values() for group in group_runs(runs).values())
    title = "" if len(comparisons) > 1 else next(iter(comparisons))
    note = "mean ± standard deviation over seeds" if several else ""
    figure.suptitle(": ".join(text for text in (title, note) if text), fontsize=11)
    _finish(figure, path)


def _draw_measure(
    axes: Sequence[Axes], runs: Sequence[Run], measure: Measure, target: float | None, over: Sequence[Over]
) -> None:
    groups = group_runs(runs)
    series = {label: line for label, group in groups.items() if (line := series_of(group, measure)) is not None}
    looks = choose_looks({label: group[0].method for label, group in groups.items()})
    totals = {
        Over.ROUNDS: {label: line.rounds for label, line in series.items()},
        Over.BYTES: {label: line.payload for label, line in series.items() if groups[label][0].shares_model},
        Over.SECONDS: {label: line.seconds for label, line in series.items()},
    }
    for axis, quantity in zip(axes, over, strict=True):
        if totals[quantity]:
            _SCALES[quantity](axis, totals[quantity])
        _scale_values(axis, measure.metric, [line.mean[line.rounds > 0] for line in series.values()])
        for label, line in series.items():
            if label in totals[quantity]:
                _draw_band(axis, totals[quantity][label], line, _legend_text(label, groups[label]), looks[label])
            else:
                _draw_level(axis, line, looks[label])
        if target is not None:
            axis.axhline(target, color="0.35", linewidth=0.9, linestyle=(0, (2, 2)), label=f"target {target:g}")
    axes[0].set_ylabel(measure.metric)
    _leave_initial_model_out(axes[0], measure.metric, series.values())


def _leave_initial_model_out(axis: Axes, metric: str, lines: Iterable[Series]) -> None:
    """End a plain axis with the values after round 0: that of the initial model may be so far off that it hides the others."""
    later = [(line.mean + sign * line.std)[line.rounds > 0] for line in lines for sign in (-1, 1)]
    values = np.concatenate(later)
    values = values[np.isfinite(values)]
    if axis.get_yscale() != "linear" or not len(values):
        return
    margin = 0.05 * (float(values.max() - values.min()) or 1.0)
    least, most = axis.get_ylim()
    if smaller_is_better(metric):
        axis.set_ylim(least, min(most, float(values.max()) + margin))
    else:
        axis.set_ylim(max(least, float(values.min()) - margin), most)


def _scale_values(axis: Axes, metric: str, lines: Sequence[np.ndarray]) -> None:
    """Choose the vertical scale: that of `HIGH_TICKS` for shares close to 1, a logarithmic one for losses far apart."""
    finite = np.concatenate([line[np.isfinite(line)] for line in lines])
    if not len(finite):
        return
    least, most = float(finite.min()), float(finite.max())
    if smaller_is_better(metric):
        if least > 0 and most >= LOG_FROM * least:
            axis.set_yscale("log")
    elif least >= 0 and HIGH <= most <= 1:
        ticks = [tick for tick in HIGH_TICKS if tick <= max(most, HIGH_TICKS[-4])]
        # Half of what is missing at the last tick: room for 1 itself, which such a scale cannot show.
        nothing = (1 - ticks[-1]) / 2
        axis.set_yscale(
            "function",
            functions=(lambda share: -np.log10(np.maximum(1 - share, nothing)), lambda place: 1 - 10.0**-place),
        )
        axis.set_yticks([*ticks, 1 - nothing], [*(f"{tick:g}" for tick in ticks), "1" if most > 1 - nothing else ""])
        axis.minorticks_off()
        axis.set_ylim(max(t for t in HIGH_TICKS if t <= least), 1 - nothing)


def plot_distance(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    path: Path,
    *,
    sent: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    ylabel: str = r"distance to the optimum $\|\theta^t - \theta^\star\|$",
) -> None:
    """Draw distances to the optimum over rounds, and over bytes, on a logarithmic scale.

    Args:
        panels: Data set -> method -> distances of rounds 0, 1, ...; those that are not positive and finite are gaps.
        path: File to write; its ending chooses the format.
        sent: Data set -> method -> bytes sent until the end of rounds 0, 1, ...: a second panel for each data set.
        ylabel: Label of the vertical axis.

    Raises:
        FedAppsError: matplotlib is missing, or there is no panel.
    """
    if not panels:
        raise _nothing_to_draw([])
    looks = choose_looks({label: label for curves in panels.values() for label in curves})
    figure, axes = _figure(2, rows=len(panels)) if sent else _figure(len(panels))
    scales = [(None, _scale_rounds), *([(sent, _scale_bytes)] if sent else [])]
    for axis, ((name, curves), (totals, scale)) in zip(axes, product(panels.items(), scales), strict=True):
        across = {
            label: np.arange(len(distances)) if totals is None else np.array(totals[name][label], dtype=float)
            for label, distances in curves.items()
        }
        for label, distances in curves.items():
            values = np.array(distances, dtype=float)
            values[~(np.isfinite(values) & (values > 0))] = np.nan
            axis.plot(across[label], values, label=label, **looks[label].style(len(values)))
        axis.set_yscale("log")
        axis.set_title(name, fontsize=10)
        scale(axis, across)
        axis.set_ylabel(ylabel if axis in axes[:: 2 if sent else len(panels)] else "")
    _finish(figure, path)


def plot_gains(gains: Mapping[str, Mapping[str, Mapping[int, float]]], path: Path, *, quantity: str) -> None:
    """Draw each client's gain over the reference methods, a panel a reference, clients in the order of their gain.

    Args:
        gains: Reference -> method -> partition -> gain; positive is better.
        path: File to write; its ending chooses the format.
        quantity: What the gain is measured in, for the vertical axis.

    Raises:
        FedAppsError: matplotlib is missing, or there is no gain.
    """
    if not gains:
        raise _nothing_to_draw([])
    looks = choose_looks({label: label.split(" ")[0] for lines in gains.values() for label in lines})
    figure, axes = _figure(len(gains), sharey=True)
    for axis, (reference, lines) in zip(axes, gains.items(), strict=True):
        for label, values in lines.items():
            ordered = sorted(values.values())
            axis.plot(np.arange(1, len(ordered) + 1), ordered, label=label, **looks[label].style(len(ordered)))
        axis.axhline(0, color="0.35", linewidth=0.9)
        axis.set_title(f"gain over {reference}", fontsize=10)
        _label(
            axis,
            "clients, each on its own test data, least gain first",
            f"gain in {quantity} of personal models" if axis is axes[0] else "",
        )
        _whole_numbers(axis)
    _finish(figure, path)


class Look(NamedTuple):
    """How a line looks."""

    place: int  # place of its method in the order of all methods: chooses colour, marker and line style
    variant: int = 0  # number among several lines of the method: changes the line style

    @property
    def color(self) -> str:
        """Colour of the line and its band."""
        return COLORS[self.place % len(COLORS)]

    def style(self, points: int) -> dict[str, Any]:
        """Give the arguments of `Axes.plot`.

        Args:
            points: Number of points of the line; about a dozen get a marker.

        Returns:
            Keyword arguments.
        """
        return {
            "color": self.color,
            "linestyle": LINES[(self.place + self.variant) % len(LINES)],
            "marker": MARKERS[self.place % len(MARKERS)],
            "markersize": 3.5,
            "markevery": max(1, points // 12),
            "linewidth": 1.6,
        }


def choose_looks(methods: Mapping[str, str]) -> dict[str, Look]:
    """Choose the look of each line: by place in the registry, so that a method looks the same in every figure.

    Args:
        methods: Label of a line -> its method. Methods outside the registry follow in alphabetical order.

    Returns:
        Label -> look.
    """
    known = [method.name for method in METHODS]
    order = known + sorted(set(methods.values()) - set(known))
    variants = dict.fromkeys(order, -1)
    looks = {}
    for label, method in methods.items():
        variants[method] += 1
        looks[label] = Look(order.index(method), variants[method])
    return looks


def _draw_band(axis: Axes, x: np.ndarray, line: Series, label: str, look: Look) -> None:
    if axis.get_xscale() == "log":
        # The initial model has cost nothing, which such an axis cannot show: the line starts at round 1.
        x = np.where(x > 0, x, np.nan)
    axis.plot(x, line.mean, label=label, **look.style(len(x)))
    low, high = line.mean - line.std, line.mean + line.std
    axis.fill_between(x, low, high, color=look.color, alpha=0.15, linewidth=0)


def _draw_level(axis: Axes, line: Series, look: Look) -> None:
    """Draw the last value of a method that sends nothing, for comparison."""
    axis.axhline(line.mean[-1], color=look.color, linestyle=look.style(1)["linestyle"], linewidth=1.6)


def _legend_text(label: str, runs: Sequence[Run]) -> str:
    notes = [f"{len(runs)} runs"] if len(runs) > 1 else []
    open_ended = sum(run.summary["status"] != RunStatus.COMPLETED for run in runs)
    notes += [f"{open_ended} not completed"] if open_ended else []
    return f"{label} ({', '.join(notes)})" if notes else label


def _figure(panels: int, *, rows: int = 1, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """Make a figure of some panels a row outside pyplot, which would look for a display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise FedAppsError(
            "figures", expected="matplotlib", got=str(error), do="pip install 'fedapps[plots]'"
        ) from error
    figure = NewFigure(figsize=(4.2 * panels + 0.6, 3.3 * rows + 0.6), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, panels, sharey="row" if sharey else False, squeeze=False).flat)


def _label(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(visible=True, color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _whole_numbers(axis: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def is_wide(lines: Iterable[np.ndarray]) -> bool:
    """Tell whether lines end so far apart that a linear axis would hide the shorter ones.

    Args:
        lines: Growing totals, one array a line.

    Returns:
        Whether the largest end is at least `LOG_FROM` times the smallest positive one.
    """
    ends = [float(line[-1]) for line in lines if line[-1] > 0]
    return bool(ends) and max(ends) >= LOG_FROM * min(ends)


def _scale_rounds(axis: Axes, lines: Mapping[str, np.ndarray]) -> None:  # noqa: ARG001 - one call for all scales
    _label(axis, "round", "")
    _whole_numbers(axis)


def _scale_bytes(axis: Axes, lines: Mapping[str, np.ndarray]) -> None:
    text = "payload of training, down + up, all clients"
    if is_wide(lines.values()):
        _logarithmic(axis, text, lambda value: f"{value / byte_unit(value)[0]:g} {byte_unit(value)[1]}")
    else:
        size, unit = byte_unit(max(float(line[-1]) for line in lines.values()))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
        _label(axis, f"{text} [{unit}]", "")


def _scale_seconds(axis: Axes, lines: Mapping[str, np.ndarray]) -> None:
    text = "time in training rounds"
    if is_wide(lines.values()):
        _logarithmic(axis, text, lambda value: f"{value:g} s")
    else:
        _label(axis, f"{text} [s]", "")


_SCALES: Mapping[Over, Callable[[Axes, Mapping[str, np.ndarray]], None]] = {
    Over.ROUNDS: _scale_rounds,
    Over.BYTES: _scale_bytes,
    Over.SECONDS: _scale_seconds,
}


def _logarithmic(axis: Axes, text: str, write: Callable[[float], str]) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: write(value))
    _label(axis, text, "")


def _nothing_to_draw(runs: Sequence[Run]) -> FedAppsError:
    where = ", ".join(str(run.path) for run in runs) or "figure"
    do = "wait for the first evaluation, or set evaluate-every"
    return FedAppsError(where, expected="rows with metrics to draw", got="none", do=do)


def _finish(figure: Figure, path: Path) -> None:
    """Put one legend below the panels and write the file."""
    entries: dict[str, Any] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    # Inches of the widest entry: its text at 9 points, and the line before it.
    widest = 0.075 * max(len(label) for label in entries) + 0.7
    columns = max(1, math.floor(figure.get_figwidth() / widest))
    # A legend of many lines must not take the panels' room.
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, math.ceil(len(entries) / columns) - 2))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    figure.savefig(path)
