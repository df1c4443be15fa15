"""The replica `(theta, state)`: base model + journal, kept up to date by slices of the journal.

A replica is a cache: any prefix of the run's journal may advance it, and it can be rebuilt at any time. Catching up walks
each tensor once, with all rounds applied to a tile before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from fedapps.zeroth_order.dispatch import apply_rounds
from fedapps.zeroth_order.errors import AstrayError, ReplicaError
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.layout import Layout, Ranges, fingerprint, layout_of
from fedapps.zeroth_order.program import compile_records
from fedapps.zeroth_order.rules import rule_of
from fedapps.zeroth_order.scheme import Record, Scheme
from fedapps.zeroth_order.tensors import Tensor, like, to_numpy

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = Mapping[str, Tensor]
"""Name -> tensor, in the layout's order."""

State: TypeAlias = Mapping[str, Tensors]
"""Slot -> name -> float32 tensor."""

Base: TypeAlias = Callable[[], Tensors]
"""Loads the parameters at the start of the run."""


class Replica:
    """The state of a run after some round, updated in place.

    Args:
        scheme: The run's scheme.
        theta: Name -> parameters, NumPy arrays or torch tensors such as a model's own parameters; changed in place.
        state: Slot -> name -> float32; None starts it, for parameters of the base model.
        round: The round whose state this is; 0 for the base model.
        fixed: Name -> elements that no round moves.
        threads: Of the kernels on the CPU.
    """

    def __init__(
        self,
        scheme: Scheme,
        theta: Tensors,
        state: State | None = None,
        *,
        round: int = 0,  # noqa: A002 (the word of the journal)
        fixed: Mapping[str, Ranges] | None = None,
        threads: int | None = None,
    ) -> None:
        self.scheme = scheme
        self.theta = theta
        self.state = start_state(scheme, theta) if state is None else state
        self.round = round
        self._fixed = fixed or {}
        self._threads = threads
        self._half_applied = False

    @property
    def layout(self) -> Layout:
        """How the tensors are laid end to end."""
        return layout_of(self.theta, self._fixed)

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Get one tensor's part of the state, slot -> float32."""
        return {slot: tensors[name] for slot, tensors in self.state.items()}

    def can_apply(self, part: Slice) -> bool:
        """Say whether a slice starts at or before this replica's round; if not, more of the journal is needed."""
        return part.after <= self.round

    def pending(self, part: Slice) -> list[Record]:
        """List the rounds of a slice that this replica lacks; what overlaps is skipped. No round between may be missing."""
        if not self.can_apply(part):
            raise ReplicaError(
                "replica",
                expected=f"a slice from round {self.round} or before",
                got=f"one from round {part.after}",
                do="apply the own prefix first, or ask the server for more",
            )
        return [record for record in part.records if record.round > self.round]

    def advance(self, part: Slice, *, verify: bool = True) -> int:
        """Apply what a slice has beyond this replica, in at most two passes over memory.

        Args:
            part: The slice.
            verify: Compare with the last fingerprint among the new rounds.

        Returns:
            Number of rounds applied.

        Raises:
            ReplicaError: Rounds between are missing, or an earlier update was interrupted.
            AstrayError: The fingerprint differs; the replica must be rebuilt.
        """
        self.check_whole()
        records = self.pending(part)
        marked = [i for i, record in enumerate(records) if record.fingerprint is not None] if verify else []
        cut = marked[-1] + 1 if marked else 0
        self._apply(records[:cut])
        if marked:
            self._compare(records[cut - 1])
        self._apply(records[cut:])
        self.round = max(self.round, part.through)
        return len(records)

    def rebuild(self, base: Base) -> None:
        """Go back to the base model, which must have this layout; then advance by the journal from round 0."""
        loaded = base()
        difference = self.layout.difference(layout_of(loaded, self._fixed))
        if difference is not None:
            raise ReplicaError(
                "base model", expected="the replica's tensors", got=difference, do="load the run's base model"
            )
        for name, tensor in self.theta.items():
            _assign(tensor, loaded[name])
        for slot, tensors in self.state.items():
            for tensor in tensors.values():
                tensor[...] = rule_of(self.scheme).slots[slot]
        self.round, self._half_applied = 0, False

    def fingerprint(self) -> str:
        """Name this state; see `layout.fingerprint`.

        Raises:
            ReplicaError: An update was interrupted.
        """
        self.check_whole()
        return fingerprint(self.layout, self.theta, self.state)

    def check_whole(self) -> None:
        """Refuse a state in the middle of an update."""
        if self._half_applied:
            raise ReplicaError(
                "replica", expected="a whole state", got="an interrupted update", do="rebuild it from the base"
            )

    def _apply(self, records: list[Record]) -> None:
        if not records:
            return
        program, offsets = compile_records(records, self.scheme), self.layout.offsets
        self._half_applied = True
        for name, tensor in self.theta.items():
            apply_rounds(
                tensor, self.state_of(name), records, self.scheme,
                offset=offsets[name], fixed=self._fixed.get(name, ()), program=program, threads=self._threads,
            )  # fmt: skip
        self._half_applied = False
        self.round = records[-1].round

    def _compare(self, record: Record) -> None:
        found = self.fingerprint()
        if found != record.fingerprint:
            self._half_applied = True
            raise AstrayError(
                f"replica at round {record.round}",
                expected=f"fingerprint {str(record.fingerprint)[:16]}",
                got=found[:16],
                do="rebuild it from base and journal",
            )


def start_state(scheme: Scheme, theta: Tensors) -> dict[str, dict[str, Tensor]]:
    """Make the state at the start of a run: slot -> name -> float32 of the tensor's shape, on its device."""
    return {
        slot: {name: _full(tensor, value) for name, tensor in theta.items()}
        for slot, value in rule_of(scheme).slots.items()
    }


def _full(tensor: Tensor, value: float) -> Tensor:
    if isinstance(tensor, np.ndarray):
        return np.full(tensor.shape, value, np.float32)
    import torch  # only with a torch tensor

    return torch.full(tuple(tensor.shape), value, dtype=torch.float32, device=tensor.device)


def _assign(target: Tensor, source: Tensor) -> None:
    if isinstance(target, np.ndarray):
        target[...] = to_numpy(source)
        return
    import torch  # only with a torch tensor

    given = like(source, target, tuple(target.shape)) if isinstance(source, np.ndarray) else source
    with torch.no_grad():
        target.copy_(cast("torch.Tensor", given))
