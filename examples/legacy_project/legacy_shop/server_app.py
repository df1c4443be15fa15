"""The server: Flower's legacy components, with FedPM behind the adapter."""

import json
from pathlib import Path

from flwr.app import Context
from flwr.common import NDArrays, Scalar
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp

from fedapps.strategies import FedPM
from fedapps.strategies.legacy import LegacyStrategy
from fedapps.tasks.torch_arrays import module_arrays
from legacy_shop.model import build_model


def server_fn(context: Context) -> ServerAppComponents:
    """Put the server together."""
    result = str(context.run_config["result"])

    def write_down(server_round: int, arrays: NDArrays, config: dict[str, Scalar]) -> None:
        if result:
            shapes = [list(array.shape) for array in arrays]
            Path(result).write_text(json.dumps({"round": server_round, "shapes": shapes}))

    strategy = LegacyStrategy(
        FedPM(),
        module_arrays(build_model()),
        fit_config=lambda server_round: {"lr": 0.3},
        evaluate_fn=write_down,
    )
    config = ServerConfig(num_rounds=int(context.run_config["num-server-rounds"]))
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
