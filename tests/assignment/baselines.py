"""Simpler assignments, to compare with. Whole layers; a shared factor goes with the first layer
that has it."""

from ds_kfac.assignment.assign import Assignment, column
from ds_kfac.assignment.costs import Work
from ds_kfac.model.layers import LayerSpec


def round_robin(work: Work, workers: int = 1) -> Assignment:
    """Layers in module order to columns in turn, their factors to the ranks of a column in turn."""
    columns = work.world // workers
    homes = {}
    for index, layer in enumerate(work.layers):
        ranks = column(index % columns, world=work.world, workers=workers)
        homes[layer.name] = (ranks, ranks[index // columns % workers])
    return _whole_layers(work, homes, list(work.layers))


def kaisa_greedy(work: Work, workers: int = 1) -> Assignment:
    """KAISA's (Pauloski et al. 2021): layers in descending n_A^3 + n_G^3 to the column with the
    least of it, their factors to its least loaded rank. Preconditioning, and where gradients are,
    do not count."""
    columns = [
        column(index, world=work.world, workers=workers) for index in range(work.world // workers)
    ]
    cubes = [0] * work.world
    homes = {}

    def cube(layer: LayerSpec) -> int:
        return layer.A.dim**3 + layer.G.dim**3

    order = sorted(work.layers, key=cube, reverse=True)
    for layer in order:
        ranks = min(columns, key=lambda ranks: sum(cubes[rank] for rank in ranks))
        rank = min(ranks, key=lambda rank: cubes[rank])
        cubes[rank] += cube(layer)
        homes[layer.name] = (ranks, rank)
    return _whole_layers(work, homes, order)


def _whole_layers(
    work: Work, homes: dict[str, tuple[tuple[int, ...], int]], order: list[LayerSpec]
) -> Assignment:
    eigen_workers: dict[str, int] = {}
    for layer in order:
        for factor in work.used[layer.name]:
            eigen_workers.setdefault(factor.key, homes[layer.name][1])
    return Assignment(work, {name: ranks for name, (ranks, _) in homes.items()}, eigen_workers)
