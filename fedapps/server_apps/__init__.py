"""The Flower ServerApp: settings, strategy, run, results."""

from fedapps.server_apps.app import app

__all__ = ["app"]
