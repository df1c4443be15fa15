"""``fedapps advise``: what FedCLUP should be set to on a task."""

from __future__ import annotations

from fedapps.cli import common
from fedapps.simulation.advise import advise as advise_fedclup


def advise(
    task: common.TaskOption = None,
    clients: common.ClientsOption = 10,
    partition: common.PartitionOption = None,
    alpha: common.AlphaOption = None,
    config: common.ConfigOption = None,
    set_: common.SetOption = None,
    device: common.DeviceOption = None,
    data_dir: common.DataOption = None,
) -> None:
    """Say what FedCLUP should be set to on a task, from one cheap round of local fits."""
    options = {
        "task": task, "partition": partition, "alpha": alpha, "device": device,
        "data-dir": data_dir,
    }  # fmt: skip
    with common.told() as console:
        values = common.gather(options, config, set_)
        advice = advise_fedclup(values, clients)
        lines = advice.lines() + (["", advice.command(values)] if advice.report.decided else [])
        for line in lines:
            console.print(line, soft_wrap=True)
