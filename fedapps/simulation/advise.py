"""Advice on FedCLUP's settings from one cheap round of local fits: the dial, the steps, and how many rounds to expect.

The fits run here, one client after another, without Flower. Nothing is kept.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapps.client_apps.problem import LocalProblem, Pull, Trained, local_problem
from fedapps.client_apps.work import ClientWork, Node
from fedapps.compute import pinned
from fedapps.messages.schema import Arrays
from fedapps.methods import resolve_settings
from fedapps.methods.personalised import FedClupSettings
from fedapps.personalization import theory
from fedapps.personalization.choose_lambda import ChoiceConfig, LambdaReport, Reason, Rule, choose_lambda
from fedapps.personalization.fedclup import FedClupConfig, Stale, gamma_warnings, personal_names
from fedapps.personalization.local_fits import LocalFit
from fedapps.personalization.proximal import pulled_step
from fedapps.results.settings_file import to_toml
from fedapps.settings import Settings, default_config
from fedapps.strategies.fedclup import MOST_FIT_ROUNDS
from fedapps.strategies.rounds import sample_partitions
from fedapps.tasks.base import Task
from fedapps.tasks.from_settings import load_task_of

EPS = 1e-6
"""Final over initial distance to the solution that the number of rounds is for."""

NOT_IN_COMMAND = {"method", "task", "run-dir", "resume", "accept-changes", "fedclup.lambda", "fedclup.adaptive"}
"""Settings that the recommended command says otherwise, or not at all."""


@dataclass(frozen=True)
class Advice:
    """What to set, and why.

    Attributes:
        report: The choice of ``lambda`` and its grounds.
        L: Greatest curvature over the clients; where neither ``gamma`` nor ``K`` needs it, estimated from below.
        mu: Least curvature over the clients, at their fits; None for a torch model, whose loss need not be convex.
        num_clients: ``N``.
        num_sampled: ``|S|``.
        options: What a run with this ``lambda`` makes of the settings.
    """

    report: LambdaReport
    L: float
    mu: float | None
    num_clients: int
    num_sampled: int
    options: FedClupSettings

    @property
    def gamma(self) -> float:
        """The server step, as a run with these settings takes it."""
        return self.options.gamma_of(self.report.lam, self.L, self.num_sampled, self.num_clients)

    @property
    def warnings(self) -> list[str]:
        """What a run says of this ``gamma``; nothing if it is stable, or ``L`` is not known."""
        config = FedClupConfig(self.report.lam, self.gamma, self.options.stale)
        return gamma_warnings(config, self.L, self.num_sampled, self.num_clients) if self.L else []

    @property
    def num_local_steps(self) -> int | None:
        """``K``, with which total work hardly depends on ``lambda``; None where ``mu`` is not known."""
        return None if self.mu is None else theory.num_local_steps(self.report.lam, max(self.mu, 0.0), self.L)

    @property
    def num_rounds(self) -> float | None:
        """A bound of the rounds to `EPS`; None where ``mu`` is not known or 0, and for steps and sums that have none."""
        exact = self.options.stale is Stale.REUSE or self.num_sampled == self.num_clients
        if self.mu is None or self.mu <= 0 or self.warnings or not exact:
            return None
        return theory.num_rounds_bound(EPS, self.report.lam, self.mu, self.L, self.gamma)

    def lines(self) -> list[str]:
        """Say it in plain words.

        Returns:
            Lines of text.
        """
        r = self.report
        return [
            self._finding(),
            r.describe(),
            f"gamma = {self.gamma:.4g}: {self._gamma_rule()}, for {self.num_sampled} of {self.num_clients} clients a round",
            *self.warnings,
            self._work(),
        ]

    def command(self, run_config: Mapping[str, Any]) -> str:
        """Give the command of a run with this advice, to be pasted into a shell.

        Args:
            run_config: What `advise` was given.
        """
        advised = {"fedclup.lambda": float(f"{self.report.lam:.4g}")}
        if self.num_local_steps is not None:
            advised["local-steps"] = self.num_local_steps
        given = {key: value for key, value in run_config.items() if key not in NOT_IN_COMMAND}
        task = str(run_config.get("task", default_config({})["task"]))
        words = ["fedapps", "run", "--method", "fedclup", "--task", task, "--clients", str(self.num_clients)]
        for key, value in {**given, **advised}.items():
            words += ["--set", to_toml({key: value}).strip().replace(" = ", "=", 1)]
        return shlex.join(words)

    def _gamma_rule(self) -> str:
        options = self.options
        if options.gamma:
            return "as it is set"
        if not options.gamma_needs_curvature:
            return f"1/lambda, by {'stale = reuse-models' if options.stale is Stale.REUSE_MODELS else 'gamma-rule = average'}"
        share = "" if options.stale is Stale.REPLIES else "(|S|/N)"
        return f"{share}(1/lambda + 1/L) with L = {self.L:.4g}"

    def _finding(self) -> str:
        r = self.report
        if r.reason is Reason.ALONE:
            return "There is one client, which has nobody to share with."
        local = theory.local_error(r.s2, r.dimension, r.harmonic_examples)
        n = f"{r.harmonic_examples:.4g}"
        distance = (
            f"R = {math.sqrt(max(r.R2, 0.0)):.4g}, the root mean square distance of the clients' own best models from their"
            f" mean, against {math.sqrt(local):.4g} that a client's own {n} examples leave uncertain"
        )
        if r.reason is Reason.ALIKE:
            return f"The clients cannot be told apart ({distance}): one model for all serves them best."
        if not r.decided:
            return f"The clients' fits are still too far from the model to tell ({distance}): take more local steps."
        if theory.minimax_side(r.R2, r.s2, r.dimension, r.harmonic_examples) is theory.Side.NOISE:
            return (
                f"The clients differ by more than their own data leaves uncertain ({distance}): personal models, lightly tied;"
                " more data on a client helps that client."
            )
        return (
            f"The clients differ by less than their own data leaves uncertain ({distance}): they gain from each other; more"
            " clients help everybody."
        )

    def _work(self) -> str:
        if self.mu is None:
            return (
                "The loss of a network need not be convex: no number of local steps or rounds is predicted, and L is that of"
                " the initial model."
            )
        bound = (
            "no bound is known"
            if self.num_rounds is None or math.isinf(self.num_rounds)
            else f"at most {math.ceil(self.num_rounds)}"
        )
        return (
            f"K = {self.num_local_steps} local steps: (L + lambda)/(mu + lambda) with mu = {self.mu:.4g}; rounds to a"
            f" {EPS:g}th of the distance: {bound}"
        )


def advise(run_config: Mapping[str, Any], num_clients: int) -> Advice:
    """Fit every client's data, and say what FedCLUP should be set to.

    Args:
        run_config: Flat kebab-case keys; the method is FedCLUP whatever they say.
        num_clients: ``N``.

    Raises:
        FedAppsError: A setting or the data is wrong, or a run with the recommended ``lambda`` would refuse ``gamma``.
    """
    settings = resolve_settings({**run_config, "method": "fedclup"})
    own = settings.own
    choice = ChoiceConfig(own.lambda_min, own.lambda_max, own.c, Rule(own.rule))
    task = load_task_of(settings)
    with pinned(settings.compute_threads):
        model = task.initial_arrays(settings.seed)
        initial = model
        for number in range(1, MOST_FIT_ROUNDS + 1):
            fits = {i: _fit(settings, task, model, i, num_clients, number, choice.lower) for i in range(num_clients)}
            report, model = _choose(fits, model, choice)
            if report.decided:
                break
        mus = [fit.mu for fit in fits.values() if fit.mu is not None]
        options = own.model_copy(update={"lambda_": report.lam})
        options.check_gamma()
        exact = bool(mus) or options.gamma_needs_curvature
        L = max(fit.curvature(initial, exact=exact) for fit in fits.values())
    return Advice(
        report=report,
        L=L,
        mu=min(mus) if mus else None,
        num_clients=num_clients,
        num_sampled=len(sample_partitions(settings.seed, 1, num_clients, settings.fraction_train)),
        options=options,
    )


@dataclass(frozen=True)
class _ClientFit:
    names: tuple[str, ...]
    trained: Trained
    fit: LocalFit
    problem: LocalProblem
    mu: float | None
    weight: float

    def curvature(self, model: Arrays, *, exact: bool) -> float:
        return (self.problem.largest_curvature if exact else self.problem.rough_curvature)(model, self.names)


def _fit(
    settings: Settings, task: Task, model: Arrays, partition: int, num_clients: int, number: int, lam: float
) -> _ClientFit:
    work = ClientWork(
        settings=settings, task=task, node=Node(partition, num_clients, None),
        data=task.client_data(partition, num_clients), arrays=model, server_round=number, lr=settings.lr, last_folded=0,
        experiment="", run_dir="",
    )  # fmt: skip
    problem = local_problem(work)
    names = personal_names(problem.names, settings.own.patterns)
    pull = Pull({name: model[name] for name in names}, lam, pulled_step(settings.lr, lam, settings.own.personal_lr))
    trained, fit = problem.fit(model, pull)
    mu = problem.least_curvature(trained.arrays)
    weight = float(work.num_examples) if settings.weighting == "examples" else 1.0
    return _ClientFit(names, trained, fit, problem, mu, weight)


def _choose(fits: Mapping[int, _ClientFit], model: Arrays, choice: ChoiceConfig) -> tuple[LambdaReport, Arrays]:
    names, total = fits[0].names, sum(fit.weight for fit in fits.values())
    weights = {i: fit.weight / total for i, fit in fits.items()}
    tensors = fits[0].trained.arrays
    mean = {
        name: sum(weights[i] * fit.trained.arrays[name].astype(np.float64) for i, fit in fits.items())
        for name in tensors
    }
    report = choose_lambda(
        {i: fit.fit for i, fit in fits.items()},
        weights,
        float(sum(np.sum((mean[name] - model[name]) ** 2) for name in names)),
        sum(model[name].size for name in names),
        choice,
    )
    return report, {name: np.asarray(mean.get(name, w), w.dtype) for name, w in model.items()}
