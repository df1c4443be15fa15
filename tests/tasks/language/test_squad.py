"""Question answering: what is trained on, what is generated, how it is scored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedapps.errors import TaskError
from fedapps.tasks import PartitionConfig, PartitionKind, TaskConfig, load_task
from fedapps.tasks.language import squad as squad_module
from fedapps.tasks.language.encoding import PADDING, lengths
from fedapps.tasks.language.squad import exact_match, f1, normalise

from .conftest import ROWS


@pytest.fixture
def make(folder_of: Callable[[str], Path]) -> Callable[..., Any]:
    def make(kind: str = "iid", **options: Any) -> Any:
        given = {"model": str(folder_of("opt")), **{key.replace("_", "-"): value for key, value in options.items()}}
        config = TaskConfig(data_dir=ROWS, options=given, partition=PartitionConfig(PartitionKind(kind)))
        return load_task("squad", config)

    return make


@pytest.fixture
def task(make: Callable[..., Any]) -> Any:
    return make(max_length=128)


def unpadded(row: Any) -> list[int]:
    return [int(i) for i in row if i != PADDING]


def test_a_row_is_the_prompt_and_the_first_answer_up_to_the_line_break(task: Any) -> None:
    _, test = task.load()
    text = task.tokenizer.decode(unpadded(test.inputs[0]))
    assert text.endswith("\nQuestion: Where is the mill?\nAnswer: at the end of Long Lane\n")
    answer = unpadded(test.targets[0])
    assert task.tokenizer.decode(answer) == " at the end of Long Lane\n"
    assert unpadded(test.inputs[0])[-len(answer) :] == answer
    assert list(test.columns["answers"]) == ["at the end of Long Lane\nLong Lane", "corn"]


def test_a_short_prompt_leaves_the_answer_whole(make: Callable[..., Any]) -> None:
    whole, short = make(max_length=128).load()[0], make(max_length=40).load()[0]
    np.testing.assert_array_equal(whole.targets, short.targets)
    assert (lengths(short.inputs) <= 40 + lengths(short.targets)).all()
    assert (lengths(short.inputs) < lengths(whole.inputs)).all()


def test_an_answer_is_cut_at_its_most_tokens(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squad_module.SquadTask, "ANSWER_LENGTH", 5)
    train, _ = make().load()
    assert lengths(train.targets).max() == 5


def test_the_loss_is_that_of_the_answers(task: Any) -> None:
    """Against the model's own logits of each row alone, in float64."""
    train, _ = task.load()
    model = task.module(task.initial_arrays(0)).eval()
    expected = []
    with torch.no_grad():
        for row, target in zip(train.inputs, train.targets, strict=True):
            ids, count = torch.tensor(unpadded(row)), len(unpadded(target))
            logits = model(ids[None]).logits[0, :-1].double().log_softmax(1)
            expected.append(-logits[torch.arange(len(ids) - 1), ids[1:]][-count:].mean())
        loss = task.loss(model, *task.tensors(train))
    torch.testing.assert_close(loss.double(), torch.stack(expected).mean(), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_model_that_has_learnt_the_answers_scores_one(task: Any) -> None:
    """Full training by gradient descent on the test rows, then generation without the answers."""
    _, test = task.load()
    model = task.module(task.initial_arrays(0))
    before = task.evaluate_module(model, test)
    assert model.training
    model.eval()  # without dropout, to be quick
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        loss = task.loss(model, *task.tensors(test))
        loss.backward()
        optimizer.step()
        if float(loss.detach()) < 0.02:
            break
    after = task.evaluate_module(model, test)
    assert before.keys() == after.keys() == {"loss", "f1", "exact-match"}
    assert before["exact-match"] == 0
    assert after["f1"] == after["exact-match"] == 1
    assert after["loss"] < before["loss"]
    assert task.generate(model.train(), test) == ["at the end of Long Lane", "corn"]
    assert model.training


def test_scores_are_means_and_the_best_right_answer_counts(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, test = task.load()
    monkeypatch.setattr(type(task), "generate", lambda *_: ["Long Lane", "corn and wheat"])
    measured = task.evaluate(task.initial_arrays(0), test)
    assert measured["f1"] == pytest.approx((1 + 1 / 2) / 2)  # "corn" of three words: precision 1/3, recall 1
    assert measured["exact-match"] == 0.5
    assert task.metric == "f1"
    assert task.evaluate(task.initial_arrays(0), test.take(np.array([], int))) == {}


def test_answers_keep_the_order_of_the_examples(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation takes long rows first."""
    train, _ = task.load()

    def answer_with_length(model: Any, ids: torch.Tensor, stops: Any, most: int) -> torch.Tensor:
        return torch.tensor(task.tokenizer([f"{int(n):04}" for n in (ids != PADDING).sum(1)])["input_ids"])

    monkeypatch.setattr(squad_module, "continuations", answer_with_length)
    prompts = lengths(train.inputs) - lengths(train.targets)
    assert len(set(prompts)) > 1
    assert task.generate(task.build_model(), train) == [f"{n:04}" for n in prompts]


def test_an_answer_ends_with_the_line_or_the_text(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    end, [line] = task.tokenizer.eos_token_id, task.tokenizer.encode("\n", add_special_tokens=False)
    one, other = (task.tokenizer.encode(text, add_special_tokens=False) for text in (" the road", " the film"))
    told = [[*one, end, *other], [*one, line, *other], [*one, end, line, *other], [end, *other], one]
    most = max(map(len, told))
    asked: list[set[int]] = []

    def continued(model: Any, ids: torch.Tensor, stops: Any, most_tokens: int) -> torch.Tensor:
        asked.append(set(stops))
        return torch.tensor([(row + [line] * most)[:most] for row in told])

    monkeypatch.setattr(squad_module, "continuations", continued)
    data = task.load()[0].take(np.zeros(len(told), int))
    assert task.generate(task.build_model(), data) == ["the road", "the road", "the road", "", "the road"]
    assert asked == [{line, end}]
    del task._stops
    task.tokenizer.eos_token = None
    told = [[*one, line, *other]]
    assert task.generate(task.build_model(), data.take(np.array([0]))) == ["the road"]
    assert asked[1:] == [{line}]


def test_free_text_has_no_classes_to_split_by(make: Callable[..., Any]) -> None:
    assert sum(len(make().client_data(i, 2).train) for i in range(2)) == 4
    with pytest.raises(TaskError, match="choose the iid or the column partition"):
        make("dirichlet").client_data(0, 2)


def test_the_answer_needs_positions_too(make: Callable[..., Any]) -> None:
    with pytest.raises(TaskError, match=r"'max-length': .* 256 positions .* 48 "):
        make(max_length=256).initial_arrays(0)


def test_case_punctuation_articles_and_blanks_do_not_count() -> None:
    assert normalise(" The  Old-Mill, an anthem! ") == "oldmill anthem"


@pytest.mark.parametrize(
    ("predicted", "answers", "score", "exact"),
    [
        ("the Mill.", ["Mill"], 1, 1),
        ("old mill", ["mill"], 2 / 3, 0),  # precision 1/2, recall 1
        ("mill mill", ["mill"], 2 / 3, 0),  # a word counts as often as it occurs
        ("river", ["mill"], 0, 0),
        ("", ["mill"], 0, 0),
        ("the", ["a"], 0, 1),  # both empty: no word in common, as the evaluation of v1.1 has it
        ("end of Long Lane", ["at the end of Long Lane", "Long Lane"], 8 / 9, 0),  # precision 1, recall 4/5
        ("Long Lane", ["at the end of Long Lane", "Long Lane"], 1, 1),
    ],
)
def test_scores(predicted: str, answers: list[str], score: float, exact: float) -> None:
    assert f1(predicted, answers) == pytest.approx(score)
    assert exact_match(predicted, answers) == exact
