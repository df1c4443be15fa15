"""What the clients of a second-order method precondition, as their layouts say it: checked, counted, and told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fedapps.curvature.layout import BlockSpec, Layout, check_fits, layout_from_json
from fedapps.errors import MessageError
from fedapps.messages.schema import Arrays
from fedapps.strategies.roster import Roster
from fedapps.strategies.rounds import Rounds


class Layouts:
    """The layouts of a run's clients.

    Args:
        roster: The nodes; what most of them said in the handshake is the norm.
        rounds: The rounds, for remarks.

    Attributes:
        common: What most clients of the first finished round had; None before.
    """

    def __init__(self, roster: Roster, rounds: Rounds) -> None:
        self._roster, self._rounds = roster, rounds
        self.common: Layout | None = None
        self._told: set[str] = set()
        self._model: Arrays = {}
        self._expected: Mapping[str, BlockSpec] | None = None
        self._folded: Counter[str] = Counter()

    def begin(self, model: Arrays) -> None:
        """Start a round with a model."""
        told = self._roster.layout()
        self._model, self._folded = model, Counter()
        self._expected = None if told is None else {spec.layer: spec for spec in told.blocks}

    def check(self, layout: Layout, where: str) -> None:
        """Check a client's layout against the model and against the handshake; it may lack blocks that others have.

        Args:
            layout: The layout.
            where: Whose, for errors.

        Raises:
            MessageError: It does not fit the model, or a block is not that of most nodes.
        """
        if len(set(layout.preconditioned)) < len(layout.preconditioned):
            raise MessageError(
                f"{where}, layout",
                expected="every parameter in one block",
                got=", ".join(layout.preconditioned),
                do="leave tied parameters out of all blocks",
            )
        if unknown := layout.averaged.keys() - self._model.keys():
            raise MessageError(
                f"{where}, layout",
                expected="parameters of the model that was sent out",
                got=f"{len(unknown)} others, such as '{min(unknown)[:80]}'",
                do="build the same model on both ends",
            )
        for spec in layout.blocks:
            check_fits(self._model, spec, where)
            if self._expected is not None and self._expected.get(spec.layer) != spec:
                norm = self._expected.get(spec.layer)
                expected = "no block" if norm is None else f"{describe(norm)} as most nodes have it"
                raise another_block(spec, where, expected)

    def fold(self, layout: Layout, where: str) -> None:
        """Count the layout of a reply that was folded, and note, once, what it lacks although the handshake said so."""
        self._folded[layout.to_json()] += 1
        told = self._roster.layout()
        lost = {n: layout.averaged[n] for n in ([] if told is None else told.preconditioned) if n in layout.averaged}
        for reason in dict.fromkeys(lost.values()):
            names = ", ".join(name for name in lost if lost[name] == reason)
            if names not in self._told:
                self._told.add(names)
                self._rounds.note(f"{where}: plain gradient steps with {names} ({reason})")

    def finish(self) -> None:
        """Keep what most clients have, and note, every round that it is so, that none preconditioned anything."""
        if not self._folded:
            return
        folded = [(layout_from_json(text, "server"), count) for text, count in self._folded.items()]
        most = max(folded, key=lambda entry: entry[1])[0]
        self.common = self.common or most
        if not any(layout.blocks for layout, _ in folded):
            reasons = "; ".join(dict.fromkeys(most.averaged.values()))
            self._rounds.note(
                "NOTHING IS PRECONDITIONED: all steps are plain gradient steps, so that this is FedAvg under another name"
                f" ({reasons})"
            )


def describe(spec: BlockSpec) -> str:
    """Describe a block for people."""
    cut = f" cut at {spec.cut}" if spec.cut else ""
    groups = f", {spec.groups} groups" if spec.groups > 1 else ""
    parameters = " and ".join(spec.parameters)
    return f"'{spec.layer}' with {parameters}, {spec.rows} rows, width {spec.width}{cut}{groups}"


def another_block(spec: BlockSpec, where: str, expected: str) -> MessageError:
    """Compose the error of a block that is not the one of others."""
    return MessageError(
        f"{spec.where(where)}, layout",
        expected=expected,
        got=describe(spec),
        do="build the same model on every client, with the same settings",
    )
