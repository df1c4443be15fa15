"""The client: the project's own training loop, with FedPM around it."""

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from simulation import customers

from fedapps.client_apps.fedpm import fedpm_reply  # FedPM
from fedapps.curvature.foof import FoofPreconditioner  # FedPM
from shop.model import build_model

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this shop's customers."""
    features, returned = map(torch.from_numpy, customers(int(context.node_config["partition-id"]), year=1))
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with FoofPreconditioner(model, damping=0.1) as foof:  # FedPM
        for _ in range(5):
            for batch in torch.randperm(len(features)).split(20):
                model.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(features[batch]), returned[batch])
                loss.backward()
                foof.step(lr=0.3)  # FedPM, in place of optimizer.step()
        content = fedpm_reply(foof, model, num_examples=len(features), train_loss=float(loss.detach()))  # FedPM
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the model on customers that nobody trains on."""
    features, returned = map(torch.from_numpy, customers(int(context.node_config["partition-id"]), year=2))
    model = build_model().eval()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with torch.no_grad():
        accuracy = (model(features).argmax(dim=1) == returned).float().mean()
    metrics = MetricRecord({"num-examples": len(features), "accuracy": float(accuracy)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
