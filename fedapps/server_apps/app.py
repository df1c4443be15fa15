"""The ServerApp of every method: it parses the settings, opens the run folder, and runs."""

from __future__ import annotations

import os
from logging import getLogger
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedapps.compute import pinned
from fedapps.methods import resolve_settings
from fedapps.results.log_copy import SentRunFolder
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
    if isinstance(folder, SentRunFolder):
        folder.send_start()
    logger.info("run folder: %s", folder.path)
    settings = settings.model_copy(update={"run_dir": str(folder.path)})
    with folder.locked(), pinned(settings.compute_threads):
        try:
            run(grid, settings, folder)
        except Exception:
            _send_rest(folder)
            raise
        _send_rest(folder)  # Not after a stop: then nobody listens any more.
    logger.info("run folder: %s", folder.path)


def _send_rest(folder: RunFolder) -> None:
    if isinstance(folder, SentRunFolder):
        folder.send_rest()


def open_run_folder(settings: Settings) -> RunFolder:
    """Open the run folder that the settings name, or make a new one.

    Args:
        settings: The settings. With ``collect-mb``, ``run-dir`` of a new run is a folder of the command that follows it: this
            app uses it where it has it before it, too, and else sends what it writes in one of its own.

    Returns:
        The folder ``run-dir``; without it a new one in ``$FEDAPPS_RUNS`` or ``~/fedapps-runs``.

    Raises:
        CheckpointError: ``run-dir`` holds another run, or holds none to resume.
    """
    given = RunFolder(Path(settings.run_dir)) if settings.run_dir else None
    sends = settings.collect_mb > 0 and not (given and given.is_followed())
    if given is not None and settings.resume:
        folder = RunFolder.open(given.path)
    elif given is not None and not sends:
        folder = RunFolder.claim(given.path)
    else:
        root = Path(os.environ.get("FEDAPPS_RUNS", Path.home() / "fedapps-runs"))
        folder = RunFolder.create(root, method=settings.method, task=settings.task, seed=settings.seed)
    return SentRunFolder(folder.path, most=1e6 * settings.collect_mb) if sends else folder
