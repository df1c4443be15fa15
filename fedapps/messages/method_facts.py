"""What a strategy tells the ClientApps of another project of its method, as entries of ``config``.

In a run of this package both ends have the run config. A project of one's own has another, so the strategy, which knows the
settings, says with each message what its clients must know too; two places for one number could differ.

==============  ====================================================================================================
entry           content
==============  ====================================================================================================
``method``      name of the method
``version``     of this package on the server; defaults may differ between two
``own``         the method's own settings that are not at their default, in JSON; absent where the server has none
other           numbers of one method: ``seed`` and ``local-steps`` of HiSo and its relatives
==============  ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import fedapps
from fedapps.errors import MessageError, SettingsError
from fedapps.messages.schema import Entries
from fedapps.settings import SettingsModel, key_of

METHOD = "method"
VERSION = "version"
OWN = "own"
SEED = "seed"
LOCAL_STEPS = "local-steps"

Own = TypeVar("Own", bound=SettingsModel)


def tell_method(method: str, own: SettingsModel | None = None, **numbers: int) -> Entries:
    """Give the entries.

    Args:
        method: Name of the method.
        own: Its own settings, if the server has them.
        **numbers: Further entries, with ``_`` for ``-``.

    Returns:
        Key -> value.
    """
    entries: Entries = {METHOD: method, VERSION: fedapps.__version__}
    if own is not None:
        entries[OWN] = own.model_dump_json(exclude_defaults=True)
    return entries | {key_of(name): value for name, value in numbers.items()}


def check_method(entries: Mapping[str, Any], *methods: str) -> str:
    """Check that the server's strategy is of a client's method, and the server of its version.

    Args:
        entries: The message's ``config``.
        *methods: What the client can do.

    Returns:
        The method.

    Raises:
        MessageError: It is another one, or none of this package.
    """
    method, version = entries.get(METHOD), entries.get(VERSION)
    if method not in methods:
        raise MessageError(
            "server's message, entry 'method'",
            expected=" or ".join(methods) + ", which this client is written for",
            got=repr(method) if method else "none, as from another strategy",
            do="take the strategy of that method from fedapps.strategies on the server, or the helper of the strategy's"
            " method on the clients",
        )
    if version != fedapps.__version__:
        raise MessageError(
            "server's message, entry 'version'",
            expected=f"fedapps {fedapps.__version__} as on this client",
            got=f"fedapps {version}",
            do="install the same version on every machine",
        )
    return str(method)


def read_own(entries: Mapping[str, Any], kind: type[Own], given: Mapping[str, Any]) -> Own:
    """Read the method's own settings: the server's, or those given on the client where the server has none.

    Args:
        entries: The message's ``config``.
        kind: Class of the settings.
        given: Field -> value, as the client's author wrote them.

    Returns:
        The settings.

    Raises:
        SettingsError: A given value is wrong, or not the server's.
        MessageError: The entry cannot be read.
    """
    if OWN not in entries:
        return kind(**given)
    try:
        told = kind.model_validate_json(str(entries[OWN]), strict=False)
    except ValueError as error:
        raise MessageError(
            f"server's message, entry '{OWN}'",
            expected="the method's own settings as JSON",
            got=repr(entries[OWN])[:200],
            do="run the same version of fedapps on both ends",
        ) from error
    kind(**given)
    for name, value in given.items():
        if value != getattr(told, name):
            raise SettingsError(
                f"'{name}' on the client",
                expected=f"{getattr(told, name)!r} as on the server, or nothing",
                got=repr(value),
                do="give it to the strategy only, which tells the clients",
            )
    return told
