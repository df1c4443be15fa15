"""A slice of the journal as columns of plain values: four bytes a scalar, and what rounds have in common only once.

| column | content |
|---|---|
| `after`, `through` | as in `Slice` |
| `rounds`, `first-steps`, `participants` | one integer a record |
| `shape` | `tau` and `P` of each record, or once if all are alike |
| `lr`, `mu`, `nu`, `eps`, `momentum` | float64 of each record, or once if all are alike; `momentum` only where there is one |
| `scalars` | little-endian float32, record after record, row after row |
| `marked`, `fingerprints` | places of the records with a fingerprint, and 32 bytes of each |

A slice without records has only the first line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedapps.errors import FedAppsError
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.scheme import Record, Scalars

Columns: TypeAlias = dict[str, int | list[int] | list[float] | bytes]
"""Column -> value, of types that any message format has."""

_NUMBERS = ("lr", "mu", "nu", "eps")
_DIGEST = 32


def pack_slice(part: Slice) -> Columns:
    """Lay a slice out in columns."""
    columns: Columns = {"after": part.after, "through": part.through}
    records = part.records
    if not records:
        return columns
    columns["rounds"] = [record.round for record in records]
    columns["first-steps"] = [record.first_step for record in records]
    columns["participants"] = [record.participants for record in records]
    shapes = [(record.tau, record.num_probes) for record in records]
    columns["shape"] = [n for shape in (shapes[:1] if len(set(shapes)) == 1 else shapes) for n in shape]
    for name in _NUMBERS:
        columns[name] = _once([getattr(record, name) for record in records])
    momenta = [record.momentum for record in records if record.momentum is not None]
    if momenta:
        columns["momentum"] = _once(momenta)
    columns["scalars"] = pack_scalars([value for record in records for row in record.scalars for value in row])
    marked = [place for place, record in enumerate(records) if record.fingerprint is not None]
    if marked:
        columns["marked"] = marked
        columns["fingerprints"] = b"".join(bytes.fromhex(str(records[place].fingerprint)) for place in marked)
    return columns


def unpack_slice(columns: Mapping[str, Any], where: str) -> Slice:
    """Read a slice from what `pack_slice` gave, or raise a JournalError that says `where`; other columns are left alone."""
    try:
        after, through = int(columns["after"]), int(columns["through"])
        records = _records(columns) if "rounds" in columns else ()
        return Slice(after, through, records)
    except (FedAppsError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise JournalError(
            f"{where}, journal slice",
            expected="columns of equal length as fedapps.zeroth_order.wire packs them",
            got=f"{type(error).__name__}: {error}",
            do="run the same version of fedapps on both ends",
        ) from error


def pack_scalars(values: Sequence[float]) -> bytes:
    """Write float32 values as little-endian, four bytes each."""
    return np.asarray(values, "<f4").tobytes()


def unpack_scalars(data: bytes, num_probes: int) -> Scalars:
    """Read rows of `P` numbers, finite or not, from little-endian float32; a ValueError if the bytes are no whole rows.

    Raises:
        ValueError: The bytes are no whole rows.
    """
    if num_probes < 1 or len(data) % (4 * num_probes):
        raise ValueError(f"{len(data)} bytes are no whole rows of {num_probes} float32 numbers")
    rows = np.frombuffer(data, "<f4").reshape(-1, num_probes)
    return tuple(tuple(row) for row in rows.astype(np.float64).tolist())


def _once(values: list[float]) -> list[float]:
    return values[:1] if len(set(values)) == 1 else values


def _each(values: Sequence[Any], count: int) -> list[Any]:
    listed = list(values)
    return listed * count if len(listed) == 1 else listed


def _records(columns: Mapping[str, Any]) -> tuple[Record, ...]:
    rounds = list(columns["rounds"])
    count = len(rounds)
    sizes = list(columns["shape"])
    shapes = _each(list(zip(sizes[::2], sizes[1::2], strict=True)), count)
    numbers = [_each(columns[name], count) for name in _NUMBERS]
    momenta = _each(columns.get("momentum", [None]), count)
    fingerprints: list[str | None] = [None] * count
    digests = bytes(columns.get("fingerprints", b""))
    for number, place in enumerate(columns.get("marked", [])):
        fingerprints[place] = digests[_DIGEST * number : _DIGEST * (number + 1)].hex()
    scalars, start = [], 0
    data = bytes(columns["scalars"])
    for tau, num_probes in shapes:
        stop = start + 4 * tau * num_probes
        scalars.append(unpack_scalars(data[start:stop], num_probes))
        start = stop
    if start != len(data) or len(digests) != _DIGEST * len(columns.get("marked", [])):
        raise ValueError(f"{len(data)} bytes of scalars and {len(digests)} of fingerprints do not fit the records")
    rows = zip(
        rounds, columns["first-steps"], *numbers, scalars, columns["participants"], fingerprints, momenta, strict=True
    )
    return tuple(Record(*row) for row in rows)
