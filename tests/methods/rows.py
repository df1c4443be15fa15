"""The methods that the common tests run: those of the registry, and any of one's own that ``FEDAPPS_TEST_METHODS`` names."""

from __future__ import annotations

import os

from fedapps.methods import METHODS, Method, get_method

OWN = os.environ.get("FEDAPPS_TEST_METHODS", "").split()
"""Such as ``my_pkg.my_mod:METHOD``, apart by blanks; see docs/extending.md."""

ROWS: dict[str, Method] = {row.name: row for row in METHODS} | {name: get_method(name) for name in OWN}
"""Value of the setting ``method`` -> row."""
