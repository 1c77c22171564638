"""What of a save is for whom in this run: which factors continue, which start empty and why."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from ds_kfac.assignment.factor_spec import FactorSpec, factors_by_layer, key_of
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.step.preconditioner import KFACPreconditioner


def kinds_of(config: KFACConfig) -> dict[str, str]:
    """What A and G are second moments of. Averages of different kinds must not be mixed."""
    options = config.factor
    sampled = f" of {options.sampler}" if options.fisher == "monte_carlo" else ""
    return {"A": options.weight_sharing, "G": f"{options.fisher}{sampled}, {options.weight_sharing}"}


@dataclass(frozen=True)
class Match:
    """A domain's factors and layers in a save; the same on all of its ranks.

    Attributes:
        names: layer -> name in checkpoints.
        specs: the factors of this run.
        keys: factor -> what it is called in the save; of those that continue.
        restarted: factors of layers in the save that start empty.
        incomplete: those and their partners, which are decomposed together as soon as the former have data.
        unknown: layers that the save does not have.
        kinds: of this run.
        moments: kind that this run keeps.
    """

    names: Mapping[str, str]
    specs: tuple[FactorSpec, ...]
    keys: Mapping[str, str]
    restarted: tuple[str, ...]
    incomplete: frozenset[str]
    unknown: tuple[str, ...]
    kinds: Mapping[str, str]
    moments: str | None

    def warnings(self, header: Mapping[str, Any]) -> list[str]:
        """What is not continued."""
        texts = []
        if self.unknown:
            texts.append(f"has no state for {', '.join(self.unknown)}; these layers start empty")
        for side in "AG":
            keys = [key for key in self.restarted if key[-1] == side]
            if keys:
                why = f"saved: {header['kinds'][side]}; now: {self.kinds[side]}"
                if header["kinds"][side] == self.kinds[side]:
                    why = "the saved run kept none"
                texts.append(
                    f"{', '.join(keys)} start empty ({why}); until their first batch arrives the saved eigenbases "
                    "stay in use"
                )
        if self.moments is not None and header["moments"] != self.moments:
            texts.append(f"has no {self.moments} moments; they start at zero: expect some steps to recover")
        return texts


def match(kfac: KFACPreconditioner, header: Mapping[str, Any]) -> Match:
    """Of a domain, with the groups of layers that share their input as in the save."""
    names, kinds = saved_names(kfac), kinds_of(kfac.config)
    specs = kfac.plan.sharing(groups_here(kfac, header) or ()).assignment.factors
    leader = {name: group[0] for group in header["shared"] or () for name in group}
    stacked = {layer.shares for layer in kfac.layers}
    keys, restarted = {}, []
    for spec in specs:
        name, side = names[spec.layers[0]], spec.key[-1]
        if name not in header["layers"]:
            continue
        saved = key_of(leader.get(name, name) if side == "A" else name, side)
        if side == "A" and spec.key[:-2] in stacked:
            saved = _of_stack(saved, header["factors"])
        if saved in header["factors"] and header["kinds"][side] == kinds[side]:
            keys[spec.key] = saved
        else:
            restarted.append(spec.key)
    of_layer = factors_by_layer(specs)
    incomplete = {
        partner.key
        for spec in specs
        if spec.key in restarted
        for name in spec.layers
        for partner in of_layer[name].values()
    }
    return Match(
        names,
        specs,
        keys,
        tuple(restarted),
        frozenset(incomplete),
        tuple(name for name in names.values() if name not in header["layers"]),
        kinds,
        None if kfac.moments is None else kfac.moments.NAME,
    )


def saved_names(kfac: KFACPreconditioner) -> dict[str, str]:
    """Layer name -> name in checkpoints."""
    return {layer.name: kfac.target.domain.global_name(layer) for layer in kfac.layers}


def groups_here(kfac: KFACPreconditioner, header: Mapping[str, Any]) -> tuple[tuple[str, ...], ...] | None:
    """Groups of the saved run that this one may have too; those of this run, which go on being checked, if the saved
    one did not know any yet; None if they are still to be found."""
    if header["shared"] is None or not kfac.plan.shares:
        return kfac.known.groups
    candidates, names = kfac.plan.sharing_candidates, saved_names(kfac)
    here = {names[name]: name for name in candidates}
    groups = (tuple(here[name] for name in group if name in here) for group in header["shared"])
    return tuple(group for group in groups if len(group) > 1 and len({candidates[name] for name in group}) == 1)


def _of_stack(key: str, saved: Container[str]) -> str:
    """The saved A of a stack of experts, where this run's are another part of the mixture's: the tokens that enter are
    of one kind, so that of the nearest expert before these is theirs. ``key``: where there is none."""
    stack, _, number = key[:-2].rpartition(".")
    numbers = range(int(number), -1, -1) if number.isdigit() else ()
    return next((other for n in numbers if (other := key_of(f"{stack}.{n}", "A")) in saved), key)
