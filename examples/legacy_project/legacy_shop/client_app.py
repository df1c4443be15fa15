"""The client: a NumPyClient whose fit takes second-order steps."""

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar

from fedapps.client_apps.fedpm import fedpm_reply
from fedapps.curvature.foof import FoofPreconditioner
from fedapps.strategies.legacy import to_fit_result
from fedapps.tasks.torch_arrays import load_module_arrays, module_arrays
from legacy_shop.model import build_model, customers


class Shop(NumPyClient):
    """One shop."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.model = build_model()
        self.names = list(module_arrays(self.model))

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train on this shop's customers."""
        received = dict(zip(self.names, parameters, strict=True))
        load_module_arrays(self.model, received)
        features, returned = map(torch.from_numpy, customers(self.number, year=1))
        with FoofPreconditioner(self.model, damping=0.1) as foof:
            for _ in range(5):
                self.model.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.model(features), returned)
                loss.backward()
                foof.step(lr=float(config["lr"]))
            content = fedpm_reply(foof, self.model, num_examples=len(features), train_loss=float(loss.detach()))
        return to_fit_result(content)

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[float, int, dict[str, Scalar]]:
        """Measure the model on customers that nobody trains on."""
        load_module_arrays(self.model, dict(zip(self.names, parameters, strict=True)))
        features, returned = map(torch.from_numpy, customers(self.number, year=2))
        with torch.no_grad():
            outputs = self.model(features)
        loss = float(torch.nn.functional.cross_entropy(outputs, returned))
        return loss, len(features), {"accuracy": float((outputs.argmax(dim=1) == returned).float().mean())}


def client_fn(context: Context) -> Client:
    """Make the client of a node."""
    return Shop(int(context.node_config["partition-id"])).to_client()


app = ClientApp(client_fn)
