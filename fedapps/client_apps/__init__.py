"""Flower ClientApps: unpack and check, call the mathematics, pack.

``app`` dispatches on the setting ``method``. Clients of one's own import the helpers: `fedapps.client_apps.fedpm` for
FedPM around an existing training loop, `fedapps.client_apps.store` for state that persists.
"""

from fedapps.client_apps.app import app

__all__ = ["app"]
