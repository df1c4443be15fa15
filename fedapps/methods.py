"""The registry: one row a method. Adding a method is adding a row.

A row names its strategy and its client as ``module:attribute``, so that listing the methods imports neither torch nor
the strategies. A method of one's own is a `Method` in one's own module, given as ``method = "my_pkg.my_mod:METHOD"``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedapps import settings as settings_module
from fedapps.errors import SettingsError, explain
from fedapps.first_order_settings import FedAdagradSettings, FedAvgMSettings, FedOptSettings, FedProxSettings
from fedapps.personal_settings import DittoSettings, FedClupSettings, LocalTrainSettings, PFedMeSettings
from fedapps.second_order_settings import FedPMSettings, SecondOrderSettings
from fedapps.settings import Scalar, Settings
from fedapps.zeroth_order_settings import DeComFLSettings, HiSoMomentumSettings, HiSoSettings, ProbeSettings


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the registry.

    Attributes:
        name: Value of the setting ``method``.
        title: Name as the literature writes it.
        family: ``second order``, ``first order``, ...
        mixing: What the server does with the replies.
        travels_down: What a sampled client receives.
        travels_up: What it sends.
        client_state: What a client keeps over rounds.
        paper: Source, with arXiv id.
        strategy: ``module:class`` of the server's strategy, built with ``from_settings``.
        client: ``module:function`` that trains one client for one round.
        evaluate: ``module:function`` that measures the models of one client; ``""`` measures the global model.
        layout: ``module:function`` that names the tensors which a task's model would have preconditioned; ``""`` for
            methods without curvature.
        group: Prefix of the method's own keys; ``""`` if it has none or takes them from ``method-options``.
        own_settings: Class of the method's own settings, or None.
        task_kinds: Kinds of task that the method can train.
        replicas: Whether ends hold replicas that draw the same directions: kernels are compared in the handshake, and the
            run folder holds a journal.
        tuned: Task name (or ``convex`` or ``torch``, by kind of task) -> values for the keys that are ``"auto"``.
    """

    name: str
    title: str
    family: str
    mixing: str
    travels_down: str
    travels_up: str
    client_state: str
    paper: str
    strategy: str
    client: str
    evaluate: str = ""
    layout: str = ""
    group: str = ""
    own_settings: type | None = None
    task_kinds: tuple[str, ...] = ("torch", "convex")
    replicas: bool = False
    tuned: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)

    def load_strategy(self) -> Any:
        """Import the strategy class.

        Returns:
            The class that ``strategy`` names.

        Raises:
            SettingsError: It cannot be imported.
        """
        return load_object(self.strategy, what=f"strategy of method '{self.name}'")

    def load_client(self) -> Any:
        """Import the client function.

        Returns:
            The function that ``client`` names.

        Raises:
            SettingsError: It cannot be imported.
        """
        return load_object(self.client, what=f"client of method '{self.name}'")

    def load_evaluate(self) -> Any:
        """Import the function that measures the models of one client.

        Returns:
            The function that ``evaluate`` names; None if clients measure the global model only.

        Raises:
            SettingsError: It cannot be imported.
        """
        return load_object(self.evaluate, what=f"evaluation of method '{self.name}'") if self.evaluate else None

    def preconditioned(self, task: Any) -> tuple[str, ...]:
        """Name the tensors that this method would precondition.

        Args:
            task: The task.

        Returns:
            Parameter names; none for methods without curvature.
        """
        if not self.layout:
            return ()
        names: tuple[str, ...] = load_object(self.layout, what=f"layout of method '{self.name}'")(task)
        return names


_EVERY_TASK: Mapping[str, Scalar] = {
    "partition": "dirichlet", "partition-column": "", "client-test-fraction": 0.0, "client-validation-fraction": 0.0,
    "client-evaluation": "none", "local-steps": 0,
}  # fmt: skip
_OWN_CLIENTS: Mapping[str, Scalar] = {"partition": "column", "partition-column": "client", "client-test-fraction": 0.0}

TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {**_EVERY_TASK, "weighting": "uniform", "local-epochs": 1, "batch-size": 0, "validation-fraction": 0.0},
    "torch": {**_EVERY_TASK, "weighting": "examples", "local-epochs": 5, "batch-size": 32, "validation-fraction": 0.1},
    "synthetic-linear": _OWN_CLIENTS,
    "synthetic-logistic": _OWN_CLIENTS,
}
"""Kind of task -> values of the shared keys that are ``"auto"``, for every method that says nothing else.

Task -> values that the task asks for, whatever the method says for its kind.
"""

_SECOND_ORDER_TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {"lr": 1.0, "damping": 0.0},
    "torch": {"lr": 0.1, "damping": 0.1},
    # At 0.1 FedPM diverged in round 3 on the CIFAR-10 subset (10 clients, alpha 0.1).
    "cifar10": {"lr": 0.03},
    "cifar100": {"lr": 0.03},
}

_FIRST_ORDER_TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {"lr": 1.0},
    "torch": {"lr": 0.3},
    "mnist": {"lr": 0.1},
    "cifar10": {"lr": 0.1},
    "cifar100": {"lr": 0.1},
}
_ADAPTIVE_TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {"lr": 1.0, "server-lr": 0.1, "tau": 1e-3},
    "torch": {"lr": 0.1, "server-lr": 0.03, "tau": 1e-3},
    "digits": {"lr": 0.3},
}

_ZEROTH_ORDER: Mapping[str, Scalar] = {
    "weighting": "uniform", "local-steps": 1, "batch-size": 64, "num-probes": 5,
}  # fmt: skip

_PERSONAL: Mapping[str, Scalar] = {"client-evaluation": "every", "client-test-fraction": 0.2}


def _personal_tuned(
    convex: Mapping[str, Scalar], torch: Mapping[str, Scalar], **tasks: Mapping[str, Scalar]
) -> Mapping[str, Mapping[str, Scalar]]:
    """Complete the tuned values of a personalised method: clients hold out data for their own models."""
    held = {"validation-fraction": 0.0, "client-validation-fraction": 0.1}
    return {"convex": {**_PERSONAL, "local-epochs": 10, **convex}, "torch": {**_PERSONAL, **held, **torch}, **tasks}


METHODS: tuple[Method, ...] = (
    Method(
        name="fedpm",
        title="FedPM",
        family="second order",
        mixing="preconditioned: (sum p_i P_i)^-1 sum p_i P_i theta_i",
        travels_down="model",
        travels_up="P_i (upper triangles) and P_i (theta_i - theta)",
        client_state="none",
        paper="Federated Preconditioned Mixing, AAAI 2026, arXiv 2511.09100",
        strategy="fedapps.strategies.fedpm:FedPM",
        client="fedapps.client_apps.second_order:train_fedpm",
        layout="fedapps.client_apps.second_order:preconditioned_names",
        group="fedpm",
        own_settings=FedPMSettings,
        tuned=_SECOND_ORDER_TUNED,
    ),
    Method(
        name="localnewton",
        title="LocalNewton",
        family="second order",
        mixing="simple mean of theta_i",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="Gupta et al. 2021, arXiv 2105.07320",
        strategy="fedapps.strategies.localnewton:LocalNewton",
        client="fedapps.client_apps.second_order:train_localnewton",
        layout="fedapps.client_apps.second_order:preconditioned_names",
        group="localnewton",
        own_settings=SecondOrderSettings,
        tuned=_SECOND_ORDER_TUNED,
    ),
    Method(
        name="fedavg",
        title="FedAvg",
        family="first order",
        mixing="simple mean of theta_i (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="McMahan et al., AISTATS 2017, arXiv 1602.05629",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.first_order:train",
        tuned=_FIRST_ORDER_TUNED,
    ),
    Method(
        name="fedavgm",
        title="FedAvgM",
        family="first order",
        mixing="mean of theta_i, then a step with momentum (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="Hsu, Qi & Brown 2019, arXiv 1909.06335",
        strategy="fedapps.strategies.fedavgm:FedAvgM",
        client="fedapps.client_apps.first_order:train",
        group="fedavgm",
        own_settings=FedAvgMSettings,
        tuned={
            "convex": {"lr": 1.0, "server-lr": 1.0, "momentum": 0.9},
            "torch": {"lr": 0.1, "server-lr": 1.0, "momentum": 0.7},
            "digits": {"lr": 0.2},
        },
    ),
    Method(
        name="fedprox",
        title="FedProx",
        family="first order",
        mixing="simple mean of theta_i (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="Li et al., MLSys 2020, arXiv 1812.06127",
        strategy="fedapps.strategies.fedprox:FedProx",
        client="fedapps.client_apps.first_order:train_fedprox",
        group="fedprox",
        own_settings=FedProxSettings,
        tuned={task: {**values, "mu": 0.01} for task, values in _FIRST_ORDER_TUNED.items()},
    ),
    *(
        Method(
            name=title.lower(),
            title=title,
            family="first order",
            mixing=f"mean of theta_i, then an adaptive step ({step}; Flower's own strategy)",
            travels_down="model",
            travels_up="model",
            client_state="none",
            paper="Reddi et al., ICLR 2021, arXiv 2003.00295",
            strategy=f"fedapps.strategies.fedopt:{title}",
            client="fedapps.client_apps.first_order:train",
            group=title.lower(),
            own_settings=own,
            tuned=_ADAPTIVE_TUNED,
        )
        for title, step, own in (
            ("FedAdam", "Adam", FedOptSettings),
            ("FedYogi", "Yogi", FedOptSettings),
            ("FedAdagrad", "Adagrad", FedAdagradSettings),
        )
    ),
    Method(
        name="fedclup",
        title="FedCLUP",
        family="personalised",
        mixing="w - gamma lambda sum p_i (w - w_i), over the last known differences of all clients",
        travels_down="model",
        travels_up="change of w - w_i since the last folded reply",
        client_state="personal model w_i, last folded w - w_i",
        paper="Yu et al., ICML 2025, arXiv 2410.08934",
        strategy="fedapps.strategies.fedclup:FedCLUP",
        client="fedapps.client_apps.fedclup:train",
        evaluate="fedapps.client_apps.personal_models:evaluate",
        group="fedclup",
        own_settings=FedClupSettings,
        tuned=_personal_tuned({"lr": 0.4, "lambda": 0.3}, {"lr": 0.3, "lambda": 0.05}),
    ),
    Method(
        name="pfedme",
        title="pFedMe",
        family="personalised",
        mixing="(1 - beta) w + beta mean of w_i",
        travels_down="model",
        travels_up="w_i, the client's copy of the model",
        client_state="personal model theta_i",
        paper="Dinh et al., NeurIPS 2020, arXiv 2006.08848",
        strategy="fedapps.strategies.pfedme:PFedMe",
        client="fedapps.client_apps.personalized:train_pfedme",
        evaluate="fedapps.client_apps.personal_models:evaluate",
        group="pfedme",
        own_settings=PFedMeSettings,
        tuned=_personal_tuned({"lr": 0.4, "lambda": 0.3, "eta": 1.0}, {"lr": 0.3, "lambda": 0.3, "eta": 1.0}),
    ),
    Method(
        name="ditto",
        title="Ditto",
        family="personalised",
        mixing="simple mean of w_i (FedAvg)",
        travels_down="model",
        travels_up="w_i, the client's copy of the model",
        client_state="personal model v_i",
        paper="Li et al., ICML 2021, arXiv 2012.04221",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.personalized:train_ditto",
        evaluate="fedapps.client_apps.personal_models:evaluate",
        group="ditto",
        own_settings=DittoSettings,
        tuned=_personal_tuned({"lr": 0.4, "lambda": 0.3}, {"lr": 0.3, "lambda": 0.1}),
    ),
    Method(
        name="localtrain",
        title="LocalTrain",
        family="personalised",
        mixing="none",
        travels_down="nothing",
        travels_up="metrics",
        client_state="personal model w_i",
        paper="baseline: every client alone",
        strategy="fedapps.strategies.localtrain:LocalTrain",
        client="fedapps.client_apps.personalized:train_localtrain",
        evaluate="fedapps.client_apps.personal_models:evaluate",
        group="localtrain",
        own_settings=LocalTrainSettings,
        tuned=_personal_tuned({"lr": 0.4}, {"lr": 0.3}),
    ),
    Method(
        name="globaltrain",
        title="GlobalTrain",
        family="personalised",
        mixing="simple mean of theta_i (FedAvg)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="baseline: McMahan et al., AISTATS 2017, arXiv 1602.05629, measured on every client's own data",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.first_order:train",
        evaluate="fedapps.client_apps.personal_models:evaluate_global",
        tuned=_personal_tuned({"lr": 0.4}, {"lr": 0.3}),
    ),
    *(
        Method(
            name=title.lower(),
            title=title,
            family="zeroth order",
            mixing=f"mean of the scalars; every replica applies them: {rule}",
            travels_down="the journal's rounds since the last acknowledged one",
            travels_up="tau x P scalars",
            client_state="journal (kilobytes); the replica is a cache",
            paper=paper,
            strategy="fedapps.strategies.hiso:HiSo",
            client="fedapps.client_apps.zeroth_order:train",
            evaluate="fedapps.client_apps.zeroth_order:evaluate",
            group=title.lower(),
            own_settings=own,
            task_kinds=("torch",),
            replicas=True,
            tuned={"torch": {**_ZEROTH_ORDER, **tuned}},
        )
        for title, rule, paper, own, tuned in (
            (
                "HiSo",
                "theta - eta D, H learns D * D, z = u / sqrt(H)",
                "arXiv 2506.02370",
                HiSoSettings,
                {"lr": 0.03, "nu": 0.1},
            ),
            (
                "DeComFL",
                "theta - eta D",
                "Li et al., ICLR 2025, arXiv 2405.15861",
                DeComFLSettings,
                {"lr": 0.1},
            ),
            (
                "HiSo-Momentum",
                "theta - eta m, H as HiSo",
                "arXiv 2506.02370 (names it as an extension)",
                HiSoMomentumSettings,
                {"lr": 0.05, "nu": 0.1, "momentum": 0.5},
            ),
        )
    ),
    Method(
        name="fedzo",
        title="FedZO",
        family="zeroth order",
        mixing="simple mean of theta_i (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="Fang et al. 2022, arXiv 2201.09531",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.zeroth_order:train_fedzo",
        group="fedzo",
        own_settings=ProbeSettings,
        task_kinds=("torch",),
        tuned={"torch": {**_ZEROTH_ORDER, "lr": 0.1}},
    ),
)


def load_object(reference: str, *, what: str) -> Any:
    """Import an object by reference.

    Args:
        reference: ``module:attribute``.
        what: What it is, for the error message.

    Returns:
        The object.

    Raises:
        SettingsError: The module or the attribute does not exist.
    """
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            explain(
                what,
                expected="an importable module:attribute",
                got=f"{reference!r} ({error})",
                do="check the spelling and that its folder is on the Python path",
            )
        ) from error


def get_method(name: str) -> Method:
    """Look up a method.

    Args:
        name: Name of a built-in method, or ``my_pkg.my_mod:METHOD``.

    Returns:
        Its row.

    Raises:
        SettingsError: There is no such method.
    """
    if ":" in name:
        method = load_object(name, what=f"method '{name}'")
        if not isinstance(method, Method):
            raise SettingsError(
                explain(
                    f"method '{name}'",
                    expected="a fedapps.methods.Method",
                    got=type(method).__name__,
                    do="name the row, not the strategy",
                )
            )
        return method
    rows = {row.name: row for row in METHODS}
    if name not in rows:
        near = difflib.get_close_matches(name, rows, n=1)
        raise SettingsError(
            explain(
                "setting 'method'",
                expected="one of " + ", ".join(rows),
                got=repr(name),
                do=f"did you mean '{near[0]}'?" if near else "see `fedapps methods`",
            )
        )
    return rows[name]


def method_groups() -> dict[str, type]:
    """Map each group of method keys to its settings class."""
    return {row.group: row.own_settings for row in METHODS if row.group and row.own_settings}


def resolve_settings(run_config: Mapping[str, Any], task_kind: str | None = None) -> Settings:
    """Check a run config and fill in the values that are ``"auto"``.

    Args:
        run_config: Flat kebab-case keys.
        task_kind: ``torch`` or ``convex``; looked up from the task if not given.

    Returns:
        The settings of the run.

    Raises:
        SettingsError: As `fedapps.settings.parse`.
    """
    defaults = settings_module.default_config({})
    method = get_method(_text(run_config, "method", defaults))
    task = _text(run_config, "task", defaults)
    if task_kind is None:
        from fedapps.tasks import task_kind as kind_of

        task_kind = kind_of(task)
    if task_kind not in method.task_kinds:
        raise SettingsError(
            explain(
                f"method '{method.name}'",
                expected=f"a {' or '.join(method.task_kinds)} task",
                got=f"'{task}', a {task_kind} task",
                do="choose another task, such as digits-mlp, or another method",
            )
        )
    tuned = {
        **TUNED[task_kind], **method.tuned.get(task_kind, {}), **TUNED.get(task, {}), **method.tuned.get(task, {})
    }  # fmt: skip
    own = (
        set()
        if method.own_settings is None
        else {key.name for key in settings_module.keys_of(method.own_settings).values()}
    )
    return settings_module.parse(
        run_config,
        groups=method_groups(),
        group=method.group,
        own_class=method.own_settings,
        tuned={f"{method.group}.{k}" if method.group and k in own else k: v for k, v in tuned.items()},
    )


def _text(run_config: Mapping[str, Any], key: str, defaults: Mapping[str, Scalar]) -> str:
    value = run_config.get(key, defaults[key])
    if not isinstance(value, str):
        raise SettingsError(explain(f"setting '{key}'", expected="a name", got=repr(value), do="give it as a string"))
    return value
