"""What is timed, of single layers: division by damped eigenvalues, Adam's step.

Shape suffixes: O and I the sides of a layer's matrix.
"""

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, Op, Settings, worst

DAMPING = 0.1


def scaling(settings: Settings, outputs: int, inputs: int) -> Case:
    """Divided by the Kronecker eigenvalues, with the inner product."""
    x_OI = settings.normal(outputs, inputs)
    values_O, values_I = settings.normal(outputs).abs(), settings.normal(inputs).abs()

    def error(op: Op) -> tuple[float, float]:
        scaled_OI, found = op(x_OI, values_O, values_I, DAMPING)
        wanted_OI = x_OI.double() / (torch.outer(values_O.double(), values_I.double()) + DAMPING)
        dot = (x_OI.double() * wanted_OI).sum()
        return max(worst(scaled_OI, wanted_OI), worst(found, dot)), 1e-5

    def elementwise() -> tuple[Tensor, Tensor]:
        scaled_OI = x_OI / (torch.outer(values_O, values_I) + DAMPING)
        return scaled_OI, (x_OI * scaled_OI).sum()

    elements = outputs * inputs
    return Case(
        "eigen_scale_dot", f"{outputs} x {inputs}", 8 * elements, 5 * elements,
        lambda op: op(x_OI, values_O, values_I, DAMPING), error, {"elementwise": elementwise},
    )  # fmt: skip


def corrected_scaling(settings: Settings, outputs: int, inputs: int) -> Case:
    """Divided by second moments that take the gradient in first."""
    x_OI, second_OI = settings.normal(outputs, inputs), settings.normal(outputs, inputs).abs()
    decay = torch.tensor(0.9, device=settings.device)

    def error(op: Op) -> tuple[float, float]:
        scaled_OI, found_OI, found_dot = op(x_OI, second_OI, decay, 1.0, DAMPING)
        moment_OI = decay.double() * second_OI.double() + (1 - decay.double()) * x_OI.double().square()
        wanted_OI = x_OI.double() / (moment_OI + DAMPING)
        dot = (x_OI.double() * wanted_OI).sum()
        found, wanted = (scaled_OI, found_OI, found_dot), (wanted_OI, moment_OI, dot)
        return max(worst(x, y) for x, y in zip(found, wanted, strict=True)), 1e-5

    def elementwise() -> tuple[Tensor, Tensor, Tensor]:
        moment_OI = torch.lerp(x_OI.square(), second_OI, decay)
        scaled_OI = x_OI / (moment_OI + DAMPING)
        return scaled_OI, moment_OI, (x_OI * scaled_OI).sum()

    elements = outputs * inputs
    return Case(
        "corrected_scale_dot", f"{outputs} x {inputs}", 16 * elements, 8 * elements,
        lambda op: op(x_OI, second_OI, decay, 1.0, DAMPING), error, {"elementwise": elementwise},
    )  # fmt: skip


def adam_step(settings: Settings, outputs: int, inputs: int, matrices: int = 1) -> Case:
    """Adam's direction of several matrices, with the gradient left waiting for the moments."""
    x_nOI, first_nOI, second_nOI = (settings.normal(matrices, outputs, inputs) for _ in range(3))
    second_nOI = second_nOI.square()
    updates = torch.full((matrices,), 10.0, device=settings.device)
    usable = torch.ones(matrices, dtype=torch.bool, device=settings.device)
    betas, eps = (0.9, 0.95), 1e-8
    beta1, beta2 = betas
    direction_nOI, waiting_nOI = torch.empty_like(x_nOI), torch.empty_like(x_nOI)
    given = direction_nOI, waiting_nOI, x_nOI, first_nOI, second_nOI, updates, usable

    def error(op: Op) -> tuple[float, float]:
        x, first, second = x_nOI.double(), first_nOI.double(), second_nOI.double()
        first, second = beta1 * first + (1 - beta1) * x, beta2 * second + (1 - beta2) * x.square()
        ahead = beta1 * first / (1 - beta1**12) + (1 - beta1) * x / (1 - beta1**11)
        wanted = ahead / ((second / (1 - beta2**11)).sqrt() + eps)
        op(*given, betas=betas, eps=eps)
        return max(worst(direction_nOI, wanted), worst(waiting_nOI, x)), 1e-5

    def elementwise() -> Tensor:
        first, second = torch.lerp(x_nOI, first_nOI, beta1), torch.lerp(x_nOI.square(), second_nOI, beta2)
        steps = (updates + usable)[:, None, None]
        root = (second / (1 - beta2**steps)).sqrt_().add_(eps)
        ahead = first * (beta1 / (1 - beta1 ** (steps + 1))) + x_nOI * ((1 - beta1) / (1 - beta1**steps))
        waiting_nOI.copy_(x_nOI)
        return ahead.div_(root)

    elements = matrices * outputs * inputs
    return Case(
        "adam_scale_", f"{matrices} x {outputs} x {inputs}", 20 * elements, 14 * elements,
        lambda op: op(*given, betas=betas, eps=eps), error, {"elementwise": elementwise},
    )  # fmt: skip
