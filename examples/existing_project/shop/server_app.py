"""The server: Flower's own loop, with FedPM as its strategy."""

import json
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from strategies import CautiousFedAvg  # what the project used before

from fedapps.messages import pack_arrays
from fedapps.strategies import FedPM  # FedPM
from fedapps.tasks.torch_arrays import module_arrays
from shop.model import build_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the rounds of the run config."""
    torch.manual_seed(0)
    strategy = FedPM()  # was: CautiousFedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=pack_arrays(module_arrays(build_model())),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    accuracies = {r: dict(m) for r, m in result.evaluate_metrics_clientapp.items()}
    losses = {r: dict(m) for r, m in result.train_metrics_clientapp.items()}
    if path := str(context.run_config["result"]):
        Path(path).write_text(
            json.dumps(
                {
                    "evaluate": accuracies,
                    "train": losses,
                    "arrays": {name: [*array.shape] for name, array in result.arrays.items()},
                    "before": CautiousFedAvg.__module__,
                }
            )
        )
