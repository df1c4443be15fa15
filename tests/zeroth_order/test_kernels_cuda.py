from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the CUDA path needs torch")
pytest.importorskip("triton", reason="this build of torch has no triton; the CUDA build does")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fedapps.zeroth_order import backend_triton, kernels_cuda
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.dispatch import FUSED
from fedapps.zeroth_order.number_formats import NumberFormat

FORMATS = {str(dtype).removeprefix("torch."): code for dtype, code in backend_triton._FORMAT_CODES.items()}
STORED = ("*fp32", "*i16", "*i16")
POINTERS = {
    "H": "*fp32", "m": "*fp32", "starts": "*i64", "place": "*i64", "keys": "*i32", "table": "*fp32", "ints": "*i64",
    "floats": "*fp32", "coefficients": "*fp32", "probe_ints": "*i64", "mu": "*fp32",
}  # fmt: skip
INEXACT = r"\bfma\b|approx|\.full|ftz"


def ptx_of(function: Any, constants: dict[str, Any], options: dict[str, Any]) -> str:
    stored = STORED[constants["FORMAT"]]
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, stored) for name in function.arg_names}
    source = ASTSource(function, signature, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return re.sub(r"//.*", "", code)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(code: str, operations: set[str]) -> None:
    """Every operation is correctly rounded by itself, and those that are needed are there."""
    assert not re.findall(INEXACT, code)
    assert operations <= set(re.findall(r"(\w+)\.rn\.f32", code))
    # An operation without a rounding mode may be contracted by the assembler later.
    assert not re.findall(r"\b(?:add|sub|mul)\.f32", code)


@pytest.mark.slow
def test_every_format_and_rule_of_the_dispatcher_is_compiled() -> None:
    assert set(FORMATS) == set(NumberFormat)
    assert set(backend_triton._RULE_CODES) == set(FUSED)


@pytest.mark.parametrize("distribution", Distribution)
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("rule", backend_triton._RULE_CODES)
@pytest.mark.slow
def test_compiled_rounds_neither_fuse_nor_approximate(
    rule: str, number_format: str, distribution: Distribution
) -> None:
    constants = {
        "FORMAT": FORMATS[number_format], "RULE": backend_triton._RULE_CODES[rule],
        "GAUSSIAN": distribution is Distribution.GAUSSIAN, "TILE": kernels_cuda.TILE,
    }  # fmt: skip
    scaling = set() if rule == "decomfl" else {"div", "sqrt"}
    check(ptx_of(kernels_cuda.apply, constants, kernels_cuda.OPTIONS), {"mul", "add", "sub", *scaling})


@pytest.mark.parametrize("probed", [True, False], ids=["probe", "no probe"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("distribution", Distribution)
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.slow
def test_compiled_points_neither_fuse_nor_approximate(
    number_format: str, distribution: Distribution, scaled: bool, probed: bool
) -> None:
    constants = {
        "FORMAT": FORMATS[number_format], "SCALED": scaled, "GAUSSIAN": distribution is Distribution.GAUSSIAN,
        "PROBED": probed, "TILE": kernels_cuda.TILE,
    }  # fmt: skip
    scaling = {"div", "sqrt"} if scaled else set()
    check(ptx_of(kernels_cuda.displace, constants, kernels_cuda.OPTIONS), {"mul", "add", "sub", *scaling})


@pytest.mark.slow
def test_the_check_sees_what_the_default_options_do() -> None:
    constants = {"FORMAT": 0, "RULE": 0, "GAUSSIAN": True, "TILE": kernels_cuda.TILE}
    assert re.findall(INEXACT, ptx_of(kernels_cuda.apply, constants, {"enable_fp_fusion": True, "num_warps": 4}))
