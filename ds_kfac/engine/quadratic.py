"""Steps whose rate and momentum follow from a quadratic model of the loss, with the exact Fisher matrix.

    d_1 the K-FAC gradient, d_2 the last update          on the layers' owners
    J d_i = (f(w + eps d_i) - f(w)) / eps                 one more forward each, on this rank's micro-batches
    M_ij = mean over ranks and micro-batches of (J d_i)^T H (J d_j)         H of the loss in the prediction f
    w += learning rate (w_1 d_1 + w_2 d_2)                :mod:`ds_kfac.update.kfac`

Finite differences need forwards only, so they go through whatever DeepSpeed has made of the model: weights gathered at
stage 3, linears with a backward of their own, activation checkpointing. A forward is repeated with the random numbers
of the first one, and leaves the buffers as they were.

**The loss.** Its curvature in the model's prediction does not depend on the labels: L(z) = phi(z) - <z, T(labels)>, so
its Hessian is that of phi, the Fisher matrix in the prediction (Martens 2020, arXiv:1412.1193, sec. 9.2), and

    L(z + d) - L(z) = <dL/dz, d> + phi(z + d) - phi(z) - <phi'(z), d>

needs the gradient, which a backward has brought, but no labels. Predictions z are fp32 [.., C], those of
convolutions with C moved to the end, [N, 1] where there is but N; the losses are those of ``monte_carlo.py``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ds_kfac.comm.message import deliver
from ds_kfac.model.batch import BatchInfo, own_hook
from ds_kfac.model.loss import class_dim
from ds_kfac.model.samplers import mean_of_terms, prediction_tensor
from ds_kfac.step.draft import Draft
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.kfac import QuadraticModel, adapted
from ds_kfac.update.state import LastUpdate
from ds_kfac.zero.weights import Pieces, WeightShift


def product(loss: str, z: Tensor, u: Tensor, v: Tensor, batch: BatchInfo) -> Tensor:
    """u^T H v of a loss, named as ``factor.sampler``, at the prediction z; a scalar."""
    if loss == "mse":
        return 2 * (u * v).mean()
    if loss == "squared_error":
        return 2 * mean_of_terms((u * v).sum(-1), batch)
    p = z.softmax(dim=-1)
    return mean_of_terms((p * u * v).sum(-1) - (p * u).sum(-1) * (p * v).sum(-1), batch)


def excess(loss: str, z: Tensor, d: Tensor, batch: BatchInfo) -> Tensor:
    """phi(z + d) - phi(z) - <phi'(z), d>, a scalar."""
    if loss != "cross_entropy":  # of second degree
        return product(loss, z, d, d, batch) / 2
    p = z.log_softmax(dim=-1)
    # log sum p exp(d) is phi(z + d) - phi(z), and exact where d is small
    return mean_of_terms(torch.logsumexp(p + d, dim=-1) - (p.exp() * d).sum(-1), batch)


ADAPTED_EVERY = 5
"""Steps from one comparison of the loss with the prediction to the next, each of which takes one more forward."""
EPSILON = 1e-3
"""Norm of a shift over that of the weights: large enough for fp32, small enough for a straight line."""


@dataclass
class Forward:
    """One micro-batch.

    Attributes:
        random: states of the generators before it.
        outputs: dimension of a term's outputs in what the model returns.
        prediction: f, fp32, without its graph, [.., C].
        gradient: of the loss with respect to it.
    """

    arguments: tuple
    keywords: Mapping[str, Any]
    info: BatchInfo
    random: tuple[Tensor, ...]
    outputs: int = field(init=False)
    prediction: Tensor = field(init=False)
    gradient: Tensor = field(init=False)

    def terms(self, of_prediction: Tensor) -> Tensor:
        """As ``prediction`` is."""
        found = of_prediction.detach().float()
        return found.movedim(self.outputs, -1) if found.ndim > 1 else found[:, None]

    def differentiated(self, gradient: Tensor) -> None:
        self.gradient = self.terms(gradient)


class QuadraticSteps:
    """Of an engine with one domain, in fp32."""

    def __init__(self, kfac: KFACPreconditioner, engine: Any) -> None:
        self.kfac, self.engine = kfac, engine
        factor, modules = kfac.config.factor, dict(engine.module.named_modules())
        self.loss = factor.sampler
        self.shift = WeightShift(kfac.layout, kfac.exchange)
        self._forwards: list[Forward] = []
        self._repeated: Tensor | None = None
        model, predicting = engine.module, modules[factor.prediction or ""]
        self._handles = [
            model.register_forward_pre_hook(own_hook(model, self._begin), with_kwargs=True),
            predicting.register_forward_hook(own_hook(predicting, self._end)),
        ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._forwards.clear()

    # what the training's forwards leave

    def _begin(self, module: Any, arguments: tuple, keywords: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            info, device = self.kfac.capture.read_batch(arguments, keywords), self.kfac.device
            own = () if device.type == "cpu" else (torch.get_device_module(device).get_rng_state(device),)
            self._forwards.append(Forward(arguments, keywords, info, (torch.get_rng_state(), *own)))

    def _end(self, module: Any, inputs: tuple, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or not module.training:
            return
        prediction = prediction_tensor(output)
        if not torch.is_grad_enabled():
            self._repeated = prediction
            return
        if prediction.requires_grad and self._forwards:
            forward = self._forwards[-1]
            forward.outputs = class_dim(prediction)
            forward.prediction = forward.terms(prediction)
            prediction.register_hook(forward.differentiated)

    @torch.no_grad()
    def step(self) -> Draft:
        """Replace every layer's gradient by what the optimizer has to step along. Collective."""
        kfac = self.kfac
        self._forwards = [forward for forward in self._forwards if hasattr(forward, "gradient")]
        draft = kfac.prepare()
        begins = kfac.config.damping.kind == "adaptive" and kfac.damping_scale is None
        kfac.precondition(draft, self._mean_curvature(draft) if begins else None)
        local = draft.local
        last = {name: state.moments.update_OI for name, state in local.states.items()}
        with torch.autocast(kfac.device.type, enabled=False), kfac.metrics.stage("relayout"):
            size = self.shift.squared_norm().to(kfac.device)
            # of weights that every rank has whole, each adds its share
            local.numbers.append(size if self.shift.chunked else size * kfac.plan.workers / kfac.channel.world)
            table, totals = kfac.totals(draft)
            (first, own), (second, own_last) = self.shift.part(local.results), self.shift.part(last)
            d_1, d_2, numbers = deliver((first, second, totals), kfac.channel, kfac.device)
            directions = self.shift.pieces(own, d_1), self.shift.pieces(own_last, d_2)
            (b_1, b_2, D_11, D_12, D_22, size), _ = kfac.summed(draft, table.read(numbers))
        steps = EPSILON * size.sqrt() / torch.stack([D_11, D_22]).sqrt()
        M = self._fisher(directions, torch.where(torch.isfinite(steps), steps, torch.zeros_like(steps)))
        model = QuadraticModel(
            torch.stack([b_1, b_2]).double(), M, torch.stack([D_11, D_12, D_12, D_22]).double().view(2, 2)
        )
        damping = torch.tensor(kfac.config.damping.at(draft.step), device=kfac.device)
        w = model.weights(damping if draft.damping_scale is None else damping * draft.damping_scale)
        draft.quadratic, (w_1, w_2) = (model, w), w.float()
        with kfac.metrics.stage("relayout"):
            self.shift.write({at: -(w_1 * piece + w_2 * directions[1][at]) for at, piece in directions[0].items()})
        for name, update in last.items():
            moments = LastUpdate(w_1 * local.results[name] + w_2 * update)
            local.states[name] = replace(local.states[name], moments=moments)
        return draft

    def _mean_curvature(self, draft: Draft) -> Tensor:
        """The mean Fisher eigenvalue over all parameters of layers that have eigenbases. Collective."""
        kfac, sums = self.kfac, torch.zeros(2, device=self.kfac.device)
        for layer in kfac.owned:
            if basis := draft.states[layer.name].basis:
                mean = basis.G.values.mean() * basis.A.values.mean()
                sums += torch.stack([mean, torch.ones_like(mean)]) * (layer.numel / kfac.plan.workers)
        total, count = kfac.channel.sum(sums)
        return total / count.clamp(min=1.0)

    def _fisher(self, directions: tuple[Pieces, Pieces], steps: Tensor) -> Tensor:
        """M, over all ranks. Collective: a forward may gather weights."""
        derivatives = []
        for pieces, step in zip(directions, steps, strict=True):
            with self.shift.by(pieces, step):
                moved = [self._repeat(forward) for forward in self._forwards]
            divisor = torch.where(step > 0, step, torch.ones_like(step))
            before = [forward.prediction for forward in self._forwards]
            derivatives.append([(z - f) / divisor for z, f in zip(moved, before, strict=True)])
        total = torch.zeros(4, dtype=torch.float64, device=self.kfac.device)
        for forward, u, v in zip(self._forwards, *derivatives, strict=True):
            pairs = (u, u), (u, v), (v, u), (v, v)
            products = [product(self.loss, forward.prediction, x, y, forward.info) for x, y in pairs]
            total += torch.stack(products).double()
        return self._mean(total).view(2, 2)

    def _mean(self, total: Tensor) -> Tensor:
        """Over ranks and micro-batches, as the engine averages gradients."""
        return self.kfac.channel.sum(total) / (self.kfac.channel.world * len(self._forwards))

    def _repeat(self, forward: Forward) -> Tensor:
        """The prediction with the weights of now."""
        model, device = self.engine.module, self.kfac.device
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
            torch.set_rng_state(forward.random[0])
            if device.type != "cpu":
                torch.get_device_module(device).set_rng_state(forward.random[1], device)
            model(*forward.arguments, **forward.keywords)
        for buffer, value in buffers:
            buffer.copy_(value)
        assert self._repeated is not None
        found, self._repeated = forward.terms(self._repeated), None
        return found

    @contextmanager
    def compared(self, draft: Draft) -> Iterator[None]:
        """Around DeepSpeed's step and the commit: damping follows how well the model predicted. Collective."""
        rate = self.kfac.layout.optimizer.param_groups[0]["lr"]
        try:
            yield
            if self.kfac.config.damping.kind == "adaptive" and self.kfac.steps == draft.step + 1:
                self._adapt(draft, rate)
        finally:
            self._forwards.clear()

    @torch.no_grad()
    def _adapt(self, draft: Draft, rate: Tensor | float) -> None:
        kfac = self.kfac
        if kfac.steps % ADAPTED_EVERY or draft.quadratic is None or kfac.damping_scale is None:
            return
        (model, w), total = draft.quadratic, torch.zeros(1, dtype=torch.float64, device=kfac.device)
        for forward in self._forwards:
            d = self._repeat(forward) - forward.prediction
            slope = (forward.gradient * d).sum() * self.engine.gradient_accumulation_steps()
            total += (slope + excess(self.loss, forward.prediction, d, forward.info)).double()
        actual, predicted = self._mean(total)[0], model.change(w * rate)
        kfac.damping_scale = adapted(kfac.damping_scale, actual=actual, predicted=predicted, steps=ADAPTED_EVERY)
