from __future__ import annotations

import copy
import logging
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="probes need torch")

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)
from torch import nn

from fedapps.zeroth_order import probing
from fedapps.zeroth_order.directions import direction
from fedapps.zeroth_order.errors import ProbeError
from fedapps.zeroth_order.probing import LEAST_MOVED, Difference, Prober
from fedapps.zeroth_order.scheme import LocalStep, Probe, Scheme


class Net(nn.Module):
    """Tied weights, a parameter of its own, recurrence, batch norm, frozen parts, dropout of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True, num_layers=2, dropout=0.3)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h, _ = self.rnn(self.embed(ids))
        h = self.norm(self.frozen(h[:, -1]) * self.scale)
        h = F.dropout(self.drop(h), 0.5) if self.dropping else h
        return self.head(h)

    dropping = True


def losses(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 30, (5, 4), generator=generator), torch.randint(0, 30, (5,), generator=generator))
        for _ in range(3)
    ]


def hessian(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {"H": {name: torch.rand(p.shape, generator=generator) + 0.5 for name, p in trainable.items()}}


class Slow:
    """The plain way: a copied model whose parameters are overwritten, NumPy directions, dropout removed."""

    def __init__(self, model: Net, H: dict[str, torch.Tensor], seed: int) -> None:
        self.model = copy.deepcopy(model).eval()
        self.model.dropping = False
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.H, self.seed = H, seed

    def z(self, step: int, probe: int) -> dict[str, np.ndarray]:
        offset, found = 0, {}
        for name, p in self.parameters.items():
            u = direction(self.seed, step, probe, offset, offset + p.numel()).reshape(tuple(p.shape))
            found[name] = u / np.sqrt(self.H[name].numpy())
            offset += p.numel()
        return found

    def loss(self, x: dict[str, np.ndarray], batch: Any) -> float:
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(torch.from_numpy(x[name]))
            return float(losses(self.model, batch).mean())

    def run(self, batches: Any, first: int, P: int, mu: float, lr: float, difference: Difference) -> Any:
        x = {name: p.detach().numpy().copy() for name, p in self.parameters.items()}
        rows, radius = [], np.float32(mu)
        for k, batch in enumerate(batches):
            zs = [self.z(first + k, p) for p in range(P)]
            base = self.loss(x, batch)
            row = []
            for z in zs:
                plus = self.loss({n: x[n] + radius * z[n] for n in x}, batch)
                minus = self.loss({n: x[n] - radius * z[n] for n in x}, batch)
                forward, central = (plus - base) / float(radius), (plus - minus) / (2 * float(radius))
                row.append(np.float32(forward if difference is Difference.FORWARD else central))
            D = {n: np.zeros_like(x[n]) for n in x}
            for g, z in zip(row, zs, strict=True):
                D = {n: D[n] + np.float32(g / np.float32(P)) * z[n] for n in x}
            x = {n: x[n] - np.float32(lr) * D[n] for n in x}
            rows.append(tuple(map(float, row)))
        return tuple(rows), x


@pytest.mark.parametrize("difference", list(Difference))
@pytest.mark.parametrize("num_probes", [1, 3])
def test_local_steps_equal_the_plain_way_with_a_copied_model(
    model: Net, batches: Any, difference: Difference, num_probes: int
) -> None:
    state = hessian(model)
    options: Any = {"first_step": 7, "num_probes": num_probes, "mu": 1e-2, "lr": 0.05, "difference": difference}
    prober = Prober(model, Scheme(3), state)
    result = prober.probe(losses, batches, **options)
    slow = Slow(model, state["H"], 3)
    expected, x = slow.run(batches, 7, num_probes, 1e-2, 0.05, difference)
    assert result.scalars == expected
    assert (result.lost, result.unused, result.moved) == ((), (), None)
    there = prober.displaced([LocalStep(7 + k, row, 0.05) for k, row in enumerate(expected)])
    for name, values in x.items():
        np.testing.assert_array_equal(there[name].numpy(), values)


def test_two_evaluations_are_equal_and_see_each_batch(model: Net, batches: Any) -> None:
    prober = Prober(model, Scheme(3, "decomfl"))
    options: Any = {"first_step": 7, "num_probes": 2, "mu": 1e-2, "lr": 0.0}
    torch.manual_seed(5)
    first = prober.probe(losses, batches, **options)
    torch.manual_seed(6)
    assert Prober(model, Scheme(3, "decomfl")).probe(losses, batches, **options) == first
    assert len(set(first.losses)) == 3


def test_the_model_is_bitwise_as_before_whatever_is_raised(model: Net, batches: Any) -> None:
    model.train()
    model.drop.eval()
    flags = {name: m.training for name, m in model.named_modules()}
    before = {name: (id(v), v.clone()) for name, v in model.state_dict(keep_vars=True).items()}
    generator = torch.random.get_rng_state()
    prober = Prober(model, Scheme(3), hessian(model))
    calls = 0

    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        value = losses(model, batch)
        if calls == 3:
            raise KeyboardInterrupt
        return value

    with pytest.raises(KeyboardInterrupt):
        prober.probe(failing, batches, first_step=0, num_probes=2, mu=1e-2, lr=0.1)
    prober.probe(losses, batches, first_step=0, num_probes=2, mu=1e-2, lr=0.1)
    for name, value in model.state_dict(keep_vars=True).items():
        assert (id(value), torch.equal(value, before[name][1])) == (before[name][0], True), name
    assert {name: m.training for name, m in model.named_modules()} == flags
    assert torch.equal(torch.random.get_rng_state(), generator)


def test_with_mu_zero_the_difference_is_exactly_zero(model: Net, batches: Any) -> None:
    model.train()
    prober = Prober(model, Scheme(3), hessian(model))
    here = prober.loss(losses, batches[0])
    assert prober.loss(losses, batches[0], probe=Probe(4, 1, 0.0)) == here
    assert prober.loss(losses, batches[0], probe=Probe(4, 1, 1e-2)) != here


class Noisy(nn.Module):
    """Draws noise of its own, which no switch turns off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + torch.rand_like(x))


def test_noise_of_a_models_own_is_the_same_in_every_pass_of_a_step() -> None:
    """The loss is linear in the parameters, so with equal noise forward and central differences agree."""
    torch.manual_seed(0)
    model, batch = Noisy(), torch.ones(2, 3)
    scheme: Any = Scheme(3, "decomfl")
    found = [
        Prober(model, scheme)
        .probe(lambda m, b: m(b)[:, 0], [batch, batch], first_step=0, num_probes=1, mu=0.5, lr=0.0, difference=d)
        .scalars
        for d in Difference
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    assert abs(found[0][0][0] - found[0][1][0]) > 1e-3


def test_only_touched_rows_of_an_embedding_are_drawn(model: Net, batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    real = probing.perturb

    def counting(theta: Any, *args: Any, **options: Any) -> Any:
        drawn.append((tuple(theta.shape), None if options["rows"] is None else options["rows"].tolist()))
        return real(theta, *args, **options)

    monkeypatch.setattr(probing, "perturb", counting)
    model.head.weight = nn.Parameter(torch.randn(30, 8))
    Prober(model, Scheme(3, "decomfl")).loss(losses, batches[0], probe=Probe(0, 0, 1e-3))
    assert drawn[0] == ((30, 8), sorted(set(batches[0][0].flatten().tolist())))
    assert drawn[-1] == ((30, 8), None)
    assert len(drawn) == 2 + 8 + 3


def test_float16_and_bfloat16_models_are_left_alone_over_many_probes() -> None:
    """Perturbing in place and back would leave a rounding error after each of 500 cycles."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        layer = nn.Linear(64, 64).to(dtype)
        before = [p.detach().clone() for p in layer.parameters()]
        prober = Prober(layer, Scheme(1, "decomfl"))
        x = torch.randn(2, 64).to(dtype)
        for step in range(500):
            prober.loss(lambda m, b: m(b).float().pow(2), x, probe=Probe(step, 0, 1e-2))
        assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


@pytest.fixture
def flower_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("flwr")
    propagate, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = propagate


@pytest.mark.parametrize(
    ("mu", "lost", "said"),
    [
        (1e-4, 2, "2 of 2 probes were lost in rounding: the loss did not change at all (mu 0.0001, bfloat16, 0.0 % of"),
        (2e-3, 0, "most of a probe is lost in rounding (mu 0.002, bfloat16, "),
        (0.05, 0, None),
    ],
    ids=["all", "most", "little"],
)
def test_a_probe_lost_in_rounding_is_reported(
    mu: float, lost: int, said: str | None, flower_log: pytest.LogCaptureFixture
) -> None:
    """Weights of 1 in bfloat16 have a spacing of 2^-7 above and 2^-8 below: 1e-4 times 4.3 is less than half of it."""
    layer = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
    nn.init.ones_(layer.weight)
    prober = Prober(layer, Scheme(1, "decomfl"))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    result = prober.probe(lambda m, b: m(b).float().pow(2).mean(1), [x], first_step=0, num_probes=2, mu=mu, lr=0.1)
    z = np.stack([direction(1, 0, p, 0, 256) for p in range(2)]).astype(np.float64)
    moves = np.where(z > 0, mu * z > 2.0**-8, -mu * z > 2.0**-9)  # half the spacing above and below 1
    assert result.moved == moves.mean()
    assert result.lost == ((0, 0), (0, 1))[:lost]
    reported = [r.getMessage() for r in flower_log.records if "lost in rounding" in r.getMessage()]
    assert len(reported) == (said is not None)
    if said is not None:
        assert reported[0].startswith(said)
        assert f"{100 * moves.mean():.1f} % of the elements moved); raise mu" in reported[0]
    assert (result.moved < LEAST_MOVED) == (said is not None)


def test_a_zero_that_only_changes_its_sign_has_not_moved() -> None:
    """0 - 1e-20 is -0 in float16."""
    layer = nn.Linear(16, 16, bias=False).to(torch.float16)
    nn.init.zeros_(layer.weight)
    prober, x = Prober(layer, Scheme(1, "decomfl")), torch.ones(1, 16, dtype=torch.float16)
    result = prober.probe(lambda m, b: m(b).float().mean(1), [x], first_step=0, num_probes=1, mu=1e-20, lr=0.1)
    assert result.moved == 0


def test_losses_are_reduced_in_float32() -> None:
    """The mean of 4096 bfloat16 ones and one 2 is 1 + 1/4097 in float32, and 1 in bfloat16."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    values = torch.cat([torch.ones(4096, 1), torch.full((1, 1), 2.0)])
    found = Prober(layer, Scheme(1)).loss(lambda m, b: m(b)[:, 0].to(torch.bfloat16), values)
    assert found == float(np.float32(4098 / 4097))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b).mean().half(), "loss: expected a mean in float32, got torch.float16"),
        (lambda m, b: 0.5, "expected a floating-point tensor with elements, got float"),
        (lambda m, b: m(b).argmax(1), "expected a floating-point tensor"),
        (lambda m, b: m(b)[:0], "expected a floating-point tensor with elements"),
    ],
    ids=["half", "number", "integers", "empty"],
)
def test_a_loss_that_cannot_be_compared_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        Prober(nn.Linear(2, 2), Scheme(1)).loss(loss, torch.ones(3, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"mu": 0.0}, "mu: expected"), ({"mu": 1e-60}, "mu: expected"), ({"num_probes": 0}, "a batch and a probe")],
)
def test_options_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    options: Any = {"first_step": 0, "num_probes": 1, "mu": 1e-3, "lr": 0.1} | change
    with pytest.raises(ProbeError, match=message):
        Prober(nn.Linear(2, 2), Scheme(1)).probe(lambda m, b: m(b), [torch.ones(1, 2)], **options)


def test_parameters_that_the_loss_never_reads_are_named(flower_log: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    result = Prober(model, Scheme(1)).probe(
        lambda m, b: m["a"](b), [torch.ones(1, 2)], first_step=0, num_probes=1, mu=1e-3, lr=0.1
    )
    assert result.unused == ("b.weight", "b.bias")
    assert "never reads: b.weight, b.bias" in flower_log.text


def test_a_loss_that_is_not_finite_comes_back_as_it_is() -> None:
    model = nn.Linear(2, 2)
    result = Prober(model, Scheme(1)).probe(
        lambda m, b: m(b) * float("inf"), [torch.ones(1, 2)] * 2, first_step=0, num_probes=1, mu=1e-3, lr=0.1
    )
    assert not np.isfinite(result.scalars).any()


@pytest.mark.slow
def test_memory_holds_one_materialised_tensor_at_a_time() -> None:
    """Sixteen layers of 1 MiB: a probe allocates in NumPy little more than the largest of them."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    prober = Prober(model, Scheme(1, "decomfl"))
    x = torch.ones(1, 512)
    prober.loss(lambda m, b: m(b), x, probe=Probe(0, 0, 1e-3))
    fresh = Prober(model, Scheme(1, "decomfl"))
    tracemalloc.start()
    fresh.loss(lambda m, b: m(b), x, probe=Probe(1, 0, 1e-3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * 2**20


def test_tensors_that_outlive_an_operation_are_not_overwritten() -> None:
    """Both transposes are held while the second is materialised: the buffer must not be lent twice."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.zeros(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.a.t(), self.b.t()
            return a - b

    found = Prober(Two(), Scheme(1, "decomfl")).loss(lambda m, b: m(b), torch.ones(1), probe=Probe(0, 0, 1e-6))
    assert found == pytest.approx(1, abs=1e-4)


def test_the_clients_steps_are_what_the_journal_would_apply() -> None:
    """Alone in a round, a client's local model is the server's next one."""
    from fedapps.zeroth_order.journal import Slice
    from fedapps.zeroth_order.replica import Replica
    from fedapps.zeroth_order.scheme import Record

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    scheme = Scheme(9, "hiso")
    replica = Replica(scheme, dict(model.named_parameters()))
    batches = [torch.randn(4, 3) for _ in range(3)]
    for round_ in (1, 2):
        prober = Prober(model, scheme, replica.state)
        first = 3 * round_
        result = prober.probe(lambda m, b: m(b).pow(2), batches, first_step=first, num_probes=2, mu=1e-2, lr=0.1)
        local = prober.displaced([LocalStep(first + k, row, 0.1) for k, row in enumerate(result.scalars)])
        replica.advance(Slice(round_ - 1, round_, (Record(round_, first, 0.1, 1e-2, 0.1, 1e-6, result.scalars, 1),)))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, local[name])
