from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="this build of torch has no triton; the CUDA build does")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fedapps.zeroth_order import kernels_cuda

STORED = ("*fp32", "*i16", "*i16")
POINTERS = {
    "H": "*fp32", "m": "*fp32", "starts": "*i64", "place": "*i64", "keys": "*i32", "table": "*fp32", "ints": "*i64",
    "floats": "*fp32", "coefficients": "*fp32", "probe_ints": "*i64", "mu": "*fp32",
}  # fmt: skip


def ptx_of(function: Any, constants: dict[str, Any], options: dict[str, Any]) -> str:
    stored = STORED[constants["FORMAT"]]
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, stored) for name in function.arg_names}
    source = ASTSource(function, signature, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return re.sub(r"//.*", "", code)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


INEXACT = r"\bfma\b|approx|\.full|ftz"


@pytest.mark.parametrize(
    ("number_format", "rule", "gaussian"),
    [(0, 1, True), (1, 2, True), (2, 1, False)],
    ids=["float32 hiso", "bfloat16 momentum", "float16 hiso rademacher"],
)
def test_compiled_rounds_neither_fuse_nor_approximate(number_format: int, rule: int, gaussian: bool) -> None:
    constants = {"FORMAT": number_format, "RULE": rule, "GAUSSIAN": gaussian, "TILE": kernels_cuda.TILE}
    code = ptx_of(kernels_cuda.apply, constants, kernels_cuda.OPTIONS)
    assert not re.findall(INEXACT, code)
    assert {"div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "add.rn.f32"} <= set(re.findall(r"\w+\.rn\.f32", code))
    # An operation without a rounding mode may be contracted by the assembler later.
    assert not re.findall(r"\b(?:add|sub|mul)\.f32", code)


def test_compiled_points_neither_fuse_nor_approximate() -> None:
    constants = {
        "FORMAT": 0, "SCALED": True, "GAUSSIAN": True, "PROBED": True, "TILE": kernels_cuda.TILE
    }  # fmt: skip
    code = ptx_of(kernels_cuda.displace, constants, kernels_cuda.OPTIONS)
    assert not re.findall(INEXACT, code)
    assert "div.rn.f32" in code


def test_the_check_sees_what_the_default_options_do() -> None:
    constants = {"FORMAT": 0, "RULE": 0, "GAUSSIAN": True, "TILE": kernels_cuda.TILE}
    assert re.findall(INEXACT, ptx_of(kernels_cuda.apply, constants, {"enable_fp_fusion": True, "num_warps": 4}))
