from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps.errors import FedAppsError
from fedapps.methods import METHODS
from fedapps.results.report import Run
from fedapps.results.run_folder import RunFolder
from fedapps.results.views import PERSONAL

pytest.importorskip("matplotlib", reason="figures need the extra plots")

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.image import imread

from fedapps.results.plots import (
    COLORS,
    Look,
    Over,
    choose_looks,
    is_wide,
    plot_compare,
    plot_comparisons,
    plot_distance,
    plot_run,
)

MakeRun = Callable[..., Run]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures as they are saved, to look at what is in them."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def curve(rounds: int, speed: float) -> list[float]:
    return [0.1 + 0.87 * (1 - float(np.exp(-speed * number))) for number in range(rounds + 1)]


def legend(figure: Figure) -> list[str]:
    (one,) = figure.legends
    return [text.get_text() for text in one.get_texts()]


def assert_picture(path: Path, figure: Figure) -> None:
    """The file is a picture with much white and some colour, and no text leaves the page."""
    picture = imread(path)[..., :3]
    assert min(picture.shape[:2]) > 400
    assert 0.5 < float((picture == 1).all(axis=-1).mean()) < 0.99
    assert float((picture.max(axis=-1) - picture.min(axis=-1) > 0.3).mean()) > 0.001
    inches = figure.get_tightbbox()
    assert inches.x0 >= 0
    assert inches.y0 >= 0
    assert inches.x1 <= figure.get_figwidth()
    assert inches.y1 <= figure.get_figheight()
    box = figure.legends[0].get_window_extent()
    assert not any(box.overlaps(axis.get_tightbbox()) for axis in figure.axes), "the legend is beside the data"


def test_one_run_shows_accuracy_and_loss(make_run: MakeRun, tmp_path: Path, drawn: list[Figure]) -> None:
    plot_run(make_run(curve(20, 0.4), seed=3), tmp_path / "plot.png")
    (figure,) = drawn
    accuracy, loss = figure.axes
    assert (accuracy.get_xlabel(), accuracy.get_ylabel(), loss.get_ylabel()) == ("round", "accuracy", "loss")
    server = ["global model, server's test data", "global model, server's validation data"]
    assert [line.get_label() for line in accuracy.lines] == server
    np.testing.assert_allclose(accuracy.lines[0].get_ydata(), curve(20, 0.4))
    np.testing.assert_array_equal(accuracy.lines[0].get_xdata(), np.arange(21))
    assert len(loss.lines[2].get_xdata()) == 20, "there is no training loss before round 1"
    assert legend(figure) == [*server, "training loss on the clients"]
    assert accuracy.lines[0].get_color() == loss.lines[0].get_color()
    assert figure.get_suptitle() == "fedpm on digits, seed 3"
    assert_picture(tmp_path / "plot.png", figure)


def test_a_run_without_accuracy_shows_its_loss(make_run: MakeRun, tmp_path: Path, drawn: list[Figure]) -> None:
    run = make_run([0.1, 0.5], status=None)
    rows = [{key: value for key, value in row.items() if not key.endswith("accuracy")} for row in run.rows]
    plot_run(Run(run.path, run.settings, rows, run.summary), tmp_path / "plot.png")
    assert [axis.get_ylabel() for axis in drawn[0].axes] == ["loss"]
    assert drawn[0].get_suptitle().endswith("(unfinished)")


def test_methods_are_compared_over_rounds_bytes_and_seconds(
    make_run: MakeRun, tmp_path: Path, drawn: list[Figure]
) -> None:
    runs = [
        make_run(curve(20, speed * (1 + 0.1 * seed)), method=method, seed=seed, up=up * 10**5, seconds=seconds)
        for method, speed, up, seconds in (("fedpm", 0.6, 90, 3), ("localnewton", 0.3, 15, 2.5), ("fedavg", 0.1, 15, 1))
        for seed in range(3)
    ]
    plot_compare(runs, tmp_path / "compare.png", target=0.95)
    (figure,) = drawn
    rounds, payload, seconds_axis = figure.axes
    assert (rounds.get_xlabel(), rounds.get_ylabel()) == ("round", "accuracy")
    assert rounds.get_title(loc="left") == "global model, server's test data"
    assert payload.get_xlabel() == "payload of training, down + up, all clients [MB]"
    assert seconds_axis.get_xlabel() == "time in training rounds [s]"
    expected = np.mean([curve(20, 0.6 * (1 + 0.1 * seed)) for seed in range(3)], axis=0)
    for axis in figure.axes:
        np.testing.assert_allclose(axis.lines[0].get_ydata(), expected)
        assert len(axis.collections) == 3, "a band a method"
        assert axis.lines[-1].get_label() == "target 0.95"
    np.testing.assert_allclose(payload.lines[0].get_xdata(), np.arange(21) * (9_000_000 + 1000))
    assert payload.xaxis.get_major_formatter()(120e6, 0) == "120"
    np.testing.assert_allclose(seconds_axis.lines[2].get_xdata(), np.arange(21))
    assert legend(figure) == ["fedpm (3 runs)", "localnewton (3 runs)", "fedavg (3 runs)", "target 0.95"]
    assert len({(line.get_color(), line.get_linestyle()) for line in rounds.lines}) == 4
    assert_picture(tmp_path / "compare.png", figure)


def test_bytes_that_differ_by_orders_of_magnitude_get_a_logarithmic_axis(
    make_run: MakeRun, tmp_path: Path, drawn: list[Figure]
) -> None:
    """The initial model is left out there: it has cost nothing. Long names do not push the legend off the page."""
    runs = [
        make_run(curve(5, 0.6), up=10**8),
        make_run(curve(5, 0.2), method=f"a_package_with_a_{'very_' * 6}long_name.and_a_module:METHOD", down=60, up=60),
        make_run(curve(3, 0.2), method="fedavg", status="failed", limit=5, **{"local-epochs": 1}),
        make_run(curve(5, 0.2), method="fedavg", lr=0.3, **{"local-epochs": 5}),
    ]
    plot_compare(runs, tmp_path / "compare.png", target=0.5)
    (figure,) = drawn
    rounds, payload, _ = figure.axes
    assert [axis.get_xscale() for axis in figure.axes] == ["linear", "log", "linear"]
    np.testing.assert_array_equal(np.isnan(payload.lines[0].get_xdata()), [True] + [False] * 5)
    assert payload.get_xlabel() == "payload of training, down + up, all clients"
    assert payload.xaxis.get_major_formatter()(10**7, 0) == "10 MB"
    assert not np.isnan(rounds.lines[0].get_xdata()).any()
    assert "fedavg (lr=0.1, local-epochs=1) (1 not completed)" in legend(figure)
    assert_picture(tmp_path / "compare.png", figure)


def with_personal(run: Run, accuracies: list[float]) -> Run:
    """The run with what three clients measured after each round."""
    for partition in range(3):
        RunFolder.open(run.path).append_clients({"round": 1, "partition": partition, "num-examples": 4})
    rows = [
        {"round": number, "phase": "client-evaluate", "seconds": 1.0, "client-personal-test-accuracy": value}
        for number, value in list(enumerate(accuracies))[1:]
    ]
    return Run(run.path, run.settings, [*run.rows, *rows], run.summary)


@pytest.mark.slow
def test_every_model_and_data_has_a_row_with_a_name_and_only_the_methods_that_have_it(
    make_run: MakeRun, tmp_path: Path, drawn: list[Figure]
) -> None:
    """FedAvg has no personal models, LocalTrain no global one; a method looks the same in all rows."""
    runs = [
        make_run(curve(5, 0.6), method="fedavg"),
        with_personal(make_run(curve(5, 0.2), method="fedclup"), curve(5, 0.5)),
        with_personal(make_run(curve(5, 0.0), method="localtrain"), curve(5, 0.3)),
    ]
    plot_compare(runs, tmp_path / "compare.png", target=0.6)
    (figure,) = drawn
    server, personal = figure.axes[0], figure.axes[3]
    assert server.get_title(loc="left") == "global model, server's test data"
    assert personal.get_title(loc="left") == "personal models, test data of 3 clients"
    assert [line.get_label() for line in server.lines] == ["fedavg", "fedclup", "target 0.6"]
    assert [line.get_label() for line in personal.lines] == ["fedclup", "localtrain", "target 0.6"]
    np.testing.assert_allclose(personal.lines[1].get_ydata(), curve(5, 0.3)[1:])
    assert personal.lines[0].get_color() == server.lines[1].get_color()
    assert_picture(tmp_path / "compare.png", figure)


@pytest.mark.parametrize("top", [0.97, 0.9999, 1.0])
def test_shares_close_to_1_are_drawn_by_what_is_missing(
    make_run: MakeRun, tmp_path: Path, drawn: list[Figure], top: float
) -> None:
    """0.95 and 0.99 are as far apart as 0.5 and 0.9: a factor 5 of what is missing; 1 itself lies at the upper end."""
    plot_compare([make_run([0.1, 0.5, 0.95, top])], tmp_path / "compare.png")
    axis = drawn[0].axes[0]
    height = {share: axis.transData.transform((0, share))[1] for share in (0.5, 0.9, 0.95, 0.99)}
    assert height[0.99] - height[0.95] == pytest.approx(height[0.9] - height[0.5])
    assert height[0.99] - height[0.95] > 0.2 * axis.get_window_extent().height
    assert "0.99" in [text.get_text() for text in axis.get_yticklabels()]
    least, most = axis.get_ylim()
    assert least == 0.5, "the initial model is left out"
    assert most >= min(top, 0.9995)
    assert ("1" in [text.get_text() for text in axis.get_yticklabels()]) == (top > 0.9995)
    assert_picture(tmp_path / "compare.png", drawn[0])


def test_lower_shares_have_a_plain_scale(make_run: MakeRun, tmp_path: Path, drawn: list[Figure]) -> None:
    plot_compare([make_run([0.1, 0.5, 0.89])], tmp_path / "compare.png")
    assert drawn[0].axes[0].get_yscale() == "linear"
    assert 0.4 < drawn[0].axes[0].get_ylim()[0] < 0.5, "the initial model is left out"


def test_losses_far_apart_have_a_logarithmic_scale(make_run: MakeRun, tmp_path: Path, drawn: list[Figure]) -> None:
    for losses in ([2.0, 0.2, 0.01], [2.0, 1.0, 0.2]):
        rows = [{"round": n, "phase": "evaluate", "test-loss": value} for n, value in enumerate(losses)]
        run = make_run([0.1])
        plot_compare(
            [Run(run.path, run.settings, rows, {**run.summary, "judged-by": "loss"})], tmp_path / "compare.png"
        )
    assert [figure.axes[0].get_yscale() for figure in drawn] == ["log", "linear"]
    assert drawn[0].axes[0].get_ylabel() == "loss"


def test_a_method_that_sends_no_model_is_a_level_over_bytes(
    make_run: MakeRun, tmp_path: Path, drawn: list[Figure]
) -> None:
    """Its few bytes of metrics do not make the axis logarithmic."""
    runs = [make_run(curve(5, 0.6), method="fedclup"), make_run(curve(5, 0.4), method="localtrain", down=3, up=2)]
    runs = [with_personal(run, curve(5, speed)) for run, speed in zip(runs, (0.6, 0.4), strict=True)]
    plot_comparisons({"digits": runs}, tmp_path / "compare.png", views=(PERSONAL,))
    rounds, payload, _ = drawn[0].axes
    assert payload.get_xscale() == "linear"
    assert len(rounds.lines) == len(payload.lines) == 2
    np.testing.assert_array_equal(payload.lines[1].get_ydata(), [curve(5, 0.4)[-1]] * 2)
    np.testing.assert_array_equal(payload.lines[1].get_xdata(), [0, 1])
    assert payload.lines[1].get_color() == rounds.lines[1].get_color()
    assert legend(drawn[0]) == ["fedclup", "localtrain"]


def test_several_comparisons_have_a_row_each(make_run: MakeRun, tmp_path: Path, drawn: list[Figure]) -> None:
    easy = [make_run(curve(5, 0.6), method=method) for method in ("fedclup", "ditto")]
    hard = [make_run(curve(5, 0.2), method="fedclup", alpha=0.1)]
    panels = {"easy": easy, "hard": hard}
    plot_comparisons(panels, tmp_path / "rows.png", over=(Over.ROUNDS, Over.SECONDS))
    (figure,) = drawn
    where = "global model, server's test data"
    assert [axis.get_title(loc="left") for axis in figure.axes] == [f"easy: {where}", "", f"hard: {where}", ""]
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 1, 1]
    assert [axis.get_xlabel() for axis in figure.axes] == ["round", "time in training rounds [s]"] * 2
    assert legend(figure) == ["fedclup", "ditto"]
    assert_picture(tmp_path / "rows.png", figure)


def test_a_single_run_can_be_compared_too(make_run: MakeRun, tmp_path: Path, drawn: list[Figure]) -> None:
    plot_compare([make_run([0.1], status=None)], tmp_path / "compare.png")
    assert legend(drawn[0]) == ["fedpm (1 not completed)"]


def test_distances_are_drawn_on_a_log_scale_a_panel_a_data_set(tmp_path: Path, drawn: list[Figure]) -> None:
    quadratic = [10.0 ** -(2**number / 20) for number in range(8)]
    panels = {
        "a9a": {"fedpm": [*quadratic, 0.0], "localnewton": [1.0] * 9},
        "w8a": {"localnewton": [0.5, float("nan"), 0.4]},
    }
    plot_distance(panels, tmp_path / "distance.png")
    (figure,) = drawn
    assert [axis.get_title() for axis in figure.axes] == ["a9a", "w8a"]
    assert {axis.get_yscale() for axis in figure.axes} == {"log"}
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), [*quadratic, np.nan])
    np.testing.assert_array_equal(figure.axes[1].lines[0].get_ydata(), [0.5, np.nan, 0.4])
    assert figure.axes[0].lines[1].get_color() == figure.axes[1].lines[0].get_color()
    assert legend(figure) == ["fedpm", "localnewton"]
    assert_picture(tmp_path / "distance.png", figure)


def test_distances_over_bytes_stand_beside_those_over_rounds(drawn: list[Figure], tmp_path: Path) -> None:
    many = {f"method {i}": [1.0, 0.1 / (i + 1)] for i in range(30)}
    panels = {"a9a": many, "w8a": {"fedpm": [1.0, 0.5, 0.2]}}
    sent = {"a9a": {label: [0, 1e6 * (i + 1)] for i, label in enumerate(many)}, "w8a": {"fedpm": [0, 2e6, 4e6]}}
    plot_distance(panels, tmp_path / "distance.png", sent=sent)
    (figure,) = drawn
    assert [axis.get_title() for axis in figure.axes] == ["a9a", "a9a", "w8a", "w8a"]
    assert [axis.get_xlabel().partition(" ")[0] for axis in figure.axes] == ["round", "payload"] * 2
    np.testing.assert_array_equal(figure.axes[3].lines[0].get_xdata(), [0, 2e6, 4e6])
    np.testing.assert_array_equal(figure.axes[2].lines[0].get_xdata(), [0, 1, 2])
    # The legend of 31 lines takes no room from the panels.
    assert all(axis.get_position().height * figure.get_figheight() > 2 for axis in figure.axes)
    assert_picture(tmp_path / "distance.png", figure)


def test_a_method_looks_the_same_in_every_figure() -> None:
    place = [method.name for method in METHODS].index("fedavg")
    assert choose_looks({"fedavg": "fedavg"})["fedavg"] == Look(place)
    looks = choose_looks({"own:B": "own:B", "own:A": "own:A", "x": "fedavg", "y": "fedavg"})
    assert looks == {
        "own:A": Look(len(METHODS)),
        "own:B": Look(len(METHODS) + 1),
        "x": Look(place),
        "y": Look(place, 1),
    }


def test_the_first_many_looks_differ() -> None:
    styles = [Look(place, variant).style(5) for place in range(len(COLORS)) for variant in range(4)]
    styles += [Look(place).style(5) for place in range(len(COLORS), 2 * len(COLORS))]
    fresh = {(style["color"], style["linestyle"]) for style in styles[: 4 * len(COLORS)]}
    assert len(fresh) == 4 * len(COLORS)
    plain = [Look(place).style(5) for place in range(3 * len(COLORS))]
    assert len({(style["color"], style["linestyle"]) for style in plain}) == 3 * len(COLORS)


@pytest.mark.parametrize(
    ("ends", "wide"), [([1, 19.9], False), ([1, 20], True), ([0, 5], False), ([0, 0], False), ([0, 1, 30], True)]
)
def test_an_axis_is_logarithmic_from_a_ratio_of_20(ends: list[float], wide: bool) -> None:
    assert is_wide([np.array([0.0, end]) for end in ends]) is wide


def test_nothing_to_draw_is_an_error_that_names_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run([0.1, 0.2])
    bare = Run(run.path, run.settings, [], run.summary)
    with pytest.raises(FedAppsError, match=f"{run.path.name}: .*rows with metrics"):
        plot_run(bare, tmp_path / "plot.png")
    with pytest.raises(FedAppsError, match="rows with metrics"):
        plot_compare([bare], tmp_path / "plot.png")
    with pytest.raises(FedAppsError, match="rows with metrics"):
        plot_distance({}, tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


def test_without_matplotlib_the_extra_is_named(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FedAppsError, match=r"expected matplotlib, .*pip install 'fedapps\[plots\]'"):
        plot_run(make_run([0.1, 0.2]), tmp_path / "plot.png")


def test_drawing_needs_no_display_and_leaves_the_backend_alone(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    before = mpl.rcParams._get("backend")  # type: ignore[attr-defined]
    plot_run(make_run([0.1, 0.2]), tmp_path / "plot.png")
    assert mpl.rcParams._get("backend") == before  # type: ignore[attr-defined]
