"""What a server needs of the package imports no torch."""

from __future__ import annotations

import subprocess
import sys


def test_the_server_side_imports_neither_torch_nor_flower() -> None:
    """Other tests have imported torch by now, so a new interpreter looks."""
    code = (
        "import sys\n"
        "from fedapps.curvature import blocks, layout, line_search, logistic, mixing, newton, packing, solve\n"
        "sys.exit(', '.join({'torch', 'flwr'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
