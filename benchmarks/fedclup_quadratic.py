"""FedCLUP on quadratics whose solution is known: does it get there, and in the predicted number of rounds?

Eight least-squares clients of 60 to 600 examples (weights by examples, condition number below 10), started from zero. Measured
from the pure functions, without Flower:

(a) half of the clients in a round, ``stale = reuse``, every default: rounds until all models are within 1e-8 of the closed-form
    solution; the same with 5 % of the replies lost, and for the other rules of ``stale``;
(b) all clients, exact local solutions, the theory's ``gamma``: rounds to a relative distance of 1e-8, against
    ``log(1/eps) / -log(1 - gamma mu_F)``. Rounds are measured to a fraction, where the logarithm of the distance, drawn as a
    straight line between rounds, passes the goal;
(c) all clients, ``K = ceil((L + lambda)/(mu + lambda))`` local steps: total gradient evaluations a client, to the goal of (b)
    (the global model's relative distance), to the goal of (a) (all models), and, to the goal of (b), as they would be if ``K``
    did not have to be an integer: at ``lambda = 10`` it is rounded up from 1.3 to 2.

Two more families, of condition number 10, are reported beside it: clients of one shared curvature, the worst case for which
``K`` is made, and clients whose curvature is randomly turned, so that their flat directions differ and large ``lambda`` is
easier.

Usage: ``python benchmarks/fedclup_quadratic.py [--repetitions 5] [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.personalization import fedclup, theory
from fedapps.personalization.fedclup import FedClupConfig, Stale
from fedapps.personalization.proximal import Proximal, descend, safe_step
from fedapps.personalization.quadratic import (
    JointMinimiser,
    Quadratic,
    joint_minimiser,
    least_squares,
    random_quadratics,
)
from fedapps.results.environment import describe_environment

LAMBDAS = (0.01, 0.1, 1.0, 10.0)
SIZES = (60, 80, 100, 150, 200, 300, 400, 600)
DIMENSION = 8
SPECTRUM = (1.0, 3.0)
EPS = 1e-8
MOST_ROUNDS = 3_000
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Problem:
    """Clients, their weights, and the range of their curvature."""

    clients: Sequence[Quadratic]
    weights: np.ndarray
    mu: float
    L: float


@dataclass(frozen=True)
class Plan:
    """How one run is made: ``num_steps`` None solves local problems exactly."""

    lam: float
    num_sampled: int
    stale: Stale
    gamma: float
    num_steps: int | None
    loss_rate: float = 0.0


def draw_least_squares(seed: int) -> Problem:
    """Draw the main family: covariates of spectrum 1 to 3, unequal numbers of examples."""
    random = np.random.default_rng(seed)
    clients = []
    for n in SIZES:
        X = random.standard_normal((n, DIMENSION)) * np.sqrt(np.geomspace(*SPECTRUM, DIMENSION))
        clients.append(least_squares(X, X @ random.standard_normal(DIMENSION) + random.standard_normal(n)))
    return problem_of(clients)


def draw_shared(seed: int) -> Problem:
    """Draw the family of one curvature, condition number exactly 10, and different minimisers."""
    turned = random_quadratics(len(SIZES), DIMENSION, mu=1.0, L=10.0, seed=seed)
    A = turned[0].A
    return problem_of([Quadratic(A, A @ np.linalg.solve(client.A, client.b)) for client in turned])


def draw_turned(seed: int) -> Problem:
    """Draw the family of randomly turned curvature, condition number exactly 10."""
    return problem_of(random_quadratics(len(SIZES), DIMENSION, mu=1.0, L=10.0, seed=seed))


def problem_of(clients: Sequence[Quadratic]) -> Problem:
    """Weigh clients by ``SIZES`` and find the range of their curvature."""
    spectra = np.array([np.linalg.eigvalsh(client.A) for client in clients])
    return Problem(clients, np.array(SIZES) / sum(SIZES), float(spectra.min()), float(spectra.max()))


def solve_locally(client: Quadratic, w: np.ndarray, start: np.ndarray, plan: Plan, L: float) -> np.ndarray:
    """Minimise a client's proximal objective by ``K`` steps, or exactly."""
    if plan.num_steps is None:
        return np.linalg.solve(client.A + plan.lam * np.eye(len(w)), client.b + plan.lam * w)
    return descend([Proximal(client, w, plan.lam)] * plan.num_steps, start, safe_step(L, plan.lam))


def run(problem: Problem, plan: Plan, seed: int, goal: float, *, relative: bool) -> dict[str, float | bool]:
    """Run FedCLUP until the distance to the closed-form solution passes the goal.

    ``relative``: the distance is the global model's over its first one; else the greatest over all models.
    """
    random = np.random.default_rng((seed, 1))
    solution = joint_minimiser(problem.clients, problem.weights, plan.lam)
    config = FedClupConfig(plan.lam, plan.gamma, plan.stale)
    state = fedclup.initial_state({"w": np.zeros(DIMENSION)})
    personal = [np.zeros(DIMENSION) for _ in problem.clients]
    known: list[Any] = [None] * len(personal)
    met = [False] * len(personal)
    before = now = distance(solution, state.model["w"], personal, relative=relative)
    for server_round in range(1, MOST_ROUNDS + 1):
        w = state.model["w"]
        for i in sorted(random.choice(len(personal), plan.num_sampled, replace=False)):
            w_i = solve_locally(problem.clients[i], w, personal[i] if met[i] else w, plan, problem.L)
            sent = fedclup.send({"w": w}, {"w": w_i}, known[i], plan.stale)
            if random.random() < plan.loss_rate:
                continue
            first = plan.stale is Stale.REPLIES or not met[i]
            state = fedclup.fold(state, sent.message, problem.weights[i], first=first)
            personal[i], met[i] = w_i, True
            known[i] = None if plan.stale is Stale.REPLIES else sent.known
        state = fedclup.server_step(state, config)
        before, now = now, distance(solution, state.model["w"], personal, relative=relative)
        if now < goal:
            fraction = np.log(before / goal) / np.log(before / now) if now > 0 else 1.0
            return {"reached": True, "rounds": server_round, "rounds-to-goal": server_round - 1 + float(fraction)}
        if not now < 1e9:
            break
    return {"reached": False, "rounds": server_round, "distance": now}


def distance(solution: JointMinimiser, w: np.ndarray, personal: Sequence[np.ndarray], *, relative: bool) -> float:
    """Measure how far from the closed form the models are."""
    of_global = float(np.linalg.norm(w - solution.model))
    if relative:
        return of_global / float(np.linalg.norm(solution.model))
    return max(of_global, *(float(np.linalg.norm(a - b)) for a, b in zip(personal, solution.personal, strict=True)))


def measure(problem: Problem, seed: int, lam: float) -> dict[str, Any]:
    """Measure everything for one problem and one ``lambda``."""
    N, half, L = len(problem.clients), len(problem.clients) // 2, problem.L
    K = theory.num_local_steps(lam, problem.mu, L)
    part = fedclup.default_gamma(lam, L, half, N)
    full = fedclup.default_gamma(lam, L, N, N)
    mu_F, _ = theory.outer_curvature([client.A for client in problem.clients], problem.weights, lam)
    predicted = theory.num_rounds(EPS, theory.contraction(full, mu_F))
    exact = run(problem, Plan(lam, N, Stale.REUSE, full, None), seed, EPS, relative=True)
    steps = run(problem, Plan(lam, N, Stale.REUSE, full, K), seed, EPS, relative=True)
    joint = run(problem, Plan(lam, N, Stale.REUSE, full, K), seed, 1e-8, relative=False)
    partial = {
        "reuse": Plan(lam, half, Stale.REUSE, part, K),
        "reuse, 5 % lost": Plan(lam, half, Stale.REUSE, part, K, loss_rate=0.05),
        "reuse, 1 of 8": Plan(lam, 1, Stale.REUSE, fedclup.default_gamma(lam, L, 1, N), K),
        "reuse-models": Plan(lam, half, Stale.REUSE_MODELS, 1 / lam, K),
        "replies": Plan(lam, half, Stale.REPLIES, part, K),
    }
    return {
        "seed": seed, "lambda": lam, "mu": problem.mu, "L": L, "K": K, "mu_F": mu_F,
        "partial": {name: run(problem, plan, seed, 1e-8, relative=False) for name, plan in partial.items()},
        "predicted-rounds": predicted, "exact": exact, "ratio": exact["rounds-to-goal"] / predicted,
        "K-steps": steps, "gradient-evaluations": steps["rounds"] * K,
        "K-steps, all models": joint, "gradient-evaluations, all models": joint["rounds"] * K,
        "gradient-evaluations, K not rounded": steps["rounds-to-goal"] * (L + lam) / (problem.mu + lam),
    }  # fmt: skip


def claims(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Check the claims over all repetitions of a family."""
    seeds = sorted({row["seed"] for row in rows})
    by_seed = [[row for row in rows if row["seed"] == seed] for seed in seeds]
    work, joint_work, unrounded = (
        [max(r[key] for r in group) / min(r[key] for r in group) for group in by_seed]
        for key in ("gradient-evaluations", "gradient-evaluations, all models", "gradient-evaluations, K not rounded")
    )
    rounds = [[row["exact"]["rounds-to-goal"] for row in group] for group in by_seed]
    ratios = [row["ratio"] for row in rows]
    means = [np.mean([row["gradient-evaluations"] for row in rows if row["lambda"] == lam]) for lam in LAMBDAS]
    return {
        "(a) reuse reaches 1e-8": all(row["partial"]["reuse"]["reached"] for row in rows),
        "(a) reuse reaches 1e-8 with 5 % of replies lost": all(row["partial"]["reuse, 5 % lost"]["reached"] for row in rows),
        "(b) rounds over predicted": [min(ratios), max(ratios)],
        "(b) within 20 %": all(abs(ratio - 1) <= 0.2 for ratio in ratios),
        "(b) increasing in lambda": all(sorted(line) == line for line in rounds),
        "(c) greatest over least gradient evaluations, by repetition": work,
        "(c) below 1.5 in every repetition": all(ratio < 1.5 for ratio in work),
        "(c) the same to the goal of (a), all models": joint_work,
        "(c) below 1.5 in every repetition, all models": all(ratio < 1.5 for ratio in joint_work),
        "(c) the same to the goal of (b), were K not rounded up": unrounded,
        "(c) greatest over least, of the means over repetitions": max(means) / min(means),
    }  # fmt: skip


def show(family: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of means over repetitions, and the claims."""
    print(f"\n{family}")
    names = list(rows[0]["partial"])
    print(f"{'lambda':>7} {'K':>4} {'exact':>7} {'theory':>7} {'K-steps':>8} {'grads':>7}  " + "  ".join(names))
    for lam in LAMBDAS:
        group = [row for row in rows if row["lambda"] == lam]
        mean = [np.mean([row[k] for row in group]) for k in ("K", "predicted-rounds", "gradient-evaluations")]
        exact, steps = (np.mean([row[k]["rounds-to-goal"] for row in group]) for k in ("exact", "K-steps"))
        cells = [cell([row["partial"][name] for row in group]) for name in names]
        line = "  ".join(f"{text:>{len(name)}}" for text, name in zip(cells, names, strict=True))
        print(f"{lam:>7} {mean[0]:>4.1f} {exact:>7.2f} {mean[1]:>7.2f} {steps:>8.1f} {mean[2]:>7.1f}  {line}")
    for claim, value in claims(rows).items():
        print(f"  {claim}: {value}")


def cell(results: Sequence[dict[str, Any]]) -> str:
    """Mean rounds, or the distance at which runs hover."""
    if all(result["reached"] for result in results):
        return f"{np.mean([result['rounds'] for result in results]):.0f}"
    return f"{max(result.get('distance', 0.0) for result in results):.1e} off"


def main() -> None:
    """Run, print, and write ``fedclup_quadratic.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    started = time.time()
    families = {"least squares": draw_least_squares, "shared curvature": draw_shared, "randomly turned": draw_turned}
    rows = {
        family: [measure(draw(seed), seed, lam) for seed in range(arguments.repetitions) for lam in LAMBDAS]
        for family, draw in families.items()
    }
    for family, found in rows.items():
        show(family, found)
    record = {
        "benchmark": "fedclup_quadratic", "status": "finished", "seconds": round(time.time() - started, 1),
        "settings": {
            "lambdas": LAMBDAS, "sizes": SIZES, "dimension": DIMENSION, "spectrum": SPECTRUM, "eps": EPS,
            "seeds": list(range(arguments.repetitions)), "most-rounds": MOST_ROUNDS,
        },
        "environment": describe_environment(device="cpu", data_checksums={}, working_folder=ROOT),
        "claims": {family: claims(found) for family, found in rows.items()},
        "rows": rows,
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fedclup_quadratic.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
