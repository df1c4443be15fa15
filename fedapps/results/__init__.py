"""The run folder: settings, metrics, the ledger of bytes, checkpoints, reports and figures."""
