"""Model -> the layers K-FAC preconditions, and everything it leaves alone with the reason."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ds_kfac.layers.base import LayerSpec, parameter_shape
from ds_kfac.layers.registry import LAYERS
from ds_kfac.ops.functional import packed_numel


@dataclass(frozen=True)
class Skipped:
    """A module with parameters of its own that K-FAC does not touch; its gradients pass through."""

    name: str
    kind: str
    numel: int
    reason: str


@dataclass(frozen=True)
class Scan:
    layers: tuple[LayerSpec, ...]
    skipped: tuple[Skipped, ...]


def scan(
    model: nn.Module,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    max_dim: int | None = None,
    optimized: Iterable[nn.Parameter] | None = None,
) -> Scan:
    """Find the layers, in module order. Pure: reads shapes and flags, never values.

    Args:
        max_dim: longest side of a layer's matrix; None: any.
        optimized: the optimizer's parameters; None: all that require a gradient.
        include: regexes searched in module names; if any are given, only matching modules are taken.
        exclude: regexes searched in module names; matching modules are left alone.

    Raises:
        ValueError: a pattern that matches no module with parameters (a typing error that would silently
            change what is trained), or no layer left to precondition.
    """
    include, exclude = tuple(include), tuple(exclude)
    modules = {name: module for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    _check_patterns(modules, include, exclude)
    uses = Counter(id(p) for module in modules.values() for p in module.parameters(recurse=False))
    inside_attention = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    trained = {id(p) for p in (model.parameters() if optimized is None else optimized) if p.requires_grad}
    layers, skipped = [], []
    for name, module in modules.items():
        kind, reason = _kind(module)
        if reason is None:
            reason = _unfit(name, module, uses, inside_attention, include, exclude, trained)
        if reason is None:
            spec = _spec(name, kind, module, trained)
            reason = _too_large(spec, max_dim)
        if reason is None:
            layers.append(spec)
        else:
            numel = sum(_numel(p) for p in module.parameters(recurse=False))
            skipped.append(Skipped(name, type(module).__name__, numel, reason))
    if not layers:
        raise ValueError(
            f"kfac: {type(model).__name__} has no layer to precondition (known types: {', '.join(LAYERS)}); "
            "check kfac.layers.include and kfac.layers.exclude. Left alone: "
            + ("; ".join(f"{s.name} ({s.kind}): {s.reason}" for s in skipped[:8]) or "no module has parameters")
        )
    return Scan(tuple(layers), tuple(skipped))


def _numel(parameter: nn.Parameter) -> int:
    numel = 1
    for size in parameter_shape(parameter):
        numel *= size
    return numel


def _kind(module: nn.Module) -> tuple[str, str | None]:
    """The type's name and None, or "" and why no type takes this module."""
    reasons = []
    for kind, layer_type in LAYERS.items():
        reason = layer_type.refusal(module)
        if reason is None:
            return kind, None
        if reason:
            reasons.append(reason)
    return "", "; ".join(reasons) or "no K-FAC layer type for it"


def _unfit(name, module, uses, inside_attention, include, exclude, trained) -> str | None:
    """Why a module of a known type is left alone, or None."""
    if include and not any(re.search(pattern, name) for pattern in include):
        return "not matched by kfac.layers.include"
    for pattern in exclude:
        if re.search(pattern, name):
            return f"matched by kfac.layers.exclude {pattern!r}"
    if not module.weight.requires_grad:
        return "weight is frozen"
    if id(module.weight) not in trained:
        return "weight is not among the optimizer's parameters"
    if uses[id(module.weight)] > 1 or (module.bias is not None and uses[id(module.bias)] > 1):
        return "weight is tied to another module; its gradient is a sum over both uses"
    if id(module) in inside_attention:
        return "called as a function by nn.MultiheadAttention, its hooks never fire"
    return None


def _spec(name: str, kind: str, module: nn.Module, trained: set[int]) -> LayerSpec:
    in_features, out_features = LAYERS[kind].features(module)
    prefix = f"{name}." if name else ""
    bias = f"{prefix}bias" if id(module._parameters.get("bias")) in trained else None
    return LayerSpec(name, kind, in_features, out_features, f"{prefix}weight", bias)


def _too_large(spec: LayerSpec, max_dim: int | None) -> str | None:
    side = max(spec.dim_A, spec.dim_G)
    if max_dim is None or side <= max_dim:
        return None
    gigabytes = 4 * packed_numel(side) / 1e9
    return f"a side of {side} is over kfac.factor.max_dim {max_dim}; its factor would take {gigabytes:.1f} GB"


def _check_patterns(modules: dict[str, nn.Module], include: tuple[str, ...], exclude: tuple[str, ...]) -> None:
    for key, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in modules):
                raise ValueError(
                    f"kfac.layers.{key}: pattern {pattern!r} matches no module with parameters; names look like: "
                    + ", ".join(list(modules)[:6])
                )
