"""The words of Flower's own strategies: ``FedPM(fraction_train=0.5)`` in place of ``FedAvg(fraction_train=0.5)``.

They mean what they mean in ``flwr.serverapp.strategy.FedAvg`` of Flower 1.42. The fields of `RoundSettings` are words too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedapps.errors import SettingsError, did_you_mean
from fedapps.messages.schema import ARRAYS, CONFIG, METRICS, NUM_EXAMPLES, Announced
from fedapps.settings import RoundSettings

MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]
"""Contents of replies, and the key of their weights -> what the log and the result of ``start`` show."""

FLOWER_LEAST = 2
"""Flower's default of ``min_train_nodes`` and ``min_evaluate_nodes``."""


@dataclass(frozen=True, kw_only=True)
class FlowerWords:
    """Flower's words that are no field of `RoundSettings`.

    Attributes:
        trains: False for ``fraction_train = 0``, by which Flower skips training.
        fraction_evaluate: Share of the nodes that evaluate; 0 = none.
        min_train_nodes: Least number of nodes that a round asks; ``max(int(C N), min_train_nodes)`` are. Without it
            ``max(1, round(C N))`` are, as in this package's runs.
        min_evaluate_nodes: The same for evaluation.
        weighted_by_key: Metric whose value is a reply's weight.
        arrayrecord_key: Name of the model's record in messages, and in replies, where ``arrays`` is understood, too.
        configrecord_key: Name of the config's record in messages.
        train_metrics_aggr_fn: Summarises the folded replies; their weighted mean if left out.
        evaluate_metrics_aggr_fn: The same for evaluation.
        handshake: Whether nodes are asked, by a query that the ClientApp must have a handler for, who they are.
    """

    trains: bool = True
    fraction_evaluate: float = 1.0
    min_train_nodes: int | None = None
    min_evaluate_nodes: int | None = None
    weighted_by_key: str = NUM_EXAMPLES
    arrayrecord_key: str = ARRAYS
    configrecord_key: str = CONFIG
    train_metrics_aggr_fn: MetricsFunction | None = None
    evaluate_metrics_aggr_fn: MetricsFunction | None = None
    handshake: bool = False

    @property
    def least_nodes(self) -> int:
        """The nodes that the samples of training and evaluation need."""
        train = self.min_train_nodes or 0 if self.trains else 0
        return max(1, train, self.min_evaluate_nodes or 0 if self.fraction_evaluate else 0)

    def outward(self, content: RecordDict) -> RecordDict:
        """Name the records of a message as the project's clients know them."""
        names = {ARRAYS: self.arrayrecord_key, CONFIG: self.configrecord_key}
        return RecordDict({names.get(name, name): record for name, record in content.items()})

    def inward(self, content: RecordDict, announced: Announced) -> RecordDict:
        """Name the records of a reply as this package knows them.

        Flower takes the only record of its kind in a reply, whatever its name.

        Args:
            content: The content of a reply.
            announced: The records of arrays that it may hold.

        Returns:
            The same records.
        """
        renamed = {ARRAYS if name == self.arrayrecord_key else name: record for name, record in content.items()}
        for standard, kind in ((ARRAYS, ArrayRecord), (METRICS, MetricRecord)):
            held = [name for name, record in renamed.items() if isinstance(record, kind)]
            if len(held) == 1 and held[0] not in announced:
                renamed[standard] = renamed.pop(held[0])
        return RecordDict(renamed)


def own_words(strategy: type) -> set[str]:
    """Give the named arguments of a strategy's constructor, those of its bases included."""
    return {
        name
        for base in strategy.__mro__
        if "__init__" in vars(base)
        for name, argument in inspect.signature(vars(base)["__init__"]).parameters.items()
        if argument.kind in (argument.KEYWORD_ONLY, argument.POSITIONAL_OR_KEYWORD) and name != "self"
    }


def read_words(
    strategy: type, settings: RoundSettings | None, words: Mapping[str, Any]
) -> tuple[RoundSettings, FlowerWords]:
    """Sort the words of a constructor.

    Args:
        strategy: Whose constructor it is.
        settings: How rounds run, if given as a whole: then rounds sample as in this package's runs.
        words: Flower's words and fields of `RoundSettings`.

    Returns:
        How rounds run, and the other words.

    Raises:
        SettingsError: A word is unknown or out of range, or a field is given beside ``settings``.
    """
    flowers = {field.name for field in fields(FlowerWords)} - {"trains"}
    known, where = flowers | RoundSettings.model_fields.keys(), f"{strategy.__name__}(...)"
    for word in words.keys() - known:
        do = did_you_mean(word, known | own_words(strategy), "see the documentation of the strategy")
        raise SettingsError(where, expected="a known argument", got=f"'{word}'", do=do)
    rounds = {word: value for word, value in words.items() if word not in flowers}
    flower = {word: value for word, value in words.items() if word in flowers}
    if settings is not None and rounds:
        raise SettingsError(
            where,
            expected="either RoundSettings or their fields as arguments",
            got=f"both ({', '.join(sorted(rounds))})",
            do="give them all in RoundSettings(...), or all as arguments",
        )
    if settings is None:
        if rounds.get("fraction_train") == 0:
            flower["trains"], _ = False, rounds.pop("fraction_train")
        settings = RoundSettings(**rounds)
        flower = {"min_train_nodes": FLOWER_LEAST, "min_evaluate_nodes": FLOWER_LEAST, **flower}
    _check_range(where, flower)
    return settings, FlowerWords(**flower)


def _check_range(where: str, flower: Mapping[str, Any]) -> None:
    fraction = flower.get("fraction_evaluate", 1.0)
    if not 0 <= fraction <= 1:
        raise SettingsError(f"{where}, 'fraction_evaluate'", expected="a share from 0 to 1", got=repr(fraction))
    for word in ("min_train_nodes", "min_evaluate_nodes"):
        if (least := flower.get(word)) is not None and least < 0:
            raise SettingsError(f"{where}, '{word}'", expected="a number of nodes", got=repr(least))
