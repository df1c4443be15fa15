"""FedPM's server: the paper's map, reductions to methods that we trust, and malformed replies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

import fedapps
from fedapps.curvature.blocks import WireDtype, factor_block, triangle_block
from fedapps.curvature.layout import BlockSpec, Layout, to_matrix
from fedapps.curvature.packing import pack_upper, unpack_upper
from fedapps.errors import RoundFailedError
from fedapps.messages.node_facts import NodeFacts
from fedapps.messages.schema import pack_arrays, payload_bytes, unpack_arrays
from fedapps.settings import RoundSettings
from fedapps.strategies import FedAvg, FedPM, LocalNewton
from fedapps.strategies.base import RoundStrategy

SPEC = BlockSpec("fc", ("fc.weight", "fc.bias"), 3, 5)
LAYOUT = Layout((SPEC,), {"scale": "a free parameter"})
RANDOM = np.random.default_rng(0)
MODEL = {
    "fc.weight": RANDOM.normal(size=(3, 4)).astype(np.float32),
    "fc.bias": RANDOM.normal(size=3).astype(np.float32),
    "scale": RANDOM.normal(size=2).astype(np.float32),
    "counter": np.array(0),
}


def matrix(model: dict[str, np.ndarray]) -> np.ndarray:
    """``W``, (3, 5) in float64: weight, and bias as last column."""
    return np.concatenate([model["fc.weight"], model["fc.bias"][:, None]], axis=1).astype(np.float64)


def trained(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    moved = {n: (v + random.normal(size=v.shape)).astype(v.dtype) for n, v in MODEL.items() if n != "counter"}
    return {**moved, "counter": np.array(seed + 3)}


def curvature(seed: int, width: int = 5) -> np.ndarray:
    factor = np.random.default_rng(100 + seed).normal(size=(width, width))
    return factor @ factor.T / width + 0.1 * np.eye(width)


def reply_of(model: dict[str, np.ndarray], P: np.ndarray, num_examples: int = 1) -> RecordDict:
    product = (matrix(model) - matrix(MODEL)) @ P
    return RecordDict(
        {
            "arrays": pack_arrays({"scale": model["scale"]}),
            "buffers": pack_arrays({"counter": model["counter"]}),
            "products": pack_arrays({"fc": product.astype(np.float32)}),
            "curvature": pack_arrays({"fc": pack_upper(P).astype(np.float32)}),
            "layout": ConfigRecord({"layout": LAYOUT.to_json()}),
            "metrics": MetricRecord({"num-examples": num_examples}),
        }
    )


def mix(
    strategy: RoundStrategy, replies: dict[int, RecordDict], order: list[int] | None = None
) -> dict[str, np.ndarray]:
    strategy.rounds.begin(1, MODEL, list(replies))
    for partition in order or list(replies):
        strategy.receive(partition, replies[partition], MODEL)
    new = strategy.rounds.end()
    assert new is not None
    return new


SIZES = [10, 30, 60]


def test_the_result_is_the_papers_preconditioned_mixing() -> None:
    """Equation 8 as it stands, ``W' = [sum p_i W_i P_i] [sum p_i P_i]^-1`` (for rows), in float64."""
    models, Ps, weights = [trained(i) for i in range(3)], [curvature(i) for i in range(3)], np.array(SIZES) / 100
    new = mix(FedPM(), {i: reply_of(models[i], Ps[i], SIZES[i]) for i in range(3)})
    expected = sum(p * matrix(m) @ P for p, m, P in zip(weights, models, Ps, strict=True)) @ np.linalg.inv(
        sum(p * P for p, P in zip(weights, Ps, strict=True))
    )
    np.testing.assert_allclose(matrix(new), expected, rtol=1e-5, atol=1e-5)
    scale = sum(p * m["scale"].astype(np.float64) for p, m in zip(weights, models, strict=True))
    np.testing.assert_allclose(new["scale"], scale, rtol=1e-6)
    assert (new["counter"].dtype, new["counter"].shape, int(new["counter"])) == (np.int64, (), 5)
    assert list(new) == list(MODEL)
    assert {n: v.dtype for n, v in new.items()} == {n: v.dtype for n, v in MODEL.items()}


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_equal_curvature_gives_the_mean_of_fedavg_and_localnewton(weighting: str) -> None:
    settings = RoundSettings(weighting=weighting)
    models, P = [trained(i) for i in range(3)], curvature(7)
    new = mix(FedPM(settings), {i: reply_of(models[i], P, SIZES[i]) for i in range(3)})
    plain = {
        i: RecordDict(
            {
                "arrays": pack_arrays({n: v for n, v in models[i].items() if n != "counter"}),
                "buffers": pack_arrays({"counter": models[i]["counter"]}),
                "metrics": MetricRecord({"num-examples": SIZES[i]}),
            }
        )
        for i in range(3)
    }
    for strategy in (FedAvg(settings), LocalNewton(settings)):
        mean = mix(strategy, plain)
        assert list(mean) == list(MODEL)
        for name, value in mean.items():
            assert value.dtype == MODEL[name].dtype
            np.testing.assert_allclose(new[name], value, rtol=2e-5, atol=2e-5)


def test_the_first_folded_reply_says_once_what_is_preconditioned_and_why_the_rest_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "flwr")
    strategy = FedPM()
    replies = {i: reply_of(trained(i), curvature(i)) for i in range(3)}
    replies[0]["products"] = pack_arrays({"fc": np.zeros((3, 4), np.float32)})  # refused
    for _ in range(2):
        mix(strategy, replies)
    assert strategy.curvature_layout() == LAYOUT
    assert [message for message in caplog.messages if message.startswith(("precond", "averaged", "maximum"))] == [
        "preconditioned, block 5 x 5: fc.weight, fc.bias",
        "averaged (a free parameter): scale",
        "maximum (integer buffer): counter",
    ]


def test_one_client_gives_its_own_model() -> None:
    model = trained(4)
    new = mix(FedPM(), {0: reply_of(model, curvature(4))})
    np.testing.assert_allclose(matrix(new), matrix(model), rtol=1e-5, atol=1e-5)


def test_equal_models_are_left_as_they_are_whatever_the_curvature() -> None:
    new = mix(FedPM(), {i: reply_of(MODEL, curvature(i)) for i in range(3)})
    np.testing.assert_array_equal(matrix(new), matrix(MODEL))


def test_the_order_of_arrival_changes_no_bit() -> None:
    replies = {i: reply_of(trained(i), curvature(i), SIZES[i]) for i in range(3)}
    first = mix(FedPM(), replies)
    for order in ([2, 1, 0], [1, 2, 0], [2, 0, 1]):
        again = mix(FedPM(), replies, order)
        assert all(again[n].tobytes() == v.tobytes() for n, v in first.items())


def test_a_client_split_in_two_is_one_client() -> None:
    whole = {i: reply_of(trained(i), curvature(i), SIZES[i]) for i in range(3)}
    halves = {**{k: whole[k] for k in (0, 1)}, 2: reply_of(trained(2), curvature(2), 25),
              3: reply_of(trained(2), curvature(2), 35)}  # fmt: skip
    first, second = mix(FedPM(), whole), mix(FedPM(), halves)
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=1e-6, atol=1e-7)


def test_the_payload_is_model_and_triangle() -> None:
    """What travels is counted: Linear(4, 3) with bias in float32: 60 bytes of ``M`` and 60 of the packed 5 x 5 block."""
    content = reply_of(trained(0), curvature(0))
    sizes = payload_bytes(content)
    assert (sizes["products"], sizes["curvature"]) == (60, 60)


# Clients that differ, and other forms of P -------------------------------------------------------------


def plain_reply(model: dict[str, np.ndarray], num_examples: int) -> RecordDict:
    """The reply of a client that has no block at all: its layer type is not registered, say."""
    return RecordDict(
        {
            "arrays": pack_arrays({n: v for n, v in model.items() if n != "counter"}),
            "buffers": pack_arrays({"counter": model["counter"]}),
            "products": pack_arrays({}),
            "curvature": pack_arrays({}),
            "layout": ConfigRecord({"layout": Layout((), dict.fromkeys(SPEC.parameters, "unknown layer")).to_json()}),
            "metrics": MetricRecord({"num-examples": num_examples}),
        }
    )


def identity_reply(model: dict[str, np.ndarray], scale: float, num_examples: int) -> RecordDict:
    """The reply of a client whose layer had no input."""
    content = reply_of(model, scale * np.eye(5), num_examples)
    content["curvature"] = pack_arrays({"fc": np.array([scale], np.float32)})
    return content


def mixed(models: list[dict[str, np.ndarray]], Ps: list[np.ndarray], sizes: list[int]) -> np.ndarray:
    """Equation 8 in float64."""
    right = sum(n * matrix(m) @ P for n, m, P in zip(sizes, models, Ps, strict=True))
    return np.asarray(right @ np.linalg.inv(sum(n * P for n, P in zip(sizes, Ps, strict=True))))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]], ids=str)
def test_a_client_without_a_block_takes_part_with_the_identity(order: list[int]) -> None:
    """It took plain gradient steps, which divide by ``I``. None is refused, whoever comes first, and the report names it."""
    models = [trained(i) for i in range(3)]
    for without in (0, 2):
        Ps = [np.eye(5) if i == without else curvature(i) for i in range(3)]
        replies = {
            i: plain_reply(m, SIZES[i]) if i == without else reply_of(m, Ps[i], SIZES[i]) for i, m in enumerate(models)
        }
        strategy = FedPM()
        new = mix(strategy, replies, order)
        np.testing.assert_allclose(matrix(new), mixed(models, Ps, SIZES), rtol=1e-5, atol=1e-5)
        scale = sum(n * m["scale"].astype(np.float64) for n, m in zip(SIZES, models, strict=True)) / 100
        np.testing.assert_allclose(new["scale"], scale, rtol=1e-6)
        assert strategy.rounds.report.folded == [0, 1, 2]
        assert strategy.rounds.report.notes == [f"layer 'fc': no block from client {without}, mixed with P = I"]
        assert list(new) == list(MODEL)


def test_clients_without_any_block_are_averaged() -> None:
    models = [trained(i) for i in range(2)]
    new = mix(FedPM(), {i: plain_reply(m, SIZES[i]) for i, m in enumerate(models)})
    np.testing.assert_allclose(matrix(new), (10 * matrix(models[0]) + 30 * matrix(models[1])) / 40, rtol=1e-6)


def test_a_layer_without_input_on_a_client_takes_part_with_its_damping() -> None:
    """``A = 0``: the pooled curvature is that of the others, and every client's damping."""
    models = [trained(i) for i in range(3)]
    Ps = [curvature(0), 0.25 * np.eye(5), 0.25 * np.eye(5)]
    replies = {
        i: identity_reply(m, 0.25, SIZES[i]) if i else reply_of(m, Ps[0], SIZES[0]) for i, m in enumerate(models)
    }
    strategy = FedPM()
    np.testing.assert_allclose(matrix(mix(strategy, replies)), mixed(models, Ps, SIZES), rtol=1e-5, atol=1e-5)
    assert strategy.rounds.report.folded == [0, 1, 2]
    assert re.search("layer 'fc': no input on clients 1, 2", strategy.rounds.report.notes[0])


@pytest.mark.parametrize("damping", [0.25, 0.0])
def test_a_layer_without_input_on_every_client_is_averaged_or_left_alone(damping: float) -> None:
    """With damping the mean; without it the layer cannot have moved, and stays bitwise."""
    models = [trained(i) for i in range(2)] if damping else [MODEL, MODEL]
    new = mix(FedPM(), {i: identity_reply(m, damping, SIZES[i]) for i, m in enumerate(models)})
    expected = (10 * matrix(models[0]) + 30 * matrix(models[1])) / 40 if damping else matrix(MODEL)
    np.testing.assert_allclose(matrix(new), expected, rtol=0 if damping == 0 else 1e-5)


def test_each_group_and_each_piece_of_a_cut_layer_is_mixed_by_itself() -> None:
    spec = BlockSpec("conv", ("conv.weight", "conv.bias"), rows=4, width=5, groups=2, cut=3)
    random = np.random.default_rng(0)
    model = {"conv.weight": random.normal(size=(4, 2, 2, 1)), "conv.bias": random.normal(size=4)}
    replies, ends, tiles = {}, [], []
    for i in range(2):
        end = {n: v + random.normal(size=v.shape) for n, v in model.items()}
        Ps = [np.diag(random.uniform(1, 2, tile.width)) + 0.3 for tile in spec.tiles]
        delta = to_matrix(end, spec) - to_matrix(model, spec)
        block = triangle_block(spec, Ps, delta, WireDtype.FLOAT32)
        replies[i] = RecordDict(
            {
                "arrays": pack_arrays({}),
                "products": pack_arrays({"conv": block.product}),
                "curvature": pack_arrays({"conv": block.curvature}),
                "layout": ConfigRecord({"layout": Layout((spec,)).to_json()}),
                "metrics": MetricRecord({"num-examples": SIZES[i]}),
            }
        )
        ends.append(to_matrix(end, spec))
        tiles.append(Ps)
    strategy = FedPM()
    strategy.rounds.begin(1, model, [0, 1])
    for i, content in replies.items():
        strategy.receive(i, content, model)
    new = strategy.rounds.end()
    assert new is not None
    for number, (rows, columns) in enumerate(spec.tiles):
        P, Q = tiles[0][number], tiles[1][number]
        expected = (10 * ends[0][rows, columns] @ P + 30 * ends[1][rows, columns] @ Q) @ np.linalg.inv(10 * P + 30 * Q)
        np.testing.assert_allclose(to_matrix(new, spec)[rows, columns], expected, rtol=1e-9)


def coded_reply(seed: int, dtype: WireDtype, *, factor: bool) -> tuple[RecordDict, np.ndarray]:
    """A reply whose ``P`` travels in another form, and ``P`` as it comes out."""
    model = trained(seed)
    U = np.triu(np.random.default_rng(seed).normal(size=(2, 5))).astype(np.float32)
    delta = matrix(model) - matrix(MODEL)
    block = (
        factor_block(SPEC, [U], [0.5], delta, dtype)
        if factor
        else triangle_block(SPEC, [U.T @ U + np.float32(0.5) * np.eye(5, dtype=np.float32)], delta, dtype)
    )
    content = reply_of(model, np.eye(5), SIZES[seed])
    content["products"], content["curvature"] = pack_arrays({"fc": block.product}), pack_arrays({"fc": block.curvature})
    tags = {"wire": "bfloat16"} if dtype is WireDtype.BFLOAT16 else {}
    tags |= {"factors": '{"fc": 2}'} if factor else {}
    content["layout"] = ConfigRecord({"layout": LAYOUT.to_json(), **tags})
    return content, unpack_upper(next(block.tiles())[1])


@pytest.mark.parametrize("factor", [False, True], ids=["triangle", "factor"])
@pytest.mark.parametrize("dtype", list(WireDtype))
def test_other_forms_are_mixed_as_what_they_stand_for(dtype: WireDtype, factor: bool) -> None:
    """Also among clients that send the plain form."""
    coded = [coded_reply(i, dtype, factor=factor) for i in range(2)]
    plain = curvature(2)
    new = mix(FedPM(), {0: coded[0][0], 1: coded[1][0], 2: reply_of(trained(2), plain, SIZES[2])})
    expected = mixed([trained(i) for i in range(3)], [coded[0][1], coded[1][1], plain], SIZES)
    np.testing.assert_allclose(matrix(new), expected, rtol=1e-5, atol=1e-5)


def _tag(**tags: str) -> Callable[[RecordDict], None]:
    return lambda c: c.__setitem__("layout", ConfigRecord({"layout": LAYOUT.to_json(), **tags}))


def _replace(record: str, name: str, value: np.ndarray) -> Callable[[RecordDict], None]:
    return lambda c: c.__setitem__(record, pack_arrays({**unpack_arrays(c, record, ""), name: value}))


def _relayout(layout: Layout) -> Callable[[RecordDict], None]:
    return lambda c: c.__setitem__("layout", ConfigRecord({"layout": layout.to_json()}))


NO_BIAS = Layout((BlockSpec("fc", ("fc.weight",), 3, 4),))
MALFORMED: dict[str, tuple[Callable[[RecordDict], None], str]] = {
    "no layout": (lambda c: c.pop("layout"), "expected a record 'layout' that says which parameters its blocks cover"),
    "layout is no JSON": (lambda c: c.__setitem__("layout", ConfigRecord({"layout": "?"})), "client 1, layout"),
    "no curvature": (lambda c: c.pop("curvature"), "expected a record 'curvature'"),
    "no products": (lambda c: c.pop("products"), "expected a record 'products'"),
    "an unknown layer": (_replace("products", "fc9", np.zeros((3, 5), dtype=np.float32)), "the layers ['fc'] of its layout"),
    "P of a layer without bias": (
        _replace("curvature", "fc", pack_upper(np.eye(4)).astype(np.float32)),
        "layer 'fc', client 1: expected P of shape (5, 5), got (4, 4); fold the bias on both ends or on neither",
    ),
    "M of another shape": (_replace("products", "fc", np.zeros((5, 3), dtype=np.float32)), "expected M of shape (3, 5)"),
    "NaN in P": (_replace("curvature", "fc", np.full(15, np.nan, dtype=np.float32)), "expected finite numbers in P"),
    "infinity in M": (_replace("products", "fc", np.full((3, 5), np.inf, dtype=np.float32)), "finite numbers in M"),
    "a block that the model lacks": (
        _relayout(Layout((replace(SPEC, parameters=("fc.weight", "fc.biass")),))),
        "client 1",
    ),
    "another layout than the others": (_relayout(NO_BIAS), "as from the other clients"),
    "a cut that the others do not make": (
        _relayout(Layout((replace(SPEC, cut=3),), LAYOUT.averaged)),
        "expected 'fc' with fc.weight and fc.bias, 3 rows, width 5 as from the other clients, got 'fc' with",
    ),
    "the same parameters under another name": (
        _relayout(Layout((replace(SPEC, layer="fc2"),), LAYOUT.averaged)),
        "layer 'fc2', client 1, layout: expected 'fc' with",
    ),
    "a parameter in two blocks": (
        _relayout(Layout((SPEC, replace(SPEC, layer="fc2")), LAYOUT.averaged)),
        "expected every parameter in one block",
    ),
    "bfloat16 that is none": (_tag(wire="bfloat16"), "expected P in bfloat16 patterns (uint16)"),
    "bfloat16 without a word": (
        _replace("curvature", "fc", np.zeros(15, np.uint16)),
        "layer 'fc', client 1: expected P in float32 or float64, M in floats, got uint16",
    ),
    "factors that are no JSON": (_tag(factors="?"), "entry 'factors' of record 'layout'"),
    "factors of an unknown layer": (_tag(factors='{"fc9": 2}'), "an unknown layer"),
    "factors of no rows": (_tag(factors='{"fc": 0}'), "a number of rows that is not positive"),
    "a list of factors": (_tag(factors="[2]"), "entry 'factors'"),
    "factors of more rows than the width": (_tag(factors='{"fc": 6}'), "expected a factor of at most 5 rows, got 6"),
    "a triangle that is said to be a factor": (_tag(factors='{"fc": 2}'), "as factors of 2 rows: 10 numbers"),
    "a parameter twice": (
        lambda c: c.__setitem__("arrays", pack_arrays({"scale": MODEL["scale"], "fc.bias": MODEL["fc.bias"]})),
        "'fc.bias': expected it once, got it both as a tensor and in a curvature block",
    ),
    "a tensor missing": (lambda c: c.__setitem__("arrays", pack_arrays({})), "a reply without scale"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "match"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_reply_is_refused_and_leaves_the_sums_alone(
    change: Callable[[RecordDict], None], match: str
) -> None:
    good = {i: reply_of(trained(i), curvature(i), SIZES[i]) for i in (0, 2)}
    bad = reply_of(trained(1), curvature(1), SIZES[1])
    change(bad)
    strategy = FedPM()
    new = mix(strategy, {**good, 1: bad})
    assert re.search(re.escape(match), strategy.rounds.report.refused[1]), strategy.rounds.report.refused[1]
    assert strategy.rounds.report.folded == [0, 2]
    without = mix(FedPM(), good)
    assert all(new[n].tobytes() == v.tobytes() for n, v in without.items())


def test_a_block_that_is_zero_on_every_client_costs_the_round_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """With damping the block would be the plain mean; without it there is nothing to divide by, and no reply is at fault."""
    strategy = FedPM()
    strategy.rounds.begin(1, MODEL, [0])
    strategy.receive(0, reply_of(MODEL, np.zeros((5, 5))), MODEL)
    assert strategy.rounds.end() is None
    assert strategy.rounds.report.refused == {}
    assert "round 1: layer 'fc', server: expected a positive definite curvature block" in caplog.text
    assert "set a damping > 0" in caplog.text
    mix(strategy, {0: reply_of(trained(0), curvature(0))})


def test_no_reply_leaves_the_model() -> None:
    strategy = FedPM(RoundSettings(max_consecutive_failed_rounds=2))
    strategy.rounds.begin(1, MODEL, [0])
    assert strategy.rounds.end() is None
    strategy.rounds.begin(2, MODEL, [0])
    with pytest.raises(RoundFailedError, match="failure 2 in a row"):
        strategy.rounds.end()


def told(strategy: FedPM, layouts: list[Layout]) -> FedPM:
    """The nodes say in the handshake what they precondition."""
    strategy.roster.facts = {
        i: NodeFacts(i, len(layouts), 1, fedapps.__version__, "fedpm", "cpu", layout.to_json())
        for i, layout in enumerate(layouts)
    }
    return strategy


def test_the_handshake_is_the_norm_and_not_the_first_reply() -> None:
    """Client 0, the first in order, cuts its layer; the nine others, which do not, are honest and count."""
    cut = Layout((replace(SPEC, cut=3),))
    strange = reply_of(trained(0), curvature(0))
    strange["layout"]["layout"] = cut.to_json()
    tiles = [curvature(0)[a, a] for a in replace(SPEC, cut=3).columns]
    strange["curvature"] = pack_arrays({"fc": np.concatenate([pack_upper(P) for P in tiles]).astype(np.float32)})
    good = {i: reply_of(trained(i), curvature(i)) for i in range(1, 10)}
    strategy = told(FedPM(), [cut] + [LAYOUT] * 9)
    new = mix(strategy, {0: strange, **good})
    assert strategy.rounds.report.folded == list(range(1, 10))
    assert "width 5 as most nodes have it, got 'fc'" in strategy.rounds.report.refused[0]
    without = mix(FedPM(), good)
    assert all(new[n].tobytes() == v.tobytes() for n, v in without.items())


@pytest.mark.parametrize("asked", [True, False], ids=["after a handshake", "without one"])
def test_a_layout_of_a_billion_tiles_is_refused_before_they_are_made(asked: bool) -> None:
    bomb = reply_of(trained(0), curvature(0))
    bomb["layout"]["layout"] = Layout((replace(SPEC, rows=1, width=10**9, cut=1),)).to_json()
    good = {i: reply_of(trained(i), curvature(i)) for i in (1, 2)}
    strategy = told(FedPM(), [LAYOUT] * 3) if asked else FedPM()
    mix(strategy, {0: bomb, **good})
    assert strategy.rounds.report.folded == [1, 2]
    assert "(1, 1000000000)" in strategy.rounds.report.refused[0]


def test_deeply_nested_text_in_place_of_a_layout_is_refused() -> None:
    deep = reply_of(trained(0), curvature(0))
    deep["layout"]["layout"] = "[" * 100_000
    strategy = FedPM()
    mix(strategy, {0: deep, 1: reply_of(trained(1), curvature(1))})
    assert "layout" in strategy.rounds.report.refused[0]
    assert len(strategy.rounds.report.refused[0]) < 1000
