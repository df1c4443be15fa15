"""Settings of the clients that take second-order steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedapps.errors import SettingsError
from fedapps.settings import setting


@dataclass(frozen=True, kw_only=True)
class SecondOrderSettings:
    """Settings of the clients that take second-order steps.

    All but ``damping`` are about FOOF blocks: the full Hessian of a convex model is exact and new in every step.

    Attributes:
        damping: Added to the diagonal of every curvature block, ``P = A + damping I``; 0 is meant for convex models.
        estimate: How a FOOF block ``A`` is estimated: ``last-batch`` (the paper), ``average`` (exponential average over the
            round's batches) or ``full-pass`` (a pass over the client's examples before the round).
        decay: Weight of the past in the exponential average, for each local step.
        refresh: Local steps that use one ``P`` and its factorisation; 1 is the paper. Layers with fewer rows in a batch than
            their width have a new one at each of the round's first ``refresh`` steps.
        max_rows: Rows (examples, positions) of a batch that enter a block, a random sample; 0 uses all.
        max_width: Wider layers are cut into diagonal blocks of at most this width; 0 cuts none.
    """

    damping: float = setting("auto", "added to the diagonal of each curvature block", minimum=0)
    estimate: str = setting(
        "average",
        "FOOF block from the last batch (the paper), an exponential average over the round's batches, or a pass over all "
        "of the client's examples before the round",
        choices=("average", "last-batch", "full-pass"),
    )
    decay: float = setting(
        0.9, "weight of the past in the exponential average, for each local step", minimum=0, maximum=0.999
    )
    refresh: int = setting(10, "local steps that use one FOOF block and its factorisation (paper: 1)", minimum=1)
    max_rows: int = setting(0, "rows of a batch that enter a FOOF block, a random sample; 0 = all", minimum=0)
    max_width: int = setting(
        4096, "wider layers are cut into diagonal blocks of at most this width; 0 = none is cut", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class LocalNewtonSettings(SecondOrderSettings):
    """Settings of LocalNewton.

    Attributes:
        line_search: Candidate steps of the global line search, separated by commas; empty for none.
    """

    line_search: str = setting(
        "", 'candidate steps of a global line search along the mean, such as "1,0.5,0.25,0.125"; empty = none, step 1'
    )

    def __post_init__(self) -> None:
        try:
            good = all(0 < step < math.inf for step in self.steps)
        except ValueError:
            good = False
        if not good:
            raise SettingsError(
                "setting 'localnewton.line-search'",
                expected="numbers > 0, separated by commas",
                got=repr(self.line_search),
                do='write it like "1,0.5,0.25,0.125", or leave it empty',
            )

    @property
    def steps(self) -> tuple[float, ...]:
        """The candidate steps."""
        return tuple(float(part) for part in self.line_search.split(",")) if self.line_search else ()


@dataclass(frozen=True, kw_only=True)
class FedPMSettings(SecondOrderSettings):
    """Settings of FedPM.

    Attributes:
        wire: In which numbers ``P`` travels.
        factor_min_rows: Least rows from which a block of lower rank travels as its triangular factor; 0 sends none so.
    """

    wire: str = setting(
        "float32", "numbers in which P travels (float32 means as computed)", choices=("float32", "bfloat16")
    )
    factor_min_rows: int = setting(
        0,
        "a block from fewer rows than its width travels as its smaller triangular factor if it has at least this many rows "
        "(2 or more); 0 = never",
        minimum=0,
    )

    def __post_init__(self) -> None:
        if self.factor_min_rows == 1:
            raise SettingsError(
                "setting 'fedpm.factor-min-rows'",
                expected="0 (off) or at least 2",
                got="1",
                do="raise it: the factor of a single row is the row itself, up to sign",
            )
