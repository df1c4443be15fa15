"""Tests of ``fedapps/methods/__init__.py``."""

from __future__ import annotations

import subprocess
import sys


def test_listing_the_methods_imports_neither_torch_nor_flower() -> None:
    code = "import sys, fedapps.methods; sys.exit(', '.join({'torch', 'flwr', 'scipy'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)
