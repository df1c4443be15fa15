from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="the compiled CPU path needs numba")

from fedapps.zeroth_order.backend_numba import displace
from fedapps.zeroth_order.directions import direction
from fedapps.zeroth_order.number_formats import NumberFormat, narrow, widen
from fedapps.zeroth_order.scheme import Probe, Scheme

LISTINGS = """
import numpy as np
from fedapps.zeroth_order import kernels_cpu
from fedapps.zeroth_order.backend_numba import apply, displace
from fedapps.zeroth_order.program import compile_records
from fedapps.zeroth_order.scheme import Probe, Record, Scheme

theta, H = np.ones(10, np.float32), np.ones(10, np.float32)
record = Record(1, 0, 0.1, 1e-3, 0.1, 1e-6, ((0.5,),), 1)
apply(theta, {"H": H}, compile_records([record], Scheme(0)), 0, 1)
displace(theta, {"H": H}, Scheme(0), [], Probe(0, 0, 0.1), 0, np.zeros(1, np.int64), 10, theta.copy(), 1)
for function in (kernels_cpu.apply, kernels_cpu.displace):
    (listing,) = function.inspect_asm().values()
    print(listing, "END OF FUNCTION")
"""
FUSED = r"\b(?:vf?n?m(?:add|sub)\w*|fn?m(?:add|sub|la|ls)\w*)"
ESTIMATED = r"\b(?:v?rsqrt\w*|v?rcp\w*|frecp\w*|frsqrt\w*)"


@pytest.mark.slow
def test_the_machine_code_neither_fuses_nor_approximates(tmp_path: Path) -> None:
    """Fused multiply-add (x86: vfmadd and relatives; Arm: fmadd, fmla) and reciprocal estimates would change bits.

    Compiled anew in a process of its own, since numba shows no code that it loads from its cache.
    """
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", LISTINGS], env=environment, capture_output=True, text=True, check=False)
    listings = ran.stdout.split("END OF FUNCTION")[:-1]
    assert len(listings) == 2, ran.stderr[-2000:]
    for listing in listings:
        assert re.search(r"\bv?sqrt[ps]s|fsqrt", listing)  # the arithmetic is in this listing
        assert re.search(r"\bv?mul[ps]s|\bfmul", listing)
        assert not re.findall(FUSED, listing)
        assert not re.findall(ESTIMATED, listing)


def test_the_patterns_find_what_they_look_for() -> None:
    for name in ("vfmadd213ps", "vfnmadd231ss", "vfmsub132ps", "fmadd", "fmla", "fnmsub"):
        assert re.search(FUSED, f"\t{name} %ymm0"), name
    for name in ("vrsqrt14ps", "rsqrtps", "vrcp14ps", "rcpss", "frsqrte"):
        assert re.search(ESTIMATED, f"\t{name} %ymm0"), name


def test_float16_is_rounded_like_numpy_at_every_pattern() -> None:
    """A probe with mu = 0 is a round trip through the tile's conversions; a large one rounds sums of all sizes."""
    patterns = np.arange(65536, dtype=np.uint16).view(np.float16)
    theta = patterns[np.isfinite(patterns)]
    for mu in (0.0, 1e-7, 1e-3, 1.0, 3e4):
        out = np.empty_like(theta)
        place = (0, np.zeros(1, np.int64), theta.size, out, 1)
        displace(theta, {}, Scheme(3, "decomfl"), [], Probe(1, 0, mu), *place)
        moved = widen(theta) + np.float32(mu) * direction(3, 1, 0, 0, theta.size)
        expected = narrow(moved, NumberFormat.FLOAT16)
        np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16), err_msg=f"mu {mu}")
