r"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) through peft: they train and travel, the model is frozen.

.. math:: W x + \frac{\alpha}{r} B A x, \qquad A \in R^{r \times n},\ B \in R^{m \times r},\ B = 0 \text{ at the start}
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fedapps.errors import TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_adapters(model: PreTrainedModel, rank: int, alpha: float, targets: tuple[str, ...]) -> None:
    """Freeze a model and put adapters beside some of its linear layers, in place.

    The adapters are float32, whatever the model is. ``A`` is drawn from torch's global generator.

    Args:
        model: A causal language model.
        rank: Rank of the adapters, at least 1.
        alpha: Their scale times the rank.
        targets: Endings of the layers' names; empty for those that peft takes for the model's family.

    Raises:
        TaskError: peft is not installed, or there are no such layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise TaskError(
            "task option 'lora-rank'", expected="the package peft", got=str(error), do="install fedapps[llm]"
        ) from error
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft divides it by the rank, whatever number it is
        lora_dropout=0.0,
        target_modules=list(targets) or None,
    )
    try:
        with warnings.catch_warnings():
            # peft finds out by itself which way GPT-2's layers lie, and says so each time.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise TaskError(
            "task option 'lora-targets'",
            expected="endings of names of linear layers of the model, separated by commas",
            got=f"{', '.join(targets) or 'nothing'} ({error})",
            do="name layers, for example q_proj,v_proj",
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
