"""Second-order clients in whole runs: every option, the same bits everywhere, what travels, and what stays in memory."""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import nn
from torch.nn.functional import cross_entropy

from fedapps.client_apps.fedpm import fedpm_reply, received_model
from fedapps.curvature.foof import TRANSFORMED, FoofPreconditioner
from fedapps.curvature.layers import COMPILED
from fedapps.curvature.layout import Layout
from fedapps.errors import MessageError, SettingsError, TaskError
from fedapps.messages import pack_arrays
from fedapps.methods import resolve_settings
from fedapps.simulation.inprocess import InProcessGrid
from fedapps.strategies import FedPM
from fedapps.tasks.torch_arrays import load_module_arrays, module_arrays

from ..simulation import runs

short_run, assert_same_model = runs.short_run, runs.assert_same_model

pytestmark = pytest.mark.usefixtures("own_module")

DOCS = Path(__file__).parents[2] / "docs" / "methods" / "fedpm.md"
LAYERED = {"method": "fedpm", "task": "fedapps_layers:Layered", "local-epochs": 3, "batch-size": 2, "lr": 0.01}

OPTIONS: dict[str, dict[str, Any]] = {
    "the paper": {"fedpm.estimate": "last-batch", "fedpm.refresh": 1},
    "defaults": {},
    "full pass": {"fedpm.estimate": "full-pass"},
    "refresh, sample and cut": {"fedpm.refresh": 2, "fedpm.max-rows": 5, "fedpm.max-width": 7},
    "all at once": {
        "fedpm.refresh": 2,
        "fedpm.max-rows": 5,
        "fedpm.max-width": 7,
        "fedpm.wire": "bfloat16",
        "fedpm.factor-min-rows": 2,
    },
    "localnewton": {"method": "localnewton", "localnewton.refresh": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow
def test_every_option_gives_the_same_bits_again_and_after_a_resume(tmp_path: Path, name: str) -> None:
    """Those that draw or code something also in another process."""
    config = {**LAYERED, **OPTIONS[name]}
    first = short_run(tmp_path / "first", config)
    if name in ("full pass", "all at once"):
        assert_same_model(first.model, short_run(tmp_path / "worker", config, workers=1).model)
    short_run(tmp_path / "halves", {**config, "num-server-rounds": 1})
    halves = short_run(tmp_path / "halves", {**config, "resume": True})
    assert_same_model(first.model, halves.model)
    assert first.rows("train")[-1]["folded"] == [0, 1, 2]
    assert all(np.isfinite(value).all() for value in first.model.values())


@pytest.mark.slow
def test_every_option_is_another_run(tmp_path: Path) -> None:
    """An option that reached nobody would leave the model as it is."""
    alone = [
        {"refresh": 3}, {"refresh": 3, "decay": 0.1}, {"refresh": 3, "estimate": "last-batch"}, {"max-rows": 5},
        {"max-width": 7}, {"damping": 0.2}, {"wire": "bfloat16"}, {"estimate": "full-pass"}, {"factor-min-rows": 2},
    ]  # fmt: skip
    configs = [{}, *({f"fedpm.{key}": value for key, value in options.items()} for options in alone)]
    bits = set()
    for i, options in enumerate(configs):
        run = short_run(tmp_path / str(i), {**LAYERED, **options, "num-server-rounds": 1})
        bits.add(b"".join(value.tobytes() for value in run.model.values()))
    assert len(bits) == len(configs)


def test_bytes_are_those_of_the_forms(tmp_path: Path) -> None:
    """One client of two examples. Widths 5 (2 rows), two groups of 18 (32 rows), 17 (8 rows), 13 (2 rows).

    Triangles have 15, 2 * 171, 153 and 91 numbers. With at least 2 rows the factors have 2 rows of 5 and 13, 8 of 17, and a
    damping each: 9 + 1, 108 + 1 and 25 + 1; the grouped layer has more rows than its width.
    """
    config = {**LAYERED, "task-options": 'sizes = "2"', "fedpm.estimate": "last-batch"}

    def measured(name: str, **options: Any) -> int:
        run = short_run(tmp_path / name, {**config, **{f"fedpm.{k}": v for k, v in options.items()}}, 1)
        rows = [row for row in run.folder.read_ledger() if row["kind"] == "train" and row["direction"] == "up"]
        return int(rows[0]["payload"]["curvature"])

    triangles, factors = 15 + 2 * 171 + 153 + 91, 10 + 2 * 171 + 109 + 26
    assert measured("float32") == 4 * triangles
    assert measured("bfloat16", wire="bfloat16") == 2 * triangles
    assert measured("factor", **{"factor-min-rows": 2}) == 4 * factors
    assert measured("more rows asked for", **{"factor-min-rows": 9}) == 4 * triangles
    assert measured("cut", **{"max-width": 9}) == 4 * (15 + 2 * (45 + 45) + (36 + 45) + (21 + 28))


def test_the_run_folder_says_what_was_preconditioned(tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", LAYERED)
    first, second = run.rows("train")
    assert first["preconditioned"] == ["0.weight", "0.bias", "2.weight", "5.weight", "5.bias", "7.weight", "7.bias"]
    assert first["averaged"] == ["3.weight", "3.bias"]
    assert first["maximum"] == []
    assert "averaged" not in second
    assert "averaged" not in short_run(tmp_path / "fedavg", {"method": "fedavg"}).rows("train")[0]


@pytest.mark.parametrize("method", ["fedpm", "localnewton"])
def test_integer_buffers_are_listed_apart(tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr")
    run = short_run(tmp_path / "run", {"method": method, "task": "fedapps_testing:BatchNormSites"})
    row, _ = run.rows("train")
    assert row["preconditioned"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert row["averaged"] == ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert row["maximum"] == ["1.num_batches_tracked"]
    logged = [message for message in caplog.messages if "1.num_batches_tracked" in message]
    assert [message.split(" ")[0].strip(":") for message in logged] == ["maximum"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedpm", "localnewton"])
def test_a_run_that_preconditions_nothing_is_fedavg_and_says_so_in_every_round(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The hooks of a compiled model need not be called."""
    compiled = {"task": "fedapps_layers:Compiled", "lr": 0.1}
    run = short_run(tmp_path / "run", {**compiled, "method": method})
    rows = run.rows("train")
    assert rows[0]["preconditioned"] == []
    assert rows[0]["averaged-since"] == {
        COMPILED: [f"_orig_mod.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")]
    }
    for row in rows:
        assert sum("NOTHING IS PRECONDITIONED" in note and COMPILED in note for note in row["notes"]) == 1
    said = [record for record in caplog.records if "NOTHING IS PRECONDITIONED" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"] * len(rows)
    fedavg = short_run(tmp_path / "fedavg", {**compiled, "method": "fedavg"}).model
    for name, value in run.model.items():
        np.testing.assert_allclose(value, fedavg[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ["fedpm", "localnewton"])
def test_a_layer_inside_vmap_is_averaged_with_the_reason_in_the_row(tmp_path: Path, method: str) -> None:
    row, second = short_run(tmp_path / "run", {"method": method, "task": "fedapps_layers:Mapped"}).rows("train")
    assert row["folded"] == [0, 1, 2]
    assert row["preconditioned"] == ["head.weight", "head.bias"]
    assert row["averaged-since"] == {TRANSFORMED: ["each.weight", "each.bias"]}
    (note,) = row["notes"]
    assert "each.weight, each.bias" in note
    assert TRANSFORMED in note
    assert "notes" not in second


def test_what_is_preconditioned_is_said_in_the_first_row_with_a_valid_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = FedPM._check_layout

    def refuse_the_first_round(self: FedPM, layout: Layout, where: str) -> None:
        if self.rounds.report.server_round == 1:
            raise MessageError("not yet")
        check(self, layout, where)

    monkeypatch.setattr(FedPM, "_check_layout", refuse_the_first_round)
    first, second = short_run(tmp_path / "run", LAYERED).rows("train")
    assert first["folded"] == []
    assert "averaged" not in first
    assert second["averaged"] == ["3.weight", "3.bias"]


def test_tied_weights_travel_once_and_a_layer_used_twice_has_a_block(tmp_path: Path) -> None:
    """Head and embedding are one tensor, sent once."""
    run = short_run(tmp_path / "run", {"method": "fedpm", "task": "fedapps_layers:Tied"})
    assert list(run.model) == [
        "first.weight", "first.bias", "second.bias", "twice.weight", "twice.bias", "head.weight", "head.bias",
    ]  # fmt: skip
    row = run.rows("train")[0]
    assert row["averaged"] == ["first.weight", "first.bias", "second.bias"]
    assert row["folded"] == [0, 1, 2]
    ups = [row for row in run.folder.read_ledger() if row["kind"] == "train" and row["direction"] == "up"]
    assert ups[0]["payload"]["arrays"] == 4 * (16 + 4 + 4)


@pytest.mark.parametrize("damping", [0.1, 0.0])
def test_a_layer_that_some_clients_do_not_use_refuses_nobody(tmp_path: Path, damping: float) -> None:
    """Client 0 uses one layer, the clients 1 and 2 the other; each layer ends where its users lead it."""
    config = {
        "method": "fedpm", "task": "fedapps_layers:Branches", "fedpm.damping": damping,
        "task-options": "shift = 100.0", "batch-size": 6, "num-server-rounds": 1,
    }  # fmt: skip
    run = short_run(tmp_path / "run", config)
    row = run.rows("train")[0]
    assert row["folded"] == [0, 1, 2]
    assert [note.split(",")[0] for note in row["notes"] if "no input" in note] == [
        "layer 'near': no input on clients 1", "layer 'far': no input on client 0",
    ]  # fmt: skip
    before = short_run(tmp_path / "none", {**config, "lr": 1e-12}).model
    assert all(np.abs(run.model[name] - before[name]).max() > 1e-4 for name in before)


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read the resident memory from")
@pytest.mark.slow
def test_memory_does_not_grow_over_rounds(tmp_path: Path) -> None:
    """Memory does not grow with clients and rounds.

    12 clients, 3 a round, 0.27 million parameters and 1.1 MB of curvature a client.
    """
    config = {
        "method": "fedpm", "task": "fedapps_layers:Wide", "task-options": f'sizes = "{",".join(["4"] * 12)}"',
        "fraction-train": 0.25, "local-steps": 1, "evaluate-every": 0,
    }  # fmt: skip
    short_run(tmp_path / "run", {**config, "num-server-rounds": 4}, 12)
    early = resident_mb()
    short_run(tmp_path / "run", {**config, "num-server-rounds": 16, "resume": True}, 12)
    assert resident_mb() - early < 25


def test_a_factor_of_a_single_row_cannot_be_asked_for() -> None:
    with pytest.raises(SettingsError, match=r"'fedpm.factor-min-rows': expected 0 \(off\) or at least 2, got 1"):
        resolve_settings({"fedpm.factor-min-rows": 1})


@pytest.mark.slow
def test_the_wire_format_holds_for_convex_models_too(tmp_path: Path) -> None:
    """A full Hessian in bfloat16: half of half the bytes of float64, and still a step towards the optimum."""
    data = Path(__file__).parents[1] / "data"
    config = {
        "method": "fedpm", "task": "a9a", "data-dir": str(data), "partition": "iid", "partition-column": "",
        "num-server-rounds": 3, "local-steps": 1, "batch-size": 0, "lr": 1.0, "task-options": "regularisation = 1e-3",
    }  # fmt: skip
    models, sizes = [], []
    for wire in ("float32", "bfloat16"):
        run = short_run(tmp_path / wire, {**config, "fedpm.wire": wire}, 4)
        ups = [row for row in run.folder.read_ledger() if row["kind"] == "train" and row["direction"] == "up"]
        sizes.append(ups[0]["payload"]["curvature"])
        models.append(run.model["weights"])
    assert sizes[0] == 4 * sizes[1]
    distance = np.linalg.norm(models[1] - models[0]) / np.linalg.norm(models[0])
    assert 0 < distance < 0.1


# The documented snippets ----------------------------------------------------------------------------------

needs_docs = pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not here")


def snippet(section: str, number: int = 0) -> str:
    """Give a Python block of a section, as it stands."""
    text = re.split(rf"^## {section}$", DOCS.read_text(), flags=re.MULTILINE)[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[number]


BEFORE = """
import torch
from flwr.app import Context, Message
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from shop import build_model, load_data

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = load_data(int(context.node_config["partition-id"]))
    for features, labels in loader:
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(loader.dataset), "train-loss": loss.item()})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
"""
"""A client as Flower's templates have it; the same but for the loop's indentation is what the docs turn into FedPM's."""

SHOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset


def build_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def load_data(partition):
    x = torch.randn(24 + 8 * partition, 4, generator=torch.Generator().manual_seed(partition))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
"""
"""What the documented client imports."""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give the module that the documented client and server import."""
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("shop")
    for name in ("shop", "shop_client"):
        sys.modules.pop(name, None)


@torch.no_grad()
def loss_of(shop: Any, arrays: dict[str, np.ndarray]) -> float:
    """Give the mean loss of three clients."""
    model = shop.build_model()
    load_module_arrays(model, arrays)
    losses = [cross_entropy(model(x), y, reduction="sum") for p in range(3) for x, y in shop.load_data(p)]
    return float(sum(losses)) / sum(len(shop.load_data(p).dataset) for p in range(3))


@needs_docs
def test_at_most_five_lines_of_the_documented_client_differ_from_flowers() -> None:
    lines = snippet("In your own client").splitlines()
    marked = {line.split("  # ")[0].strip() for line in lines if "# added" in line or "# changed" in line}
    old = {line.strip() for line in BEFORE.splitlines()}
    assert {line.split("  # ")[0].strip() for line in lines} - old == marked
    assert 1 <= len(marked) <= 5


@needs_docs
def test_the_snippet_of_the_docs_turns_an_existing_client_into_fedpms(
    tmp_path: Path, shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The code block as it stands, driven by Flower's own ``start``; clients weigh as many examples as they have."""
    caplog.set_level("INFO", "flwr")
    (tmp_path / "shop_client.py").write_text(snippet("In your own client"))
    first = module_arrays(shop.build_model())
    strategy = FedPM(fraction_evaluate=0.0, min_available_nodes=3)
    grid = InProcessGrid(3, {}, client_app="shop_client:app")
    result = strategy.start(grid=grid, initial_arrays=pack_arrays(first), num_rounds=3)
    assert sorted(strategy.rounds.report.num_examples.values()) == [24, 32, 40]
    # The client answers no query, and still the log says what is done with every tensor.
    assert "preconditioned, block 5 x 5: 0.weight, 0.bias" in caplog.messages
    assert "averaged (BatchNorm1d has no block): 1.weight, 1.bias" in caplog.messages
    assert "maximum (integer buffer): 1.num_batches_tracked" in caplog.messages
    mixed = {name: array.numpy() for name, array in result.arrays.items()}
    assert loss_of(shop, mixed) < 0.7 * loss_of(shop, first)


@needs_docs
def test_the_documented_server_starts_the_documented_client(
    tmp_path: Path, shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_client.py").write_text(snippet("In your own client"))
    code = snippet("In your own client", number=1)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCS), "exec"), names)
    ended = []
    monkeypatch.setattr(FedPM, "start", lambda *args, **kw: ended.append(Strategy.start(*args, **kw)) or ended[-1])
    config = {"num-server-rounds": 2}
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    names["main"](InProcessGrid(3, config, client_app="shop_client:app"), context)
    assert list(ended[0].train_metrics_clientapp) == [1, 2]
    assert list(ended[0].arrays) == list(module_arrays(shop.build_model()))


def frozen_and_tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[2].weight = model[1].weight
    return model


def test_a_server_that_starts_from_a_state_dict_is_told_how_to_pack_tied_and_frozen_weights() -> None:
    """Where the client loads the model, and on the server where it loads it in a way of its own."""
    model = frozen_and_tied()
    sent = ArrayRecord(model.state_dict())
    message = Message(RecordDict({"arrays": sent}), dst_node_id=1, message_type="train")
    with pytest.raises(
        TaskError, match=r"unknown: '0.weight', '0.bias', '2.weight'; .*pack_arrays\(module_arrays\(model"
    ):
        received_model(model, message)
    with FoofPreconditioner(model, damping=0.1) as foof:
        model(torch.ones(3, 4)).sum().backward()
        foof.step(lr=0.1)
    strategy = FedPM(min_available_nodes=1)
    started = {name: array.numpy() for name, array in sent.items()}
    strategy.rounds.begin(1, started, [0])
    strategy.receive(0, fedpm_reply(foof, model, num_examples=3), started)
    reason = strategy.rounds.report.refused[0]
    assert "without 0.weight, 0.bias, 2.weight;" in reason
    assert "start the server from pack_arrays(module_arrays(model))" in reason
    first = pack_arrays(module_arrays(model))
    received_model(frozen_and_tied(), Message(RecordDict({"arrays": first}), dst_node_id=1, message_type="train"))


@needs_docs
@pytest.mark.slow
def test_the_functional_form_of_the_docs_is_the_mixing_in_float64_and_needs_no_flower(tmp_path: Path) -> None:
    """With ``lr = 1`` each ``M_i`` is minus the client's gradient."""
    code = snippet("In a strategy of your own")
    done = "\nimport sys\nsys.exit('flwr' in sys.modules)\n"
    assert subprocess.run([sys.executable, "-c", code + done], check=False).returncode == 0
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCS), "exec"), names)
    P, M = np.zeros((4, 4)), np.zeros((2, 4))
    for x, y in names["data"]:
        rows = np.hstack([x.double().numpy(), np.ones((len(x), 1))])
        P += rows.T @ rows + len(x) * 0.1 * np.eye(4)
        M += y.double().numpy().T @ rows
    expected = M @ np.linalg.inv(P)
    np.testing.assert_allclose(names["weight"], expected[:, :3], atol=1e-5)
    np.testing.assert_allclose(names["bias"], expected[:, 3:], atol=1e-5)
