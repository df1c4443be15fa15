from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from fedapps.zeroth_order import replica as module
from fedapps.zeroth_order.errors import AstrayError, ReplicaError
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.number_formats import NumberFormat, narrow
from fedapps.zeroth_order.replica import Replica, start_state
from fedapps.zeroth_order.rules import RULES, apply_round
from fedapps.zeroth_order.scheme import Record, Scheme

SHAPES = {"w": (40, 7), "b": (7,), "scale": ()}


def base(number_format: NumberFormat = NumberFormat.FLOAT32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: narrow(random.standard_normal(shape).astype(np.float32), number_format)
        if shape
        else narrow(np.ones((), np.float32), number_format)
        for name, shape in SHAPES.items()
    }


def records_of(count: int, method: str = "hiso") -> list[Record]:
    random = np.random.default_rng(1)
    momentum = 0.9 if RULES[method].momentum else None
    rounds = [r for r in range(1, count + 3) if r not in (3, 4)]  # rounds 3 and 4 were refused
    return [
        Record(
            r, 2 * r, 0.05, 1e-3, 0.2, 1e-4,
            tuple(map(tuple, random.standard_normal((2, 2)).astype(np.float32).tolist())), 2, None, momentum,
        )
        for r in rounds
    ]  # fmt: skip


def expected_state(scheme: Scheme, theta: dict[str, np.ndarray], records: list[Record]) -> tuple[bytes, bytes]:
    """One round after the other on the whole vector, as the server of the paper would."""
    flat = np.concatenate([values.reshape(-1) for values in theta.values()])
    state: Any = RULES[scheme.method].init(flat.size)
    for record in records:
        flat, state = apply_round(flat, state, record, scheme, offset=0)
    return flat.tobytes(), b"".join(state[slot].tobytes() for slot in RULES[scheme.method].slots)


def bytes_of(replica: Replica) -> tuple[bytes, bytes]:
    theta = b"".join(np.asarray(values).tobytes() for values in replica.theta.values())
    slots = (values for tensors in replica.state.values() for values in tensors.values())
    return theta, b"".join(np.asarray(values).tobytes() for values in slots)


@pytest.mark.parametrize("method", list(RULES))
@pytest.mark.parametrize("number_format", list(NumberFormat))
def test_catching_up_in_any_portions_gives_the_state_of_the_journal(method: str, number_format: NumberFormat) -> None:
    scheme, records = Scheme(5, method), records_of(8, method)
    for cuts in ([0, 10], [0, 1, 2, 5, 9, 10], [0, 4, 10]):
        replica = Replica(scheme, base(number_format))
        for after, through in itertools.pairwise(cuts):
            part = tuple(r for r in records if after < r.round <= through)
            assert replica.advance(Slice(after, through, part)) == len(part)
            assert replica.round == through
        assert bytes_of(replica) == expected_state(scheme, base(number_format), records)


def test_overlap_is_skipped_and_a_gap_is_refused() -> None:
    scheme, records = Scheme(5), records_of(8)
    replica = Replica(scheme, base())
    replica.advance(Slice(0, 4, tuple(records[:2])))
    late = Slice(5, 10, tuple(r for r in records if r.round > 5))
    assert not replica.can_apply(late)
    with pytest.raises(ReplicaError, match=r"replica: .*slice from round 4 .*got one from round 5"):
        replica.advance(late)
    assert replica.advance(Slice(1, 10, tuple(records[1:]))) == 6
    assert replica.advance(Slice(0, 6, tuple(r for r in records if r.round <= 6))) == 0
    assert replica.advance(Slice(0, 10, tuple(records))) == 0
    assert replica.round == 10
    assert bytes_of(replica) == expected_state(scheme, base(), records)


def test_torch_parameters_are_updated_where_they_lie() -> None:
    torch = pytest.importorskip("torch", reason="parameters as torch tensors")
    scheme, records = Scheme(5), records_of(6)
    parameters = {name: torch.nn.Parameter(torch.from_numpy(values.copy())) for name, values in base().items()}
    replica = Replica(scheme, parameters)
    replica.advance(Slice(0, 8, tuple(records)))
    theta = b"".join(p.detach().numpy().tobytes() for p in parameters.values())
    H = b"".join(p.numpy().tobytes() for p in replica.state["H"].values())
    assert (theta, H) == expected_state(scheme, base(), records)
    arrays = Replica(scheme, base())
    arrays.advance(Slice(0, 8, tuple(records)))
    assert replica.fingerprint() == arrays.fingerprint()
    replica.rebuild(base)
    assert b"".join(p.detach().numpy().tobytes() for p in parameters.values()) == bytes_of(Replica(scheme, base()))[0]


def test_a_replica_that_went_astray_is_never_used_until_it_is_rebuilt() -> None:
    scheme, records = Scheme(5), records_of(6)
    good = Replica(scheme, base())
    good.advance(Slice(0, 5, tuple(r for r in records if r.round <= 5)))
    records = [dataclasses.replace(r, fingerprint=good.fingerprint() if r.round == 5 else None) for r in records]
    good.advance(Slice(5, 8, tuple(r for r in records if r.round > 5)))

    astray = Replica(scheme, base())
    astray.theta["w"][3, 3] += 1e-3
    whole = Slice(0, 8, tuple(records))
    with pytest.raises(AstrayError, match=r"replica at round 5: expected fingerprint .* rebuild it"):
        astray.advance(whole)
    for use in (astray.fingerprint, lambda: astray.advance(whole)):
        with pytest.raises(ReplicaError, match="expected a whole state"):
            use()
    astray.rebuild(base)
    astray.advance(whole)
    assert bytes_of(astray) == bytes_of(good)


def test_an_interrupted_update_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(3)
    replica = Replica(Scheme(5), base())
    real = module.apply_rounds

    def interrupted(tensor: Any, *args: Any, **options: Any) -> None:
        if tensor.shape == (7,):
            raise KeyboardInterrupt
        real(tensor, *args, **options)

    monkeypatch.setattr(module, "apply_rounds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replica.advance(Slice(0, 5, tuple(records)))
    monkeypatch.undo()
    with pytest.raises(ReplicaError, match="got an interrupted update"):
        replica.advance(Slice(0, 5, tuple(records)))
    replica.rebuild(base)
    replica.advance(Slice(0, 5, tuple(records)))
    assert bytes_of(replica) == expected_state(Scheme(5), base(), records)


def test_another_base_model_is_refused() -> None:
    replica = Replica(Scheme(5), base())
    with pytest.raises(ReplicaError, match="base model: expected the replica's tensors, got 'w'"):
        replica.rebuild(lambda: {**base(), "w": np.ones((7, 40), np.float32)})


def test_the_state_starts_from_the_rule() -> None:
    state = start_state(Scheme(5, "hiso-momentum"), base())
    assert {slot: float(tensors["w"].max()) for slot, tensors in state.items()} == {"H": 1.0, "m": 0.0}
    assert state["H"]["w"].shape == (40, 7)
    assert start_state(Scheme(5, "decomfl"), base()) == {}
