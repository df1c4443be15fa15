r"""FedCLUP's client (arXiv 2410.08934): ``K`` warm-started steps on its own loss with a pull to the model received.

.. math:: w_i \leftarrow w_i - \eta\,(\nabla L_i(w_i) + \lambda (w_i - w))

It sends the difference ``w - w_i`` as the change since its last folded reply, which it keeps in its store together with
``w_i``. In a round of local fits it starts from ``w``, and adds the scalars from which the server chooses ``lambda``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.personal_models import Begun, Descent, Kept, PersonalModel, load_personal, save_personal
from fedapps.client_apps.problem import Pull, Trained, local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.messages.plans import CURVATURE, AskedCurvature, RoundPlan, fit_metrics
from fedapps.messages.schema import METRICS, STORE_LOST, Arrays
from fedapps.personalization.fedclup import Stale, personal_names, send
from fedapps.personalization.proximal import pulled_step


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of FedCLUP.

    Args:
        work: The round.

    Returns:
        The content of the reply: the changes of the personal tensors' differences, the other tensors, and the buffers.
    """
    plan, problem = RoundPlan.from_entries(work.config), local_problem(work)
    begun = begin(work, problem.names)
    start, pull = begun.descents[0]

    metrics = {}
    if plan.curvature is AskedCurvature.FOR_GAMMA:
        metrics[CURVATURE] = problem.largest_curvature(work.arrays, list(pull.anchor))
    elif plan.curvature is AskedCurvature.ROUGHLY:
        metrics[CURVATURE] = problem.rough_curvature(work.arrays, list(pull.anchor))
    if plan.fitting:
        trained, fit = problem.fit(work.arrays, pull)
        metrics |= fit_metrics(fit)
    else:
        trained = problem.descend(start, pull)
    return end(work, begun, [trained], metrics)


def begin(work: ClientWork, names: Sequence[str]) -> Begun:
    """Say what is to be trained: the personal model, with a pull of the personal ones of ``names`` to the received."""
    own, plan = work.settings.own, RoundPlan.from_entries(work.config)
    received = {name: work.arrays[name] for name in personal_names(names, own.patterns)}
    pull = Pull(received, plan.lam, pulled_step(work.lr, plan.lam, own.personal_lr))
    kept = load_personal(work)
    return Begun(kept, (Descent(kept.model, pull),))


def end(work: ClientWork, begun: Begun, trained: Sequence[Trained], metrics: Mapping[str, float]) -> RecordDict:
    """Keep the personal model, and pack the changes of its differences, the other tensors, and the buffers."""
    kept, (model,), received = begun.kept, trained, begun.descents[0].pull.anchor
    own, plan = work.settings.own, RoundPlan.from_entries(work.config)
    stale = Stale.REPLIES if plan.fitting else Stale(own.stale)
    personal = {name: model.arrays[name] for name in received}
    sent = send(received, personal, _known(kept, plan, stale), stale)

    # The buffers go with the model that they belong to, which is a client's own only if all of it is.
    buffers = model.buffers if personal.keys() == model.arrays.keys() else {}
    known = None if stale is Stale.REPLIES else sent.known
    save_personal(work, PersonalModel({**personal, **buffers}, known, plan.generation))
    content = reply({**model.arrays, **sent.message}, model.buffers, work, model.loss)
    lost = {STORE_LOST: 1.0} if kept.lost else {}
    content.metric_records[METRICS].update({**lost, **metrics})
    return content


def _known(kept: Kept, plan: RoundPlan, stale: Stale) -> Arrays | None:
    """Give what the server's sum holds of this client: nothing of an older generation, or of another round's replies."""
    if stale is Stale.REPLIES or kept.generation != plan.generation:
        return None
    return kept.known
