"""The ServerApp of every method: it parses the settings, opens the run folder, and runs."""

from __future__ import annotations

import os
from logging import getLogger
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedapps.compute import pinned
from fedapps.methods import resolve_settings
from fedapps.results.run_folder import RunFolder
from fedapps.server_apps.run import run
from fedapps.settings import Settings

logger = getLogger("flwr")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that the run config names.

    Args:
        grid: Flower's grid.
        context: Flower's context of the server.

    Raises:
        FedAppsError: The run failed; its folder says why.
    """
    settings = resolve_settings(context.run_config)
    folder = open_run_folder(settings)
    logger.info("run folder: %s", folder.path)
    with folder.locked(), pinned(settings.compute_threads):
        run(grid, settings, folder)
    logger.info("run folder: %s", folder.path)


def open_run_folder(settings: Settings) -> RunFolder:
    """Open the run folder that the settings name, or make a new one.

    Args:
        settings: The settings.

    Returns:
        The folder ``run-dir``; without it a new one in ``$FEDAPPS_RUNS`` or ``~/fedapps-runs``.

    Raises:
        CheckpointError: ``run-dir`` holds another run, or holds none to resume.
    """
    if settings.run_dir:
        path = Path(settings.run_dir)
        return RunFolder.open(path) if settings.resume else RunFolder.claim(path)
    root = Path(os.environ.get("FEDAPPS_RUNS", Path.home() / "fedapps-runs"))
    return RunFolder.create(root, method=settings.method, task=settings.task, seed=settings.seed)
