"""Figures of runs. Drawing needs the extra ``plots`` (matplotlib), and no display.

Colours are those of Okabe and Ito, told apart with colour-blind eyes too; a method keeps its colour and its line style
from figure to figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedapps.errors import FedAppsError
from fedapps.methods import METHODS
from fedapps.results.report import Run, group_runs
from fedapps.results.series import Series, accuracy_series, train_loss
from fedapps.results.summary import RunStatus
from fedapps.results.units import byte_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

LOG_FROM = 20.0
"""Ratio of totals between methods from which their axis is logarithmic."""

_DPI = 150


def plot_run(run: Run, path: Path) -> None:
    """Draw accuracy and loss of one run over rounds.

    Args:
        run: The run; accuracy is left out if it has none.
        path: File to write, for example ``plot.png``; its ending chooses the format.

    Raises:
        FedAppsError: matplotlib is missing, or the run has no row to draw.
    """
    accuracies = {
        name: curve
        for name, metric in (
            ("test", "test-accuracy"),
            ("validation", "validation-accuracy"),
            ("clients' test (mean)", "client-test-accuracy"),
            ("personal models (mean over clients)", "client-personal-test-accuracy"),
            ("global model (mean over clients)", "client-global-test-accuracy"),
        )
        if (curve := run.curve(metric))
    }
    losses = {
        name: curve
        for name, curve in (
            ("test", run.curve("test-loss")),
            ("validation", run.curve("validation-loss")),
            ("train (on the clients)", train_loss(run)),
        )
        if curve
    }
    panels = [(name, curves) for name, curves in (("accuracy", accuracies), ("loss", losses)) if curves]
    if not panels:
        raise _nothing_to_draw([run])
    looks = {name: Look(place) for place, name in enumerate(dict.fromkeys([*accuracies, *losses]))}
    figure, axes = _figure(len(panels))
    for axis, (quantity, curves) in zip(axes, panels, strict=True):
        for name, curve in curves.items():
            axis.plot(list(curve), list(curve.values()), label=name, **looks[name].style(len(curve)))
        _label(axis, "round", quantity)
        _whole_numbers(axis)
    status = run.summary["status"]
    note = "" if status == RunStatus.COMPLETED else f" ({status})"
    figure.suptitle(f"{run.method} on {run.task}, seed {run.settings.get('seed', 0)}{note}", fontsize=11)
    _finish(figure, path)


class Over(StrEnum):
    """What accuracy is drawn over."""

    ROUNDS = "rounds"
    """Rounds."""
    BYTES = "bytes"
    """Payload of training rounds, both ways, all clients."""
    SECONDS = "seconds"
    """Time in training rounds."""


def plot_compare(
    runs: Sequence[Run], path: Path, target: float | None = None, over: Sequence[Over] = tuple(Over)
) -> None:
    """Draw accuracy over rounds, over bytes and over seconds, a line a method: mean and band over seeds.

    Bytes and seconds are those of training rounds. A method that sends no model is a level over bytes.

    Args:
        runs: The runs; those that differ in the seed only form one line.
        path: File to write; its ending chooses the format.
        target: Accuracy drawn as a horizontal line.
        over: A panel each.

    Raises:
        FedAppsError: matplotlib is missing, or no run has an accuracy.
    """
    plot_comparisons({", ".join(dict.fromkeys(run.task for run in runs)): runs}, path, target, over)


def plot_comparisons(
    comparisons: Mapping[str, Sequence[Run]],
    path: Path,
    target: float | None = None,
    over: Sequence[Over] = tuple(Over),
    least: float | None = None,
) -> None:
    """Draw several comparisons as `plot_compare` does, a row each.

    Args:
        comparisons: Title -> runs.
        path: File to write; its ending chooses the format.
        target: Accuracy drawn as a horizontal line.
        over: A column each.
        least: Least accuracy shown; None shows all.

    Raises:
        FedAppsError: matplotlib is missing, or the runs of a comparison have no accuracy.
    """
    for runs in comparisons.values() or [[]]:
        if not any(run.accuracy_metric for run in runs):
            raise _nothing_to_draw(runs)
    figure, axes = _figure(len(over), rows=len(comparisons), sharey=True)
    for number, (title, runs) in enumerate(comparisons.items()):
        row = axes[number * len(over) : (number + 1) * len(over)]
        _draw_comparison(row, runs, target, over)
        if len(comparisons) > 1:
            row[0].set_title(title, fontsize=10, loc="left")
    if least is not None:
        axes[0].set_ylim(least, 1.0)
    several = any(len(group) > 1 for runs in comparisons.values() for group in group_runs(runs).values())
    title = "" if len(comparisons) > 1 else next(iter(comparisons))
    note = "mean ± standard deviation over seeds" if several else ""
    figure.suptitle(": ".join(text for text in (title, note) if text), fontsize=11)
    _finish(figure, path)


def _draw_comparison(axes: Sequence[Axes], runs: Sequence[Run], target: float | None, over: Sequence[Over]) -> None:
    groups = group_runs(runs)
    series = {label: line for label, group in groups.items() if (line := accuracy_series(group)) is not None}
    looks = choose_looks({label: groups[label][0].method for label in series})
    totals = {
        Over.ROUNDS: {label: line.rounds for label, line in series.items()},
        Over.BYTES: {label: line.payload for label, line in series.items() if not _keeps_silent(groups[label][0])},
        Over.SECONDS: {label: line.seconds for label, line in series.items()},
    }
    for axis, quantity in zip(axes, over, strict=True):
        if totals[quantity]:
            _SCALES[quantity](axis, totals[quantity])
        for label, line in series.items():
            if label in totals[quantity]:
                _draw_band(axis, totals[quantity][label], line, _legend_text(label, groups[label]), looks[label])
            else:
                _draw_level(axis, line, looks[label])
        if target is not None:
            axis.axhline(target, color="0.35", linewidth=0.9, linestyle=(0, (2, 2)), label=f"target {target:g}")
    metrics = sorted({run.accuracy_metric.replace("-", " ") for run in runs if run.accuracy_metric})
    axes[0].set_ylabel(" / ".join(metrics))


def plot_distance(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    path: Path,
    *,
    ylabel: str = r"distance to the optimum $\|\theta^t - \theta^\star\|$",
) -> None:
    """Draw distances to the optimum over rounds, on a logarithmic scale.

    Args:
        panels: Data set -> method -> distances of rounds 0, 1, ...; those that are not positive and finite are gaps.
        path: File to write; its ending chooses the format.
        ylabel: Label of the vertical axis.

    Raises:
        FedAppsError: matplotlib is missing, or there is no panel.
    """
    if not panels:
        raise _nothing_to_draw([])
    looks = choose_looks({label: label for curves in panels.values() for label in curves})
    figure, axes = _figure(len(panels))
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        for label, distances in curves.items():
            values = np.array(distances, dtype=float)
            values[~(np.isfinite(values) & (values > 0))] = np.nan
            axis.plot(np.arange(len(values)), values, label=label, **looks[label].style(len(values)))
        axis.set_yscale("log")
        axis.set_title(name, fontsize=10)
        _label(axis, "round", ylabel if axis is axes[0] else "")
        _whole_numbers(axis)
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
        _label(axis, "clients, least gain first", f"gain in {quantity} of personal models" if axis is axes[0] else "")
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
    low, high = np.clip(line.mean - line.std, 0, 1), np.clip(line.mean + line.std, 0, 1)
    axis.fill_between(x, low, high, color=look.color, alpha=0.15, linewidth=0)


def _keeps_silent(run: Run) -> bool:
    """Tell whether a run's method sends no model in either direction, so that no bytes belong to its accuracy."""
    return run.method in {method.name for method in METHODS if method.travels_down == "nothing"}


def _draw_level(axis: Axes, line: Series, look: Look) -> None:
    """Draw the last accuracy of a method that sends nothing, for comparison."""
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
    return figure, list(figure.subplots(rows, panels, sharey=sharey, squeeze=False).flat)


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
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    figure.savefig(path)
