"""Exceptions of the zeroth-order methods. Messages say where, what was expected, what came, and what to do."""

from __future__ import annotations

from fedapps.errors import FedAppsError


class DirectionError(FedAppsError, ValueError):
    """A direction, a record or a tensor lies outside what the bit-exact definition covers."""


class ScalarError(FedAppsError, ValueError):
    """Scalars have the wrong shape, are not finite, or come from somebody who was not asked."""


class JournalError(FedAppsError, ValueError):
    """A journal cannot be read, or does not belong to this model or run."""

    READS_FILES = True


class ProbeError(FedAppsError, ValueError):
    """A model cannot be probed as asked."""


class ReplicaError(FedAppsError):
    """A replica or its store cannot be used as it is."""


class AstrayError(ReplicaError):
    """A replica's fingerprint differs from the journal's: it must be rebuilt and never used."""
