"""The states of a rank's layers, with eigenbases that have arrived."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ds_kfac.curvature.forms import FactorForm
from ds_kfac.model.layers import LayerSpec
from ds_kfac.step.draft import FactorDraft
from ds_kfac.step.factors import FactorUpdates
from ds_kfac.update.layer_state import LayerState
from ds_kfac.update.moments import Moments


def empty_states(
    layers: Sequence[LayerSpec], device: torch.device, moments: type[Moments] | None, form: FactorForm
) -> dict[str, LayerState]:
    """Nothing seen yet."""
    return {layer.name: LayerState.empty(layer, device, moments=moments, form=form) for layer in layers}


def with_new_bases(
    states: Mapping[str, LayerState], layers: Sequence[LayerSpec], curvature: FactorUpdates, draft: FactorDraft
) -> dict[str, LayerState]:
    """Of ``layers``, with what the step has brought: eigenbases, and numbers of loss terms where there were any."""
    new = dict(states)
    for layer in layers:
        state, keys = states[layer.name], curvature.of_layer.get(layer.name, {})
        terms = curvature.terms_of(layer, draft)
        if terms is not None:
            state = replace(state, terms=torch.where(terms > 0, terms, state.terms))
        bases = {side: draft.bases[spec.key] for side, spec in keys.items() if spec.key in draft.bases}
        new[layer.name] = state.rebased(**bases) if bases else state
    return new
