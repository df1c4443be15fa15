"""Seconds a round on a SuperLink with two SuperNodes of this machine: above Flower's own FedAvg, and of HiSo.

Short runs are interleaved, since times of a shared machine drift; a table holds medians, and ratios are of runs side by side.

``fedavg``  the digits by Flower's own FedAvg (`superlink_apps.py`) and by ``method = "fedavg"``: the same model, steps and
            messages, clients do not evaluate. Round 1 is counted from the start of the ServerApp, so it holds the handshake.
``hiso``    SmolLM2-135M on SST-2 (``fedapps models get smollm2``), with ``resident-worker`` and without, and clients that
            answer at once. Flower's share is a round of the last; forwards and update are measured in the client, the slower
            of the two counts; start-up is what remains.

Usage: ``python benchmarks/superlink_rounds.py {fedavg,hiso} [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedapps.methods import get_method
from fedapps.zeroth_order.rules import RULES

if TYPE_CHECKING:
    from fedapps.client_apps.work import ClientWork

ROOT = Path(__file__).resolve().parent.parent
NODES = 2
FEDAVG = {
    "method": "fedavg", "task": "digits", "local-epochs": 1, "batch-size": 32, "lr": 0.1, "partition": "iid",
    "validation-fraction": 0.0, "client-evaluation": "none", "evaluate-every": 0,
}  # fmt: skip
HISO = {
    "method": "superlink_rounds:TIMED", "task": "sst2", "task-options": 'model = "smollm2"', "partition": "iid",
    "batch-size": 16, "lr": 2e-4, "hiso.num-probes": 1, "hiso.nu": 0.1, "hiso.fingerprint-every": 50,
    "client-evaluation": "none", "evaluate-every": 0,
}  # fmt: skip

timed_server = ServerApp()


@timed_server.main()
def _timed(grid: Grid, context: Context) -> None:
    """Run the ServerApp of this package, and note when it starts and when its rounds end."""
    stamps = [time.time()]
    from superlink_apps import write_stamps

    from fedapps.server_apps import app, run

    one_round = run._one_round

    def noted(*arguments: Any) -> None:
        one_round(*arguments)
        stamps.append(time.time())

    run._one_round = noted
    app(grid, context)
    write_stamps(context, stamps)


def train(work: ClientWork) -> RecordDict:
    """Do HiSo's round, and note in the node's state folder when its parts end."""
    from fedapps.client_apps import hiso

    measure, times = hiso._measure, {"round": work.server_round, "client": work.node.partition, "entered": time.time()}

    def noted(*arguments: Any) -> Any:
        times["caught-up"] = time.time()
        result = measure(*arguments)
        times["measured"] = time.time()
        return result

    hiso._measure = noted
    try:
        return hiso.train(work)
    finally:
        hiso._measure = measure
        times["done"] = time.time()
        with open(Path(work.node.state_dir or "") / "times.jsonl", "a") as file:
            file.write(json.dumps(times) + "\n")


TIMED = replace(get_method("hiso"), name="superlink_rounds:TIMED", client="superlink_rounds:train")
"""HiSo, whose client notes times."""
RULES[TIMED.name] = RULES["hiso"]


class Place:
    """A SuperLink and two SuperNodes.

    Args:
        stack: Ends them.
        folder: Where they write.
        **rules: Of the nodes, with ``_`` for ``-``.
    """

    def __init__(self, stack: ExitStack, folder: Path, **rules: Any) -> None:
        from fedapps.simulation.processes import SuperLink, SuperNode

        self.folder = folder
        folder.mkdir()
        shared: dict[str, Any] = {
            "python_path": [ROOT / "benchmarks", ROOT],
            "environment": {"OMP_NUM_THREADS": "1"},
        }
        self._superlink = stack.enter_context(SuperLink(simulation=False, log_path=folder / "superlink.log", **shared))
        self.states = [folder / f"state-{partition}" for partition in range(NODES)]
        for partition, state in enumerate(self.states):
            config = {
                "partition-id": partition, "num-partitions": NODES, "common-data": True, "state-dir": str(state),
                "allow-methods": "built-in,superlink_rounds:TIMED",
                **{key.replace("_", "-"): value for key, value in rules.items()},
            }  # fmt: skip
            log = folder / f"node-{partition}.log"
            stack.enter_context(SuperNode(self._superlink.address, config, log_path=log, **shared))

    def run(self, serverapp: str, clientapp: str, config: dict[str, Any], rounds: int) -> list[float]:
        """Run an app; the seconds of its rounds, the first from the start of the server."""
        from fedapps.methods import resolve_settings
        from fedapps.settings import flatten
        from fedapps.simulation.app_folder import Components
        from fedapps.simulation.launcher import run_on_superlink
        from fedapps.simulation.processes import CONNECTION

        target = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        settings: dict[str, Any] = {**config, "run-dir": str(target), "num-server-rounds": rounds}
        if "method" in settings:
            settings = flatten(resolve_settings(settings), get_method(settings["method"]).group)
        outcome = run_on_superlink(
            settings,
            connection=CONNECTION,
            environment={"FLWR_HOME": str(self._superlink.home)},
            python_path=[ROOT / "benchmarks", ROOT],
            components=Components(serverapp, clientapp),
        )
        if outcome.status != "completed":
            raise SystemExit(outcome.log_tail)
        stamps = json.loads((target / "stamps.json").read_text())
        shutil.rmtree(target.parent)
        return [end - begin for begin, end in itertools.pairwise(stamps)]

    def ours(self, config: dict[str, Any], rounds: int) -> list[float]:
        """Run an app of this package."""
        return self.run("superlink_rounds:timed_server", "fedapps.client_apps:app", config, rounds)

    def idle(self, rounds: int) -> list[float]:
        """Run clients that answer at once."""
        return self.run("superlink_apps:idle_server", "superlink_apps:idle_client", {}, rounds)


def compare_fedavg(folder: Path, repetitions: int, rounds: int) -> dict[str, Any]:
    """Run Flower's FedAvg and this package's in turns on one SuperLink."""
    pairs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        place = Place(stack, folder / "place")
        place.idle(1)  # What is read from the disk for the first time is nobody's.
        for _ in range(repetitions):
            pair = {
                "flower": place.run("superlink_apps:fedavg_server", "superlink_apps:fedavg_client", {}, rounds),
                "fedapps": place.ours(FEDAVG, rounds),
                "load": os.getloadavg()[0],
            }
            pairs.append(pair)
            print(pair, flush=True)
    first = [pair["fedapps"][0] / pair["flower"][0] for pair in pairs]
    later = [statistics.median(pair["fedapps"][1:]) / statistics.median(pair["flower"][1:]) for pair in pairs]
    return {
        "pairs": pairs,
        "ratio-round-1": statistics.median(first),
        "ratios-round-1": first,
        "ratio-later": statistics.median(later),
        "ratios-later": later,
    }


def compare_workers(folder: Path, repetitions: int, rounds: int) -> dict[str, Any]:
    """Run HiSo with and without resident workers, and clients that answer at once, in turns."""
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        places = {
            "without": Place(stack, folder / "without"),
            "with": Place(stack, folder / "with", resident_worker=True, resident_idle_minutes=30.0),
        }
        for _ in range(repetitions):
            for name, place in places.items():
                share = statistics.median(place.idle(rounds)[1:])
                for state in place.states:
                    (state / "times.jsonl").unlink(missing_ok=True)
                seconds = place.ours(HISO, rounds)
                found = {"worker": name == "with", "load": os.getloadavg()[0], "seconds": seconds, "flower": share}
                runs.append({**found, **_parts(place, seconds, share)})
                print(runs[-1], flush=True)
    return {"runs": runs, "medians": {name: _medians(runs, name == "with") for name in places}}


def _parts(place: Place, seconds: list[float], share: float) -> dict[str, list[float]]:
    """Split the rounds after the first."""
    lines = [json.loads(line) for state in place.states for line in (state / "times.jsonl").read_text().splitlines()]
    parts: dict[str, list[float]] = {"forwards": [], "update": [], "start-up": []}
    for server_round, whole in enumerate(seconds[1:], 2):
        mine = [line for line in lines if line["round"] == server_round]
        forwards = max(line["measured"] - line["caught-up"] for line in mine)
        update = max(line["caught-up"] - line["entered"] + line["done"] - line["measured"] for line in mine)
        parts["forwards"].append(forwards)
        parts["update"].append(update)
        parts["start-up"].append(whole - share - forwards - update)
    return parts


def _medians(runs: list[dict[str, Any]], worker: bool) -> dict[str, float]:
    mine = [run for run in runs if run["worker"] is worker]
    parts = {key: statistics.median(v for run in mine for v in run[key]) for key in ("forwards", "update", "start-up")}
    return {
        "round-1": statistics.median(run["seconds"][0] for run in mine),
        "round": statistics.median(v for run in mine for v in run["seconds"][1:]),
        "flower": statistics.median(run["flower"] for run in mine),
        **parts,
        "above-flower-and-forwards": statistics.median(
            update + start_up for run in mine for update, start_up in zip(run["update"], run["start-up"], strict=True)
        ),
    }


def main() -> None:
    """Measure, print and write."""
    from fedapps.results.environment import describe_environment

    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["fedavg", "hiso"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    measure = {"fedavg": compare_fedavg, "hiso": compare_workers}[arguments.what]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.repetitions, arguments.rounds)
    record = {**found, "environment": describe_environment(device="cpu", data_checksums={})}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"superlink_rounds_{arguments.what}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in found.items() if key not in ("pairs", "runs")}, indent=1))


if __name__ == "__main__":
    main()
