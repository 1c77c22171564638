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


def adam_step(settings: Settings, outputs: int, inputs: int) -> Case:
    """Adam's moments take the gradient in, and its direction."""
    x_OI, first_OI, second_OI = (settings.normal(outputs, inputs) for _ in range(3))
    second_OI = second_OI.square()
    updates, usable = torch.tensor(10.0, device=settings.device), torch.tensor(True, device=settings.device)
    betas, eps = (0.9, 0.95), 1e-8
    beta1, beta2 = betas

    def error(op: Op) -> tuple[float, float]:
        x, first, second = x_OI.double(), first_OI.double(), second_OI.double()
        first, second = beta1 * first + (1 - beta1) * x, beta2 * second + (1 - beta2) * x.square()
        ahead = beta1 * first / (1 - beta1**12) + (1 - beta1) * x / (1 - beta1**11)
        direction = ahead / ((second / (1 - beta2**11)).sqrt() + eps)
        found = op(x_OI, first_OI, second_OI, updates, usable, betas=betas, eps=eps)
        return max(worst(x, y) for x, y in zip(found, (direction, first, second), strict=True)), 1e-5

    def elementwise() -> tuple[Tensor, Tensor, Tensor]:
        first, second = torch.lerp(x_OI, first_OI, beta1), torch.lerp(x_OI.square(), second_OI, beta2)
        first, second = torch.where(usable, first, first_OI), torch.where(usable, second, second_OI)
        steps = updates + usable
        root = (second / (1 - beta2**steps)).sqrt_().add_(eps)
        ahead = first * (beta1 / (1 - beta1 ** (steps + 1))) + x_OI * ((1 - beta1) / (1 - beta1**steps))
        return ahead.div_(root), first, second

    elements = outputs * inputs
    return Case(
        "adam_scale", f"{outputs} x {inputs}", 24 * elements, 16 * elements,
        lambda op: op(x_OI, first_OI, second_OI, updates, usable, betas=betas, eps=eps), error,
        {"elementwise": elementwise},
    )  # fmt: skip
