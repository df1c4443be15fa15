"""The package's lazy names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedapps.curvature


def test_every_public_name_resolves() -> None:
    assert sorted(fedapps.curvature._HOMES) == fedapps.curvature.__all__
    assert all(hasattr(fedapps.curvature, name) for name in fedapps.curvature.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fooof'"):
        fedapps.curvature.fooof  # noqa: B018


def test_the_server_side_imports_neither_torch_nor_flower() -> None:
    """Other tests have imported torch by now, so a new interpreter looks."""
    code = (
        "import sys\n"
        "from fedapps.curvature import BlockSpec, add_block, mix_block, newton_steps, LogisticRegression, unpack_upper\n"
        "sys.exit(', '.join({'torch', 'flwr'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
