r"""FedPM: federated preconditioned mixing, the server's side.

AAAI 2026, arXiv 2511.09100, equation 8, in delta form (see `fedapps.curvature.mixing`):

.. math:: \theta' = \theta + \Big(\sum_i p_i P_i\Big)^{-1} \sum_i p_i P_i (\theta_i - \theta)

The client sends ``P_i`` and ``M_i = P_i (theta_i - theta)`` for every curvature block; the server keeps their two sums, so its
memory does not grow with the number of clients. Tensors without a block take the weighted mean, buffers the mean or, if
they are integers, the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from logging import getLogger

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import Strategy

from fedapps.curvature.layout import Block, Layout, check_block, from_matrix, layout_from_json, to_matrix
from fedapps.curvature.mixing import (
    BlockSums,
    TensorSums,
    add_block,
    add_mean,
    finish_mean,
    mix_block,
    start_block,
    start_mean,
)
from fedapps.errors import MessageError, explain
from fedapps.records import CURVATURE, LAYOUT, PRODUCTS, Arrays, Reply, check_complete, unpack_arrays
from fedapps.settings import Settings
from fedapps.strategies.options import RoundOptions
from fedapps.strategies.rounds import RoundMixin

logger = getLogger("flwr")


@dataclass
class _Sums:
    """Sums of a round: of the blocks by layer, and of everything else."""

    layout: Layout
    blocks: dict[str, BlockSums]
    others: TensorSums


class FedPM(RoundMixin, Strategy):
    """Preconditioned mixing of the clients' parameters.

    Args:
        options: The shared options.

    Example:
        >>> FedPM(options=RoundOptions(seed=1, fraction_train=0.5)).options.fraction_train
        0.5
    """

    def __init__(self, *, options: RoundOptions | None = None) -> None:
        self.set_up_rounds(options or RoundOptions())
        self._sums: _Sums | None = None

    @classmethod
    def from_settings(cls, settings: Settings, experiment: str) -> FedPM:
        """Build the strategy of a run.

        Args:
            settings: The settings.
            experiment: Identity of the experiment.

        Returns:
            The strategy.
        """
        return cls(options=RoundOptions.from_settings(settings, experiment))

    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: The model that is sent out, by name.
        """
        self._model = arrays
        self._sums = None

    def fold(self, reply: Reply) -> None:
        """Add ``p_i P_i`` and ``p_i M_i`` of every block, and the tensors without one, to their sums.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: A block is missing, misshapen or not finite, or the layout differs from the other clients'.
        """
        layout = read_layout(reply)
        if self._sums is not None and layout.blocks != self._sums.layout.blocks:
            raise MessageError(
                explain(
                    f"{reply.where}, layout",
                    expected=f"the blocks {[spec.layer for spec in self._sums.layout.blocks]} as from the other clients",
                    got=str([spec.layer for spec in layout.blocks]),
                    do="build the same model on every client, with the same layers preconditioned",
                )
            )
        check_complete(reply, set(layout.preconditioned), self._model)
        blocks = _read_blocks(reply, layout)
        for block in blocks:
            to_matrix(self._model, block.spec, reply.where)  # The block fits the model that was sent out.
        others = {**reply.arrays, **reply.buffers}
        if self._sums is None:
            self._sums = _Sums(
                layout,
                {spec.layer: start_block(spec.rows, spec.width) for spec in layout.blocks},
                start_mean(others),
            )
        weight = self.options.weight(reply.num_examples)
        for block in blocks:
            sums = self._sums.blocks[block.spec.layer]
            add_block(sums, weight, block.curvature, block.product, where=block.spec.where(reply.where))
        add_mean(self._sums.others, weight, others, where=reply.where)

    def finish(self) -> Arrays:
        """Mix every block, and take the mean of everything else.

        Returns:
            The new model, by name, in the order of the old one.

        Raises:
            CurvatureError: A block's mean curvature cannot be solved with.
        """
        if self._sums is None:
            raise RuntimeError("finish without a folded reply")
        new: Arrays = dict(finish_mean(self._sums.others))
        for spec in self._sums.layout.blocks:
            mixed = mix_block(to_matrix(self._model, spec), self._sums.blocks[spec.layer], where=spec.where("server"))
            new |= from_matrix(mixed.W, spec, self._model)
            if mixed.added_damping:
                note = f"layer '{spec.layer}': {mixed.added_damping:.1e} added to the damping on the server"
                self.report.notes.append(note)
                logger.warning("round %d, %s", self.report.server_round, note)
        self._sums = None
        return {name: new[name] for name in self._model}


def read_layout(reply: Reply) -> Layout:
    """Read which parameters a reply's blocks cover.

    Args:
        reply: A checked reply.

    Returns:
        The layout.

    Raises:
        MessageError: It is absent or malformed.
    """
    record = reply.content.get(LAYOUT)
    if not isinstance(record, ConfigRecord) or LAYOUT not in record:
        raise MessageError(
            explain(
                reply.where,
                expected=f"a record '{LAYOUT}' that says which parameters its blocks cover",
                got=", ".join(reply.content) or "no record",
                do="reply with fedapps.client_apps.second_order.fedpm_reply",
            )
        )
    return layout_from_json(str(record[LAYOUT]), reply.where)


def _read_blocks(reply: Reply, layout: Layout) -> list[Block]:
    curvature = unpack_arrays(reply.content, CURVATURE, reply.where)
    products = unpack_arrays(reply.content, PRODUCTS, reply.where)
    layers = [spec.layer for spec in layout.blocks]
    for record, held in ((CURVATURE, curvature), (PRODUCTS, products)):
        if list(held) != layers:
            raise MessageError(
                explain(
                    f"{reply.where}, record '{record}'",
                    expected=f"the layers {layers} of its layout",
                    got=str(list(held)),
                    do="send P and M of every block, in the order of the layout",
                )
            )
    blocks = [Block(spec, curvature[spec.layer], products[spec.layer]) for spec in layout.blocks]
    for block in blocks:
        check_block(block, reply.where)
    return blocks
