"""FedNL: what a reply says of a client's Hessian.

==================  ==========================================================================================
record or metric    content
==================  ==========================================================================================
``hessian``         up, from a client that the server's sum does not hold yet, with ``fednl.initial = exact``:
                    ``triangle``, its Hessian at the model received, which is ``H_i`` of both ends from then on
``hessian-change``  up, else: ``S_i`` as its compressor sends it (`fedapps.curvature.compressors`)
``hessian-error``   up, metric: ``l_i``, the Frobenius norm of ``H_i`` minus the Hessian
==================  ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import RecordDict

from fedapps.curvature.compressors import Compressor, Identity, Triangle
from fedapps.errors import MessageError
from fedapps.messages.schema import METRICS, Announced, Reply, pack_arrays

HESSIAN = "hessian"
CHANGE = "hessian-change"
ERROR = "hessian-error"


def announced_hessians(d: int, compressor: Compressor) -> Announced:
    """Announce both records, for ``d`` weights."""
    return {HESSIAN: Identity().like(d), CHANGE: compressor.like(d)}


def add_hessian(content: RecordDict, *, first: bool, message: Mapping[str, np.ndarray], error: float) -> None:
    """Add what a reply says of the client's Hessian to its content: the whole of it, or the compressed change."""
    content[HESSIAN if first else CHANGE] = pack_arrays(message)
    content.metric_records[METRICS][ERROR] = error


def read_hessian(reply: Reply, d: int, compressor: Compressor, *, first: bool) -> Triangle:
    """Read ``H_i`` in full, or ``C(nabla^2 f_i - H_i)``.

    Args:
        reply: A checked reply, or one with the triangle itself in the place of what travelled.
        d: Number of weights.
        compressor: The clients' compressor.
        first: Whether it is to hold the Hessian in full.

    Returns:
        The triangle.

    Raises:
        MessageError: The reply holds the other record, both, or one that no client composes.
    """
    expected = HESSIAN if first else CHANGE
    sent = [name for name in (HESSIAN, CHANGE) if name in reply.records]
    message = reply.records.get(expected, {})
    decoder = Identity() if first or "triangle" in message else compressor
    if sent != [expected] or message.keys() != decoder.like(d).keys():
        raise MessageError(
            f"{reply.where}, Hessian",
            expected=f"a record '{expected}' with {', '.join(decoder.like(d))}, "
            + ("since the sum does not hold this client yet" if first else "since the sum holds this client already"),
            got=", ".join(f"'{name}' with {', '.join(reply.records[name])}" for name in sent) or "none",
            do="use fedapps.client_apps.fednl on every node",
        )
    return decoder.decompress(message, d, reply.where)


def read_error(reply: Reply) -> float:
    """Read ``l_i``.

    Raises:
        MessageError: It is absent, negative or not finite.
    """
    error: Any = reply.metrics.get(ERROR)
    if error is None or not (math.isfinite(error) and error >= 0):
        raise MessageError(
            f"{reply.where}, metric '{ERROR}'",
            expected="a finite number >= 0",
            got=repr(error),
            do="use fedapps.client_apps.fednl on every node",
        )
    return float(error)
