r"""FedPM: federated preconditioned mixing, the server's side.

AAAI 2026, arXiv 2511.09100, equation 8, in delta form (see `fedapps.curvature.mixing`):

.. math:: \theta' = \theta + \Big(\sum_i p_i P_i\Big)^{-1} \sum_i p_i P_i (\theta_i - \theta)

The client sends ``P_i`` and ``M_i = P_i (theta_i - theta)`` for every curvature block; the server keeps their two sums, so its
memory does not grow with the number of clients. Tensors without a block take the weighted mean, buffers the mean or, if
they are integers, the maximum.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import Strategy

from fedapps.curvature.blocks import Block, WireDtype, check_block
from fedapps.curvature.layout import BlockSpec, Layout, describe_tiles, from_matrix, layout_from_json, to_matrix
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
from fedapps.curvature.packing import scaled_identity
from fedapps.errors import MessageError
from fedapps.records import CURVATURE, FACTORS, LAYOUT, PRODUCTS, WIRE, Arrays, Reply, check_complete, unpack_arrays
from fedapps.strategies.options import RoundOptions
from fedapps.strategies.rounds import RoundMixin

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


class FedPM(RoundMixin, Strategy):
    """Preconditioned mixing of the clients' parameters.

    Args:
        options: The shared options.

    Attributes:
        layout: What is preconditioned and what averaged, from the first reply that was folded; None before. It is logged
            then, since clients of one's own may answer no query that would say it earlier.

    Example:
        >>> FedPM(options=RoundOptions(seed=1, fraction_train=0.5)).options.fraction_train
        0.5
    """

    def __init__(self, *, options: RoundOptions | None = None) -> None:
        self.set_up_rounds(options or RoundOptions())
        self.layout: Layout | None = None
        self._layers: dict[str, _LayerSums] = {}
        # One entry a tensor, since clients may differ in which tensors have a block.
        self._means: dict[str, TensorSums] = {}
        self._senders: dict[str, list[int]] = {}

    def preconditioned(self) -> Collection[str] | None:
        """Name the tensors that the clients precondition.

        Returns:
            The names, from the first reply that was folded; None before.
        """
        return None if self.layout is None else self.layout.preconditioned

    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: The model that is sent out, by name.
        """
        self._model = arrays
        self._layers, self._means, self._senders = {}, {}, {}

    def fold(self, reply: Reply) -> None:
        """Add ``p_i P_i`` and ``p_i M_i`` of every block, and the tensors without one, to their sums.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: A block is missing, misshapen or not finite, or a layer's block has another shape than on the other
                clients.
        """
        layout = read_layout(reply)
        self._check_layout(layout, reply.where)
        check_complete(reply, set(layout.preconditioned), self._model)
        blocks = _read_blocks(reply, layout)
        for block in blocks:
            to_matrix(self._model, block.spec, reply.where)  # The block fits the model that was sent out.
        weight = self.options.weight(reply.num_examples)
        for block in blocks:
            self._add_block(block, weight, reply)
        for name, value in {**reply.arrays, **reply.buffers}.items():
            sums = self._means.setdefault(name, start_mean({name: self._model[name]}))
            add_mean(sums, weight, {name: value}, where=reply.where)
            self._senders.setdefault(name, []).append(reply.partition)
        if self.layout is None:
            self.layout = layout
            for line in layout.report(self._model).splitlines():
                logger.info("%s", line)

    def _check_layout(self, layout: Layout, where: str) -> None:
        if len(set(layout.preconditioned)) < len(layout.preconditioned):
            raise MessageError(
                f"{where}, layout",
                expected="every parameter in one block",
                got=", ".join(layout.preconditioned),
                do="leave tied parameters out of all blocks",
            )
        covered = {name: layer for layer, sums in self._layers.items() for name in sums.spec.parameters}
        for spec in layout.blocks:
            known = {self._layers[covered[name]].spec for name in spec.parameters if name in covered}
            if spec.layer in self._layers:
                known.add(self._layers[spec.layer].spec)
            for other in known - {spec}:
                raise MessageError(
                    f"{spec.where(where)}, layout",
                    expected=f"{_describe(other)} as from the other clients",
                    got=_describe(spec),
                    do="build the same model on every client, with the same settings",
                )

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

    def finish(self) -> Arrays:
        """Mix every block, and take the mean of everything else.

        A client without a block for a layer took plain gradient steps with it, which divide by the identity: it takes part in
        the mixing with ``P_i = I``.

        Returns:
            The new model, by name, in the order of the old one.

        Raises:
            CurvatureError: A block's mean curvature cannot be solved with.
        """
        if not self._layers and not self._means:
            raise RuntimeError("finish without a folded reply")
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
        self.note(
            f"layer '{spec.layer}': no block from {_clients(self._senders[spec.parameters[0]])}, mixed with P = I"
        )

    def _mix(self, layer: _LayerSums, W: np.ndarray) -> np.ndarray:
        spec = layer.spec
        if layer.without_input:
            self.note(
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
            self.note(f"layer '{spec.layer}': {added:.1e} added to the damping on the server")
        return new


def _describe(spec: BlockSpec) -> str:
    return f"'{spec.layer}' with {' and '.join(spec.parameters)}, {spec.rows} rows, {describe_tiles(spec)}"


def _clients(partitions: list[int]) -> str:
    return f"client{'s' if len(partitions) > 1 else ''} {', '.join(map(str, partitions))}"


def read_layout(reply: Reply) -> Layout:
    """Read which parameters a reply's blocks cover.

    Args:
        reply: A checked reply.

    Returns:
        The layout.

    Raises:
        MessageError: It is absent or malformed.
    """
    return layout_from_json(str(_layout_record(reply)[LAYOUT]), reply.where)


def _layout_record(reply: Reply) -> ConfigRecord:
    record = reply.content.get(LAYOUT)
    if not isinstance(record, ConfigRecord) or LAYOUT not in record:
        raise MessageError(
            reply.where,
            expected=f"a record '{LAYOUT}' that says which parameters its blocks cover",
            got=", ".join(reply.content) or "no record",
            do="reply with fedapps.client_apps.fedpm.fedpm_reply",
        )
    return record


def _read_blocks(reply: Reply, layout: Layout) -> list[Block]:
    curvature = unpack_arrays(reply.content, CURVATURE, reply.where)
    products = unpack_arrays(reply.content, PRODUCTS, reply.where)
    layers = [spec.layer for spec in layout.blocks]
    for record, held in ((CURVATURE, curvature), (PRODUCTS, products)):
        if list(held) != layers:
            raise MessageError(
                f"{reply.where}, record '{record}'",
                expected=f"the layers {layers} of its layout",
                got=str(list(held)),
                do="send P and M of every block, in the order of the layout",
            )
    tags = _layout_record(reply)
    factors = _factor_rows(tags, layers, reply.where)
    wire = WireDtype.BFLOAT16 if tags.get(WIRE) == WireDtype.BFLOAT16 else None
    blocks = [
        Block(spec, curvature[spec.layer], products[spec.layer], factors.get(spec.layer, 0)) for spec in layout.blocks
    ]
    for block in blocks:
        _check_dtype(block, wire, reply.where)
        check_block(block, reply.where)
    return blocks


def _factor_rows(tags: ConfigRecord, layers: list[str], where: str) -> Mapping[str, int]:
    """Read which blocks travel as factors, and of how many rows."""
    text = tags.get(FACTORS, "{}")
    try:
        factors: dict[str, int] = json.loads(str(text))
        if not all(layer in layers and type(k) is int and k > 0 for layer, k in factors.items()):
            raise ValueError("an unknown layer or a number of rows that is not positive")
    except (ValueError, AttributeError) as problem:
        raise MessageError(
            f"{where}, entry '{FACTORS}' of record '{LAYOUT}'",
            expected="JSON that maps layers of the layout to numbers of rows",
            got=f"{text!r} ({problem})",
            do="run the same fedapps version on both ends",
        ) from problem
    return factors


def _check_dtype(block: Block, wire: WireDtype | None, where: str) -> None:
    kinds = ("u2",) if wire and not block.is_identity else ("f4", "f8")
    if block.curvature.dtype.str[1:] not in kinds or block.product.dtype.str[1:] not in ("f4", "f8"):
        raise MessageError(
            block.spec.where(where),
            expected=f"P in {'bfloat16 patterns (uint16)' if 'u2' in kinds else 'float32 or float64'}, M in floats",
            got=f"{block.curvature.dtype} and {block.product.dtype}",
            do="reply with fedapps.client_apps.fedpm.fedpm_reply",
        )
