"""What clients say that they precondition: checked before anything is folded, decided by most, told to the reader."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedapps.curvature.layout import BlockSpec, Layout
from fedapps.messages import pack_arrays
from fedapps.messages.node_facts import NodeFacts
from fedapps.strategies import LocalNewton

from .scripted_grid import ScriptedGrid, seat, train

MODEL = {"fc.weight": np.zeros((2, 3), np.float32), "fc.bias": np.zeros(2, np.float32)}
BLOCK = BlockSpec("fc", ("fc.weight", "fc.bias"), 2, 4)
WHOLE = Layout((BLOCK,), {})
PLAIN = Layout((), {"fc.weight": "it is compiled", "fc.bias": "it is compiled"})


def reply(value: float, layout: Layout | str | None = None) -> RecordDict:
    content = RecordDict(
        {
            "arrays": pack_arrays({name: np.full_like(old, value) for name, old in MODEL.items()}),
            "metrics": MetricRecord({"num-examples": 7}),
        }
    )
    if layout is not None:
        content["layout"] = ConfigRecord({"layout": layout if isinstance(layout, str) else layout.to_json()})
    return content


def strategy_of(clients: int) -> LocalNewton:
    strategy = LocalNewton(min_train_nodes=1)
    seat(strategy, clients)
    strategy.roster.facts = {
        p: NodeFacts(p, clients, 7, "", "localnewton", "cpu", WHOLE.to_json()) for p in range(clients)
    }
    return strategy


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ("[" * 100_000, "what Layout.to_json writes"),
        (
            Layout((BlockSpec("fc", ("fc.weight",), 2, 3),), {}),
            "'fc' with fc.weight and fc.bias, 2 rows, width 4 as most",
        ),
        (Layout((BlockSpec("fc", ("fc.weight", "fc.bias"), 1, 10**9, cut=1),), {}), "shape"),
        (Layout((BLOCK, BlockSpec("again", ("fc.weight",), 2, 3)), {}), "every parameter in one block"),
        (Layout((), {"x" * 10**6: "why"}), "1 others, such as 'xxx"),
    ],
    ids=["deep", "another block", "huge", "twice", "a name of nothing"],
)
def test_a_layout_that_is_refused_leaves_the_mean_as_it_is(layout: Any, match: str) -> None:
    strategy = strategy_of(3)
    arrays, _ = train(strategy, ScriptedGrid(lambda p, m: reply(100.0, layout) if p == 0 else reply(p)), 1, MODEL)
    (refused,) = strategy.rounds.report.refused.items()
    assert refused[0] == 0
    assert match in refused[1]
    assert len(refused[1]) < 1000
    assert strategy.rounds.report.folded == [1, 2]
    assert arrays is not None
    np.testing.assert_array_equal(arrays["fc.bias"], [1.5, 1.5])


def test_the_first_reply_does_not_say_for_all_what_was_preconditioned() -> None:
    strategy = strategy_of(3)
    train(strategy, ScriptedGrid(lambda p, m: reply(p, PLAIN) if p == 0 else reply(p)), 1, MODEL)
    assert strategy.curvature_layout() == WHOLE
    assert strategy.rounds.report.notes == [
        "client 0: plain gradient steps with fc.weight, fc.bias (it is compiled)",
    ]


def test_a_round_without_any_block_says_so() -> None:
    strategy = strategy_of(2)
    for number in (1, 2):
        train(strategy, ScriptedGrid(lambda p, m: reply(p, PLAIN)), number, MODEL)
        assert strategy.curvature_layout() == PLAIN
        assert sum("NOTHING IS PRECONDITIONED" in note for note in strategy.rounds.report.notes) == 1


def test_a_reason_is_cut() -> None:
    text = json.dumps({"blocks": [], "averaged": {"fc.weight": "why " * 10**5, "fc.bias": "why"}})
    strategy = strategy_of(1)
    train(strategy, ScriptedGrid(lambda p, m: reply(p, text)), 1, MODEL)
    assert sum(map(len, strategy.rounds.report.notes)) < 2000
