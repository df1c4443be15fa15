"""Flower ClientApps: unpack and check, call the mathematics, pack.

``app`` dispatches on the setting ``method``. A client has the file name of its strategy, and is written against
`fedapps.client_apps.problem.LocalProblem`. Clients of one's own import the helpers: `fedapps.client_apps.fedpm` for
FedPM around an existing training loop, `fedapps.client_apps.store` for state that persists.
"""

from fedapps.client_apps.app import app

__all__ = ["app"]
