r"""FedPM: federated preconditioned mixing, the server's side.

AAAI 2026, arXiv 2511.09100, equation 8, in delta form (see `fedapps.curvature.mixing`):

.. math:: \theta' = \theta + \Big(\sum_i p_i P_i\Big)^{-1} \sum_i p_i P_i (\theta_i - \theta)

The client sends ``P_i`` and ``M_i = P_i (theta_i - theta)`` for every curvature block; the server keeps their two sums, so its
memory does not grow with the number of clients. Tensors without a block take the weighted mean, buffers the mean or, if
they are integers, the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any

import numpy as np
from typing_extensions import override

from fedapps.averaging import TensorSums, add_mean, finish_mean, start_mean
from fedapps.curvature.blocks import Block
from fedapps.curvature.layout import BlockSpec, Layout, from_matrix, to_matrix
from fedapps.curvature.mixing import BlockSums, add_block, mix_block, start_block
from fedapps.curvature.packing import scaled_identity
from fedapps.defences import Defence, update_norm
from fedapps.errors import SettingsError
from fedapps.messages.blocks import CURVATURE, LAYOUT, PRODUCTS, read_blocks, read_layout
from fedapps.messages.schema import Announced, Arrays, Reply, check_complete
from fedapps.settings import RoundSettings
from fedapps.strategies.base import RoundStrategy
from fedapps.strategies.layouts import Layouts, another_block, describe

logger = getLogger("flwr")


@dataclass
class _LayerSums:
    """Sums of a round for one layer.

    Attributes:
        spec: Its block.
        tiles: Sums of each tile.
        informed: Whether a client had an input covariance of the layer.
        without_input: Clients that had none.
    """

    spec: BlockSpec
    tiles: list[BlockSums]
    informed: bool = False
    without_input: list[int] = field(default_factory=list)


class FedPM(RoundStrategy):
    """Preconditioned mixing of the clients' parameters.

    Args:
        settings: As `RoundStrategy`.
        **rounds: Further arguments of `RoundStrategy`.

    Attributes:
        layouts: What the clients precondition. What most of them do is logged after the first round, since clients of one's
            own may answer no query that would say it earlier.

    Example:
        >>> FedPM(RoundSettings(seed=1, fraction_train=0.5)).settings.fraction_train
        0.5
    """

    def __init__(self, settings: RoundSettings | None = None, **rounds: Any) -> None:
        super().__init__(settings, **rounds)
        if self.settings.defence in (Defence.MEDIAN, Defence.TRIMMED_MEAN):
            raise SettingsError(
                "setting 'defence' of method 'fedpm'",
                expected="clip or multi-krum: the median of each number of P_i is no curvature, it has negative eigenvalues",
                got=self.settings.defence.value,
                do="choose multi-krum",
            )
        self.layouts = Layouts(self.roster, self.rounds)
        self._layers: dict[str, _LayerSums] = {}
        # One entry a tensor, since clients may differ in which tensors have a block.
        self._means: dict[str, TensorSums] = {}
        self._senders: dict[str, list[int]] = {}
        self._read: tuple[Reply, Layout, list[Block]] | None = None

    @override
    def curvature_layout(self) -> Layout | None:
        return self.layouts.common

    @override
    def announced(self, model: Arrays) -> Announced:
        """Announce the blocks too, whose shapes follow from the layout of the reply."""
        return {**super().announced(model), PRODUCTS: None, CURVATURE: None}

    @override
    def begin(self, model: Arrays) -> None:
        self._model = model
        self._layers, self._means, self._senders, self._read = {}, {}, {}, None
        self.layouts.begin(model)

    @override
    def plain(self, reply: Reply) -> Reply:
        """Decode every ``P_i``, so that it is a triangle of floats whatever it travelled as."""
        layout, blocks = self._blocks_of(reply)
        triangles = {block.spec.layer: np.concatenate([P for _, P, _ in block.tiles()]) for block in blocks}
        return replace(
            reply,
            records={**reply.records, CURVATURE: triangles},
            entries={**reply.entries, LAYOUT: {LAYOUT: layout.to_json()}},
        )

    @override
    def norms(self, reply: Reply) -> Mapping[str, float]:
        """Measure the update, with ``M_i`` of all blocks in it, and ``sum tr P_i``, which bounds every entry of them."""
        _, blocks = self._blocks_of(reply)
        norms = dict(super().norms(reply))
        norms["update"] = math.hypot(norms["update"], update_norm(reply.records[PRODUCTS], {}))
        return norms | {"curvature": sum(block.trace() for block in blocks)}

    def _blocks_of(self, reply: Reply) -> tuple[Layout, list[Block]]:
        """Read a reply's blocks, once for both who ask in a row."""
        if self._read is None or self._read[0] is not reply:
            layout = read_layout(reply)
            self._check_layout(layout, reply.where)
            check_complete(reply, set(layout.preconditioned), self._model)
            self._read = reply, layout, read_blocks(reply, layout)
        return self._read[1:]

    @override
    def fold(self, reply: Reply) -> None:
        """Add ``p_i P_i`` and ``p_i M_i`` of every block, and the tensors without one, to their sums."""
        layout, blocks = self._blocks_of(reply)
        self._read = None
        weight = self.settings.weight(reply.num_examples)
        for block in blocks:
            self._add_block(block, weight, reply)
        for name, value in {**reply.arrays, **reply.buffers}.items():
            sums = self._means.setdefault(name, start_mean({name: self._model[name]}))
            add_mean(sums, weight, {name: value}, where=reply.where)
            self._senders.setdefault(name, []).append(reply.partition)
        self.layouts.fold(layout, reply.where)

    def _check_layout(self, layout: Layout, where: str) -> None:
        self.layouts.check(layout, where)
        # Clients of one's own may answer no query: then what is folded already is the norm.
        covered = {name: layer for layer, sums in self._layers.items() for name in sums.spec.parameters}
        for spec in layout.blocks:
            known = {self._layers[covered[name]].spec for name in spec.parameters if name in covered}
            if spec.layer in self._layers:
                known.add(self._layers[spec.layer].spec)
            for other in known - {spec}:
                raise another_block(spec, where, f"{describe(other)} as from the other clients")

    def _add_block(self, block: Block, weight: float, reply: Reply) -> None:
        spec = block.spec
        if spec.layer not in self._layers:
            height = spec.rows // spec.groups
            self._layers[spec.layer] = _LayerSums(spec, [start_block(height, tile.width) for tile in spec.tiles])
        layer = self._layers[spec.layer]
        for sums, (_, curvature, product) in zip(layer.tiles, block.tiles(), strict=True):
            add_block(sums, weight, curvature, product, where=spec.where(reply.where))
        if block.is_identity:
            layer.without_input.append(reply.partition)
        else:
            layer.informed = True

    @override
    def finish(self) -> Arrays:
        """Mix every block, and take the mean of everything else.

        A client without a block for a layer took plain gradient steps with it, which divide by the identity: it takes part in
        the mixing with ``P_i = I``.

        Raises:
            CurvatureError: A block's mean curvature cannot be solved with.
        """
        if not self._layers and not self._means:
            raise RuntimeError("finish without a folded reply")
        first = self.layouts.common is None
        self.layouts.finish()
        if first and self.layouts.common is not None:
            for line in self.layouts.common.report(self._model).splitlines():
                logger.info("%s", line)
        new: Arrays = {}
        for layer in self._layers.values():
            W = to_matrix(self._model, layer.spec)
            self._add_plain_clients(layer, W)
            new |= from_matrix(self._mix(layer, W), layer.spec, self._model)
        for name, sums in self._means.items():
            if name not in new:
                new |= finish_mean(sums)
        self._layers, self._means, self._senders = {}, {}, {}
        return {name: new[name] for name in self._model}

    def _add_plain_clients(self, layer: _LayerSums, W: np.ndarray) -> None:
        """Add the clients that sent the layer's tensors themselves, with ``P = I`` and ``M = W_i - W``."""
        spec = layer.spec
        means = {name: self._means[name] for name in spec.parameters if name in self._means}
        if not means:
            return
        weight = means[spec.parameters[0]].weight
        mean = to_matrix({name: sums.sums[name] / sums.weight for name, sums in means.items()}, spec)
        for sums, tile in zip(layer.tiles, spec.tiles, strict=True):
            delta = (mean - W)[tile.rows, tile.columns]
            add_block(sums, weight, scaled_identity(tile.width, 1.0), delta, where=spec.where("server"))
        self.rounds.note(
            f"layer '{spec.layer}': no block from {_clients(self._senders[spec.parameters[0]])}, mixed with P = I"
        )

    def _mix(self, layer: _LayerSums, W: np.ndarray) -> np.ndarray:
        spec = layer.spec
        if layer.without_input:
            self.rounds.note(
                f"layer '{spec.layer}': no input on {_clients(layer.without_input)}, mixed with P = damping I"
                " (P = I after plain gradient steps)"
            )
        new, added = W.astype(np.float64), 0.0
        for sums, tile in zip(layer.tiles, spec.tiles, strict=True):
            if not layer.informed and not sums.curvature.any():
                continue  # Used on no client, and no damping either: nobody moved it.
            mixed = mix_block(new[tile.rows, tile.columns], sums, where=spec.where("server"))
            new[tile.rows, tile.columns] = mixed.W
            added = max(added, mixed.added_damping)
        if added:
            self.rounds.note(f"layer '{spec.layer}': {added:.1e} added to the damping on the server")
        return new


def _clients(partitions: list[int]) -> str:
    return f"client{'s' if len(partitions) > 1 else ''} {', '.join(map(str, partitions))}"
