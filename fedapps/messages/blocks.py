"""FedPM's reply: curvature blocks and products, and which parameters they cover.

=============  ====================================================================================================
record         content
=============  ====================================================================================================
``products``   layer -> ``M = (W_i - W) P``, shape (rows, width)
``curvature``  layer -> upper triangle of ``P``, shape (width (width + 1) / 2,), or another form of
               `fedapps.curvature.blocks`
``layout``     which parameters each block covers, as JSON; ``wire`` = ``bfloat16`` if ``P`` is in that (as uint16), and
               ``factors``, layer -> rows of its factor, if some travel so
=============  ====================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedapps.curvature.blocks import Block, WireDtype, check_block
from fedapps.curvature.layout import Layout, layout_from_json
from fedapps.errors import MessageError
from fedapps.messages.schema import ARRAYS, BUFFERS, METRICS, Arrays, Entries, Reply, missing_record, pack_arrays

PRODUCTS = "products"
CURVATURE = "curvature"
LAYOUT = "layout"
WIRE = "wire"
FACTORS = "factors"


def pack_blocks(
    blocks: Sequence[Block], layout: Layout, trainable: Arrays, buffers: Arrays, metrics: MetricRecord
) -> RecordDict:
    """Pack a client's reply.

    Args:
        blocks: What it has for every layer of the layout, in that order.
        layout: Which parameters the blocks cover.
        trainable: Its trainable tensors; those that a block covers are left out.
        buffers: Its buffers.
        metrics: The metrics record.

    Returns:
        The content of the reply.
    """
    tags = {LAYOUT: layout.to_json()}
    if any(block.curvature.dtype == np.uint16 for block in blocks):
        tags[WIRE] = str(WireDtype.BFLOAT16)
    if factors := {block.spec.layer: block.factor_rows for block in blocks if block.factor_rows}:
        tags[FACTORS] = json.dumps(factors)
    content = RecordDict(
        {
            ARRAYS: pack_arrays({k: v for k, v in trainable.items() if k not in layout.preconditioned}),
            PRODUCTS: pack_arrays({block.spec.layer: block.product for block in blocks}),
            CURVATURE: pack_arrays({block.spec.layer: block.curvature for block in blocks}),
            LAYOUT: ConfigRecord(dict(tags)),
            METRICS: metrics,
        }
    )
    if buffers:
        content[BUFFERS] = pack_arrays(buffers)
    return content


def read_layout(reply: Reply) -> Layout:
    """Read which parameters a reply's blocks cover.

    Args:
        reply: A checked reply.

    Returns:
        The layout.

    Raises:
        MessageError: It is absent or malformed.
    """
    tags = reply.entries.get(LAYOUT, {})
    if LAYOUT not in tags:
        raise MessageError(
            reply.where,
            expected=f"a record '{LAYOUT}' that says which parameters its blocks cover",
            got=", ".join([*reply.records, *reply.entries]) or "a model",
            do="reply with fedapps.client_apps.fedpm.fedpm_reply",
        )
    return layout_from_json(str(tags[LAYOUT]), reply.where)


def read_blocks(reply: Reply, layout: Layout) -> list[Block]:
    """Read a reply's blocks, in the order of its layout.

    Args:
        reply: A checked reply.
        layout: Its layout.

    Returns:
        The blocks, their shapes checked and their numbers finite.

    Raises:
        MessageError: A block is missing, misshapen, not finite, or in another type of numbers.
    """
    layers = [spec.layer for spec in layout.blocks]
    for record in (CURVATURE, PRODUCTS):
        if record not in reply.records:
            raise missing_record(reply.where, record, "ArrayRecord", {**reply.records, **reply.entries})
        if reply.records[record].keys() != set(layers):
            raise MessageError(
                f"{reply.where}, record '{record}'",
                expected=f"the layers {layers} of its layout",
                got=str(list(reply.records[record])),
                do="send P and M of every block",
            )
    curvature, products = reply.records[CURVATURE], reply.records[PRODUCTS]
    tags = reply.entries[LAYOUT]
    factors = _factor_rows(tags, layers, reply.where)
    wire = WireDtype.BFLOAT16 if tags.get(WIRE) == WireDtype.BFLOAT16 else None
    blocks = [
        Block(spec, curvature[spec.layer], products[spec.layer], factors.get(spec.layer, 0)) for spec in layout.blocks
    ]
    for block in blocks:
        _check_dtype(block, wire, reply.where)
        check_block(block, reply.where)
    return blocks


def _factor_rows(tags: Entries, layers: list[str], where: str) -> Mapping[str, int]:
    """Read which blocks travel as factors, and of how many rows."""
    text = tags.get(FACTORS, "{}")
    try:
        factors: dict[str, int] = json.loads(str(text))
        if not all(layer in layers and type(k) is int and k > 0 for layer, k in factors.items()):
            raise ValueError("an unknown layer or a number of rows that is not positive")
    except (ValueError, AttributeError, RecursionError) as problem:
        raise MessageError(
            f"{where}, entry '{FACTORS}' of record '{LAYOUT}'",
            expected="JSON that maps layers of the layout to numbers of rows",
            got=f"{str(text)[:200]!r} ({problem})",
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
