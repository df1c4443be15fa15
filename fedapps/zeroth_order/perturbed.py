"""A torch function mode that lends every use of a parameter a displaced copy, for as long as the operation runs.

Any torch function that receives a tracked parameter is called with the displaced tensor in its place; the parameter
itself is never written, so it is bitwise as before whatever is raised in between, and tied or shared parameters are
displaced alike wherever they are used. Only one operation's tensors are materialised at a time. Of a lookup (an
embedding, or rows of a weight by index) only the rows that are touched are.

Random masks are switched off on the way: functional dropout ignores `eval()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from fedapps.zeroth_order.errors import ProbeError

_METADATA = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_signed",
        "is_contiguous", "is_pinned", "is_shared", "is_inference", "element_size", "storage_offset", "get_device",
        "__len__", "__hash__", "requires_grad_",
    }
)  # fmt: skip
"""Functions that do not read a tensor's elements."""

_ELEMENT_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
"""Properties that do; all others are about the tensor."""

_MASKS: dict[Callable[..., Any], tuple[int, str, object]] = {
    **{
        getattr(F, name): (2, "training", False)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    },
    **{
        getattr(torch, name + ending): (2, "train", False)
        for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
        for ending in ("", "_")
    },
    F.multi_head_attention_forward: (13, "training", False),
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.rrelu: (3, "training", False),
}
"""Function that draws a mask -> place, name and value of the argument that switches it off."""

_IN_PLACE_OPERATORS = frozenset(
    {
        f"__i{name}__"
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
    }
    | {"__setitem__", "__set__"}
)


class Displace(Protocol):
    """Materialises a tracked parameter: all of it, or some rows."""

    def __call__(self, name: str, rows: NDArray[np.int64] | None = None) -> torch.Tensor:
        """Give the displaced parameter, or rows of its first dimension (None for all), not requiring gradients."""


class Perturbed(TorchFunctionMode):
    """Lend displaced parameters to every torch function called inside, and switch dropout off.

    Args:
        parameters: Name -> parameter, each once.
        displace: Materialises one; None leaves the parameters as they are.

    Attributes:
        used: Names of the parameters whose elements were read.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], displace: Displace | None) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._displace = displace
        self.used: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function; see the class."""
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _MASKS:
            args, named = _without_mask(*_MASKS[func], args, named)
        if not self._holds((args, named)) or _reads_no_elements(func, name):
            return func(*args, **named)
        self._refuse_writes(name, args, named)
        looked_up = self._look_up(func, name, args, named)
        if looked_up is not None:
            return looked_up
        return func(*self._lend(args), **self._lend(named))

    def _holds(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return id(value) in self._names
        if isinstance(value, (tuple, list)):
            return any(self._holds(item) for item in value)
        return isinstance(value, dict) and any(self._holds(item) for item in value.values())

    def _lend(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if id(value) in self._names else value
        if isinstance(value, (tuple, list)) and self._holds(value):
            lent = [self._lend(item) for item in value]
            return type(value)(*lent) if hasattr(value, "_fields") else type(value)(lent)
        if isinstance(value, dict):
            return {key: self._lend(item) for key, item in value.items()}
        return value

    def _tensor(self, parameter: torch.Tensor, rows: NDArray[np.int64] | None = None) -> torch.Tensor:
        name = self._names[id(parameter)]
        self.used.add(name)
        if self._displace is not None:
            return self._displace(name, rows)
        return parameter if rows is None else parameter[torch.from_numpy(rows).to(parameter.device)]

    def _refuse_writes(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS
        if (in_place and args and self._holds(args[0])) or self._holds(named.get("out")):
            written = args[0] if in_place else named["out"]
            raise ProbeError(
                f"parameter '{self._names.get(id(written), '?')}'",
                expected="a forward pass that does not change it",
                got=f"a call of '{name}'",
                do="do not write to trainable parameters in forward, or freeze this one",
            )

    def _look_up(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Serve lookups of rows by the touched rows only; None if this is no such call."""
        if func is F.embedding:
            ids, weight = (_argument(args, named, place, key) for place, key in ((0, "input"), (1, "weight")))
            if _argument(args, named, 3, "max_norm") is not None:
                raise ProbeError(
                    "embedding", expected="no max_norm", got="one", do="it rewrites the weight in every forward"
                )
        elif name == "__getitem__" and len(args) == 2 and _is_index(args[1]):
            weight, ids = args
        elif name == "index_select" and _argument(args, named, 1, "dim") == 0:
            weight, ids = args[0], _argument(args, named, 2, "index")
        else:
            return None
        if id(weight) not in self._names or not _is_index(ids) or self._holds(ids):
            return None
        touched, inverse = torch.unique(ids % weight.shape[0] if name == "__getitem__" else ids, return_inverse=True)
        return self._tensor(weight, touched.cpu().numpy().astype(np.int64))[inverse]


def _without_mask(
    place: int, key: str, off: object, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > place:
        return (*args[:place], off, *args[place + 1 :]), named
    return args, {**named, key: off}


def _reads_no_elements(func: Callable[..., Any], name: str) -> bool:
    if name != "__get__":
        return name in _METADATA
    descriptor = getattr(func, "__self__", None)
    of = getattr(descriptor, "__name__", None) or getattr(getattr(descriptor, "fget", None), "__name__", "")
    return of not in _ELEMENT_PROPERTIES


def _argument(args: tuple[Any, ...], named: dict[str, Any], place: int, key: str) -> Any:
    return args[place] if len(args) > place else named.get(key)


def _is_index(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() > 0
