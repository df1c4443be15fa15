"""What personal models are worth: a table over methods, and each client's gain over training alone and over sharing all.

All numbers are of the last evaluation on the clients, on their own test data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedapps.results.report import LOSS, METRICS, Run, group_runs, measures_of
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import smaller_is_better
from fedapps.results.tables import Spread
from fedapps.results.views import PERSONAL
from fedapps.settings import Scalar

REFERENCES = ("localtrain", "globaltrain")
"""Methods that gains are measured against."""

DATA_SETTINGS = (
    "task", "task-options", "seed", "partition", "alpha", "classes-per-client", "partition-column", "partition-min-size",
    "validation-fraction", "client-validation-fraction", "client-test-fraction",
)  # fmt: skip
"""Settings that, with the number of clients, fix what data each client has: `fedapps.tasks.from_settings` reads them."""

Gains = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Reference -> method -> partition -> gain, the mean over the seeds that both have; positive is better."""


@dataclass(frozen=True)
class PersonalRow:
    """The personal models of a method in a table."""

    label: str  # the method, and what else tells the group from others
    metric: str  # what they are judged by
    clients: str  # how many clients the means are over
    mean: Spread  # mean over clients
    weighted: Spread  # mean weighted by test examples
    std: Spread  # sample standard deviation over clients
    worst: Spread  # mean of the worst tenth of the clients
    global_mean: Spread  # the same mean of the global model

    def cells(self) -> dict[str, str]:
        """Give the row as people read it.

        Returns:
            Title of the column -> text, ``mean ± standard deviation`` over seeds.
        """
        return {"method": self.label, "metric": self.metric, "clients": self.clients} | {
            title: _text(spread)
            for title, spread in {
                "personal, mean": self.mean, "by examples": self.weighted, "std over clients": self.std,
                "worst tenth": self.worst, "global, mean": self.global_mean,
            }.items()
        }  # fmt: skip

    def data(self) -> dict[str, Scalar | None]:
        """Give the row for CSV and JSON.

        Returns:
            Key -> number, text or None.
        """
        data: dict[str, Scalar | None] = {
            "method": self.label, "metric": self.metric, "clients": self.clients, "runs": self.mean.n
        }  # fmt: skip
        spreads = {
            "personal-mean": self.mean, "personal-weighted": self.weighted, "personal-std": self.std,
            "personal-worst-decile": self.worst, "global-mean": self.global_mean,
        }  # fmt: skip
        for name, spread in spreads.items():
            data[name] = spread.mean if math.isfinite(spread.mean) else None
            data[f"{name}-std-over-seeds"] = spread.std if math.isfinite(spread.std) else None
        return data


@dataclass(frozen=True)
class ClientRow:
    """One client of one run."""

    method: str
    seed: int
    partition: int
    num_examples: int  # its test examples
    metric: str  # what its models are judged by
    personal: float  # the personal model
    global_: float | None  # the global model; None for a method without one

    def cells(self) -> dict[str, str]:
        """Give the row as people read it.

        Returns:
            Title of the column -> text.
        """
        return {key: "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
                for key, value in self.data().items()}  # fmt: skip

    def data(self) -> dict[str, Scalar | None]:
        """Give the row for CSV and JSON.

        Returns:
            Key -> number, text or None.
        """
        return {
            "method": self.method, "seed": self.seed, "partition": self.partition, "num-examples": self.num_examples,
            "metric": self.metric, "personal": self.personal, "global": self.global_,
        }  # fmt: skip


def personal_metric(runs: Sequence[Run]) -> str | None:
    """Name what the personal models of some runs are judged by.

    Returns:
        What the runs are judged by, unless that is the loss; then the first of `METRICS` that one of them has, then the
        loss; None without personal models.
    """
    judged = [str(run.summary.get("judged-by", "")) for run in runs]
    order = [*(name for name in judged if name != LOSS), *METRICS, LOSS]
    return next((name for name in order if any(PERSONAL.key(name, run.summary["final"]) for run in runs)), None)


def personal_table(runs: Sequence[Run]) -> list[PersonalRow]:
    """Make a table with a row a method, over its seeds.

    Args:
        runs: The runs; those without personal models are left out.

    Returns:
        The rows; none if no run has personal models.
    """
    metric = personal_metric(runs)
    if metric is None:
        return []
    chosen = [run for run in runs if f"client-personal-test-{metric}" in run.summary["final"]]

    def over_seeds(group: Sequence[Run], key: str) -> Spread:
        return Spread.of(run.summary["final"].get(key) for run in group)

    name = f"client-personal-test-{metric}"
    return [
        PersonalRow(
            label=label,
            metric=metric,
            clients=next(m.clients for m in measures_of(group) if m.view is PERSONAL),
            mean=over_seeds(group, name),
            weighted=over_seeds(group, f"{name}-weighted"),
            std=over_seeds(group, f"{name}-std"),
            worst=over_seeds(group, f"{name}-worst-decile"),
            global_mean=over_seeds(group, f"client-global-test-{metric}"),
        )
        for label, group in group_runs(chosen).items()
    ]


def client_table(runs: Sequence[Run]) -> list[ClientRow]:
    """Make a table with a row a client and run.

    Args:
        runs: The runs; those without personal models are left out.

    Returns:
        The rows, in the order of the runs and partitions.
    """
    metric = personal_metric(runs)
    rows = []
    for run in runs if metric else ():
        kept = RunFolder.open(run.path).read_clients()
        last = max((row["round"] for row in kept), default=0)
        for row in kept:
            personal = row.get(f"personal-test-{metric}")
            if row["round"] == last and personal is not None:
                shared = row.get(f"global-test-{metric}")
                seed = int(run.settings.get("seed", 0))
                rows.append(
                    ClientRow(run.method, seed, row["partition"], row["num-examples"], str(metric), personal, shared)
                )
    return rows


def client_gains(runs: Sequence[Run]) -> Gains:
    """Measure each client's gain over LocalTrain and GlobalTrain on the same data of the same clients.

    Returns:
        The gains, difference of the metric (of errors and losses: the reference's minus the method's), for the methods of
        which a run has the `DATA_SETTINGS` and the number of clients of a run of the reference. Of several such runs of
        a reference the last counts.
    """
    metric = personal_metric(runs)
    sign = -1.0 if smaller_is_better(metric or "") else 1.0
    gains: dict[str, dict[str, dict[int, float]]] = {}
    for reference in REFERENCES:
        bases = {_data_of(run): _by_client(run) for run in runs if run.method == reference}
        for label, group in group_runs([run for run in runs if run.method not in REFERENCES]).items():
            differences: dict[int, list[float]] = {}
            for run in group:
                base = bases.get(_data_of(run), {})
                for partition, value in _by_client(run).items():
                    if partition in base:
                        differences.setdefault(partition, []).append(sign * (value - base[partition]))
            if differences:
                means = {p: sum(values) / len(values) for p, values in sorted(differences.items())}
                gains.setdefault(reference, {})[label] = means
    return gains


def _data_of(run: Run) -> tuple[Scalar | None, ...]:
    """Give what fixes the data of a run's clients."""
    folder = RunFolder.open(run.path)
    # A run without its checkpoint has lost the number; what is left of it are the clients that were evaluated.
    num_clients = folder.read_num_clients() or 1 + max((row["partition"] for row in folder.read_clients()), default=0)
    return num_clients, *(run.settings.get(key) for key in DATA_SETTINGS)


def _by_client(run: Run) -> dict[int, float]:
    return {row.partition: row.personal for row in client_table([run])}


def _text(spread: Spread) -> str:
    if spread.n == 0:
        return ""
    return f"{spread.mean:.4f}" + (f" ± {spread.std:.4f}" if spread.n > 1 else "")
