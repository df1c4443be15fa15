"""Second-order mathematics: curvature blocks, local Newton-type steps, and mixing on the server. Knows no Flower.

================  ==============================================================================  ======
module            subject                                                                         torch
================  ==============================================================================  ======
``foof``          FOOF blocks and local steps of a torch model                                    yes
``gram``          a covariance as rows or as matrix, and dividing by it                           yes
``layers``        layer types that have a block, and how to add one                               yes
``convolutions``  rows of convolutions, and their covariance without unfolding                    yes
``blocks``        what a client sends for a block, in every form                                  no
``newton``        full-Hessian steps of a convex model                                            no
``logistic``      L2-regularised logistic regression                                              no
``layout``        which parameters share a block, and a block as one matrix                       no
``mixing``        preconditioned mixing from running sums                                         no
``packing``       a symmetric matrix as its upper triangle                                        no
``solve``         Cholesky with rising damping                                                    no
================  ==============================================================================  ======

The names below are loaded on first use, so that a server that only mixes imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedapps.curvature.blocks import Block, WireDtype, check_block
    from fedapps.curvature.foof import Estimate, FoofPreconditioner
    from fedapps.curvature.gram import covariance, precondition
    from fedapps.curvature.layers import model_layout, register_layer
    from fedapps.curvature.layout import BlockSpec, Layout, from_matrix, layout_from_json, to_matrix
    from fedapps.curvature.logistic import LogisticRegression
    from fedapps.curvature.mixing import (
        BlockSums,
        add_block,
        mix_block,
        start_block,
    )
    from fedapps.curvature.newton import Objective, minimise, newton_steps
    from fedapps.curvature.packing import pack_upper, triangle_size, unpack_upper
    from fedapps.curvature.solve import solve_spd

_MODULES = {
    "blocks": ("Block", "WireDtype", "check_block"),
    "foof": ("Estimate", "FoofPreconditioner"),
    "gram": ("covariance", "precondition"),
    "layers": ("model_layout", "register_layer"),
    "layout": ("BlockSpec", "Layout", "from_matrix", "layout_from_json", "to_matrix"),
    "logistic": ("LogisticRegression",),
    "mixing": (
        "BlockSums",
        "add_block",
        "mix_block",
        "start_block",
    ),
    "newton": ("Objective", "minimise", "newton_steps"),
    "packing": ("pack_upper", "triangle_size", "unpack_upper"),
    "solve": ("solve_spd",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Block",
    "BlockSpec",
    "BlockSums",
    "Estimate",
    "FoofPreconditioner",
    "Layout",
    "LogisticRegression",
    "Objective",
    "WireDtype",
    "add_block",
    "check_block",
    "covariance",
    "from_matrix",
    "layout_from_json",
    "minimise",
    "mix_block",
    "model_layout",
    "newton_steps",
    "pack_upper",
    "precondition",
    "register_layer",
    "solve_spd",
    "start_block",
    "to_matrix",
    "triangle_size",
    "unpack_upper",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedapps.curvature' has no attribute '{name}'")
    return getattr(import_module(f"fedapps.curvature.{_HOMES[name]}"), name)
