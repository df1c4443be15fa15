r"""FedCLUP, pFedMe, Ditto and LocalTrain around a training loop of one's own.

.. math:: \theta_i \leftarrow \theta_i - \eta\,(g_i(\theta_i) + \lambda (\theta_i - w)) \qquad \text{by the project's optimizer}

Example:
    ::

        @app.train()
        def train(message, context):
            model, loader = Net(), load_data(context)
            with personal(message, context, model, "fedclup") as p:                   # added
                loss = fit(model, loader, lr=p.lr)
            content = p.reply(num_examples=len(loader.dataset), train_loss=loss)      # changed
            return Message(content, reply_to=message)

The gradient of the pull is added before each step of any torch optimizer that moves the model's parameters, inside the
context: nothing of the loop changes, also where gradients are accumulated, clipped or scaled, and nothing can be forgotten.
It is the step of `fedapps.personalization.torch_proximal.add_proximal_gradient`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from typing_extensions import override

from fedapps.client_apps import ditto, fedclup, localtrain, pfedme
from fedapps.client_apps.own_app import ModelAtHand, counted, entries_of, own_work
from fedapps.client_apps.personal_models import Begun, load_personal
from fedapps.client_apps.problem import Trained
from fedapps.client_apps.torch_problem import read_model
from fedapps.client_apps.work import ClientWork
from fedapps.errors import MessageError, SettingsError, TaskError
from fedapps.messages.method_facts import check_method
from fedapps.messages.plans import CURVATURE, AskedCurvature, RoundPlan
from fedapps.messages.schema import METRICS
from fedapps.personalization.pfedme import local_step
from fedapps.personalization.torch_proximal import add_proximal_gradient, largest_curvature
from fedapps.tasks.torch_arrays import array_tensor, load_module_arrays
from fedapps.tasks.torch_task import evaluation_mode

Batch = TypeVar("Batch")


class _Client(Protocol):
    """A method's client, as its module has it."""

    def begin(self, work: ClientWork, names: Sequence[str]) -> Begun: ...

    def end(
        self, work: ClientWork, begun: Begun, trained: Sequence[Trained], metrics: Mapping[str, float]
    ) -> RecordDict: ...


_CLIENTS: Mapping[str, _Client] = {"fedclup": fedclup, "pfedme": pfedme, "ditto": ditto, "localtrain": localtrain}


def personal(
    message: Message,
    context: Context,
    model: nn.Module,
    method: str,
    *,
    curvature_loss: Callable[[], Tensor] | None = None,
    **own: Any,
) -> Personal:
    """Begin a round of a personalised method with a loop of one's own.

    Args:
        message: The train message.
        context: Flower's context of the node.
        model: The project's model, built as on the server.
        method: ``fedclup``, ``pfedme``, ``ditto`` or ``localtrain``: that of the server's strategy.
        curvature_loss: FedCLUP with ``gamma-rule = theory``: computes the loss of the client's examples, or of some, at the
            model's present parameters, from which ``L`` is estimated once.
        **own: The method's own settings, such as ``lambda_`` (pFedMe, Ditto), ``eta`` and ``inner_steps`` (pFedMe). The
            server tells FedCLUP's.

    Returns:
        The context of the training.

    Raises:
        MessageError: The server's strategy is of another method, or of another version of this package.
        SettingsError: A setting is wrong, or not the server's.
        TaskError: The model is not the server's.
    """
    return Personal(_work_of(message, context, model, method, own), model, curvature_loss)


def personal_model(message: Message, context: Context, model: nn.Module, method: str) -> nn.Module:
    """Fill a model with the client's personal one, to be measured: the twin of `personal` for ``@app.evaluate``.

    Args:
        message: The evaluate message, whose arrays are the global model (LocalTrain: nothing).
        context: Flower's context of the node.
        model: The project's model.
        method: As for `personal`.

    Returns:
        The same model; before the client's first folded reply it is the global one.

    Raises:
        MessageError: As `personal`.
    """
    load_module_arrays(model, load_personal(_work_of(message, context, model, method, {})).model)
    return model


def _work_of(message: Message, context: Context, model: nn.Module, method: str, own: Mapping[str, Any]) -> ClientWork:
    if method not in _CLIENTS:
        raise SettingsError("method of the client", expected="one of " + ", ".join(_CLIENTS), got=repr(method))
    check_method(entries_of(message), method)
    return own_work(message, context, lambda seed: ModelAtHand(lambda: model, seed), method, given=own)


class Personal(AbstractContextManager["Personal"]):
    """The training of a client's models in one round, a context; `personal` makes it."""

    def __init__(self, work: ClientWork, model: nn.Module, curvature_loss: Callable[[], Tensor] | None) -> None:
        self._work, self._model = work, model
        self._method = str(work.settings.method)
        self._client = _CLIENTS[self._method]
        self._begun = self._client.begin(work, work.task.trainable_names())
        self._metrics = self._curvature(curvature_loss) if self._method == "fedclup" else {}
        self._results: list[Trained] = []
        self._open, self._descent = False, self._begun.descents[0]
        self._anchor: dict[str, Tensor] = {}
        self._num_pulled = self._num_copied = 0
        self._stack = ExitStack()

    # The context -----------------------------------------------------------------------------

    @override
    def __enter__(self) -> Self:
        """Load the first model to be trained, and pull from now on."""
        self._random = _random_state()
        self._start()
        handle = register_optimizer_step_pre_hook(self._before_step)
        self._stack.callback(handle.remove)
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            self._stop()

    def __iter__(self) -> Iterator[nn.Module]:
        """Give the model for each training of the round, filled: once; for Ditto twice, the second time as the personal model.

        Every training sees the same random numbers of torch, and so the same batches of a shuffled loader.
        """
        yield self._model
        while len(self._results) + 1 < len(self._begun.descents):
            self._stop()
            _set_random_state(self._random)
            self._start()
            yield self._model

    @property
    def lr(self) -> float:
        r"""Step for the optimizer, of the training that is going on: the ``lr`` that the server sends.

        With a pull :math:`1/(1/\text{lr} + \lambda)`, which is stable if ``lr`` is without; see
        `fedapps.personalization.proximal.pulled_step`.
        """
        pull = self._descent.pull
        lr = pull.step if pull.anchor else self._work.lr
        if math.isnan(lr):
            raise MessageError(
                "server's message, entry 'lr'",
                expected="the learning rate",
                got="none",
                do="pass train_config=ConfigRecord({'lr': ...}) to the strategy's start, or take a step of your own",
            )
        return lr

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Give the batches of a loader, for pFedMe each as often as there are inner steps; for other methods once.

        After the inner steps on a batch the local copy moves towards the personal model.

        Args:
            loader: The project's.

        Yields:
            Batches.
        """
        if self._method != "pfedme":
            yield from loader
            return
        config, parameters = pfedme.config_of(self._work), dict(self._model.named_parameters())
        for batch in loader:
            for _ in range(config.num_inner_steps):
                yield batch
            for name, w in self._anchor.items():
                theta = parameters[name].detach()
                self._anchor[name] = local_step(w.to(theta.device), theta, config.eta, config.lam)
            self._num_copied += 1

    def pull(self) -> None:
        r"""Add :math:`\lambda (\theta - w)` to the gradients: before a step that no torch optimizer takes."""
        self._pull(list(self._anchor))

    # The reply -------------------------------------------------------------------------------

    def reply(self, *, num_examples: int, train_loss: float, **metrics: float) -> RecordDict:
        """Keep the personal model, which takes effect once the server has folded the reply, and pack the reply.

        Args:
            num_examples: Examples that the client trained on.
            train_loss: Its training loss.
            **metrics: Further metrics, with ``_`` for ``-``.

        Returns:
            The content of the reply that the strategy expects.

        Raises:
            TaskError: A training of the round is missing.
        """
        self._stop()
        if len(self._results) < len(self._begun.descents):
            raise TaskError(
                f"helper of method '{self._method}'",
                expected=f"{len(self._begun.descents)} trainings: of the global model's copy, and of the personal model",
                got=f"{len(self._results)}",
                do="train inside `for model in p:`",
            )
        trained = [replace(one, loss=float(train_loss)) for one in self._results]
        if self._method == "pfedme":
            # Only the personal model sees data, and has the buffers.
            copy = {name: tensor.cpu().numpy() for name, tensor in self._anchor.items()}
            trained.insert(0, Trained(copy, trained[0].buffers, trained[0].loss))
        work = replace(self._work, data=counted(num_examples))
        content = self._client.end(work, self._begun, trained, self._metrics)
        values = {name.replace("_", "-"): float(value) for name, value in metrics.items()}
        content.metric_records[METRICS].update(values)
        return content

    # The training ----------------------------------------------------------------------------

    def _start(self) -> None:
        self._descent = self._begun.descents[len(self._results)]
        load_module_arrays(self._model, self._descent.start)
        parameters = dict(self._model.named_parameters())
        self._anchor = {name: array_tensor(w, parameters[name]) for name, w in self._descent.pull.anchor.items()}
        self._num_pulled, self._open = 0, True

    def _stop(self) -> None:
        """Read the model that was trained; nothing if it was read already."""
        if not self._open:
            return
        self._open = False
        if self._anchor and not self._num_pulled:
            raise TaskError(
                f"helper of method '{self._method}'",
                expected="steps of a torch optimizer that moves the model's parameters, inside the context",
                got="none, so that nothing pulled the personal model",
                do="train the model that was given to the helper; where no torch optimizer takes the steps, call"
                " p.pull() before each",
            )
        if self._method == "pfedme" and not self._num_copied:
            raise TaskError(
                "helper of method 'pfedme'",
                expected="the loop to take its batches from p.batches(loader), by which the local copy moves",
                got="a loop without it",
                do="write `for batch in p.batches(loader):`",
            )
        self._results.append(Trained(*read_model(self._model), math.nan))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Pull what the optimizer moves; where a closure computes the gradients, after it has."""
        moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(self._model.named_parameters())
        names = [name for name in self._anchor if id(parameters[name]) in moved]
        if not names:
            return None
        self_, *positional = args
        closure = positional[0] if positional else kwargs.get("closure")
        if closure is None:
            self._pull(names)
            return None

        def pulled() -> Any:
            loss = closure()
            self._pull(names)
            return loss

        if positional:
            return (self_, pulled, *positional[1:]), kwargs
        return args, {**kwargs, "closure": pulled}

    def _pull(self, names: Sequence[str]) -> None:
        parameters = dict(self._model.named_parameters())
        # The loop may have moved the model to another device.
        anchor = {name: self._anchor[name].to(parameters[name].device) for name in names}
        add_proximal_gradient(self._model, anchor, self._descent.pull.lam)
        self._num_pulled += 1

    def _curvature(self, loss: Callable[[], Tensor] | None) -> dict[str, float]:
        """Estimate ``L`` where FedCLUP's server step needs it, as the package's client does."""
        plan = RoundPlan.from_entries(self._work.config)
        if plan.fitting:
            raise SettingsError(
                "setting 'fedclup.adaptive'",
                expected="false with clients of one's own, whose loops fit no halves of the data",
                got="true",
                do="give the strategy a lambda",
            )
        if plan.curvature is not AskedCurvature.FOR_GAMMA:
            return {}
        if loss is None:
            raise SettingsError(
                "FedCLUP's server step",
                expected="curvature_loss on the client, since gamma-rule = theory needs the curvature of its loss",
                got="none",
                do="pass curvature_loss=lambda: criterion(model(x), y), or take FedClupSettings(gamma_rule='average') on the"
                " server",
            )
        load_module_arrays(self._model, self._work.arrays)
        parameters = dict(self._model.named_parameters())
        names = self._begun.descents[0].pull.anchor
        with evaluation_mode(self._model):
            return {CURVATURE: largest_curvature(loss, [parameters[name] for name in names])}


def _random_state() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
