"""Monte-Carlo Fisher in an engine: training untouched, what is sampled, errors."""

import pytest
import torch
from torch.nn import functional as F

from ds_kfac.model.sampled_loss import mean_of_terms
from tests.close import close, exact
from tests.deepspeed.features import merged
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, micro_batches, patched, train, weights
from tests.deepspeed.said import error_of
from tests.deepspeed.test_calls import Called
from tests.models import cross_entropy, make_net
from tests.ops.specification import symmetric_pack
from tests.ranks import of_ranks

pytestmark = pytest.mark.ranks(1)
FACTOR = {"rows": "all", "update_interval": 1, "fisher": "monte_carlo"}
DRAWN = {"factor": FACTOR, "preconditioner": {"kl_clip": 0}, "damping": {"value": 1.0}}
SAMPLED = {
    "factor": {**FACTOR, "update_interval": 2, "prediction": "head"},
    "eigenbasis": {"refresh_interval": 2},
    "burn_in": {"steps": 0},
    "layers": {"exclude": ["first", "middle"]},
    "preconditioner": {"kl_clip": 0},
    "damping": {"value": 1e18},
}
"""Damping so large that K-FAC gives the gradient times 1e-18, nothing next to AdamW's eps: what is
left to see is what sampling does to training."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["z0-noclip", "z2-overlap", "z1-bf16-accum32", "z2-fp16"])
def test_sampling_changes_factors_and_nothing_else(name):
    mode, runs = BY_NAME[name], []
    for fisher in ("monte_carlo", "empirical"):
        engine = build(mode, 2, kfac=merged(SAMPLED, {"factor": {"fisher": fisher}}))
        with patched(mode):
            losses = train(engine, 2, steps=5)
        others = {n: w for n, w in weights(engine).items() if not n.startswith("head")}
        own = engine.kfac.preconditioner.curvature.factors.items()
        factors = {key: state.packed_P.clone() for key, state in own if key.endswith("/G")}
        runs.append((losses, others, factors))
    (losses, sampled, sampled_G), (plain_losses, plain, plain_G) = runs
    assert losses == plain_losses
    exact(sampled, plain)
    assert not any(torch.equal(sampled_G[key], G) for key, G in plain_G.items())


def refusal(prediction="head", *, checkpointed="", way="engine.backward", mode="z2") -> str:
    """The error of a step; ``way``: how its backward pass is started."""

    def action() -> None:
        model = make_net(Called)
        model.checkpointed = checkpointed
        kfac = {"factor": {**FACTOR, "prediction": prediction}}
        engine = build(BY_NAME[mode], model=model, kfac=kfac)
        ((x, y),) = micro_batches(0, 1)
        loss = engine(x, y)
        if way == "sampled by hand":
            engine.kfac.sample(loss)
        engine.backward(loss) if way == "engine.backward" else loss.backward()
        engine.step()
        assert engine.kfac.preconditioner.metrics.counts["factor_updates"] == 1

    return error_of(action)


def test_what_cannot_be_sampled_is_said():
    assert refusal(checkpointed="non-reentrant") == refusal(way="sampled by hand") == ""
    assert "with use_reentrant=False" in refusal(checkpointed="reentrant")
    assert "set kfac.factor.prediction to the name of the module" in refusal(None)
    assert "the model has no module 'haed'" in refusal("haed")
    assert "call engine.kfac.sample(loss) before loss.backward()" in refusal(way="loss.backward")
    error = refusal(mode="z3")
    assert 'fisher "monte_carlo" at ZeRO stage 3' in error and "use stage 0, 1 or 2" in error


@pytest.mark.ranks(2)
def test_every_forward_of_every_rank_draws_anew_and_the_same_when_resumed():
    folder = shared_folder()
    kfac = merged(DRAWN, {"factor": {"prediction": "head"}})

    def run(steps, load=False) -> list[list[tuple]]:
        drawn: list[list[tuple]] = []
        engine = build(BY_NAME["z2"], 2, kfac=kfac)
        if load:
            engine.load_checkpoint(folder, tag="t")

        def sampler(logits, reached, generator):
            drawn[-1].append(tuple(torch.rand(2, generator=generator).tolist()))
            return cross_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))

        engine.kfac.sampler = sampler
        for step in steps:
            drawn.append([])
            # the same batch: draws must differ by themselves
            for x, y in micro_batches(0, 2):
                engine.backward(engine(x, y))
                engine.step()
            if step == 0:
                engine.save_checkpoint(folder, tag="t")
        return drawn

    straight, resumed = run(range(3)), run(range(1, 3), load=True)
    assert resumed == straight[1:]
    draws = [draw for of_rank in of_ranks(straight) for step in of_rank for draw in step]
    assert len(draws) == len(set(draws)) == 2 * 3 * 2, "over ranks, steps and micro-batches"


IGNORED = -1


def labels_of(logits: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(-1) + 1) % logits.shape[-1]


def sampled_G(*passes, before=None, after=None):
    """G of a step's backward passes, and what the sampler got.

    Args:
        passes: each of some forwards, which are (inputs, labels).
        before: a forward before them, without a backward pass.
        after: a forward between them and their passes, without gradients.
    """
    engine, seen = build(BY_NAME["z0"], kfac=DRAWN), []

    def sampler(logits, reached, generator):
        """Without chance: the label after the most likely one."""
        seen.append((logits.detach().clone(), reached.any(-1)))
        flat, labels = logits.flatten(0, 1), labels_of(logits).flatten()
        return mean_of_terms(F.cross_entropy(flat, labels, reduction="none"), reached.any(-1))

    def loss(x, y):
        return F.cross_entropy(engine(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)

    engine.kfac.sampler = sampler
    if before is not None:
        loss(*before)
    losses = [sum(loss(*forward) for forward in forwards) for forwards in passes]
    if after is not None:
        with torch.no_grad():
            loss(*after)
    for of_pass in losses:
        engine.backward(of_pass)
    engine.step()
    factors = engine.kfac.preconditioner.curvature.factors
    return {key: state.packed_P.clone() for key, state in factors.items() if "/G" in key}, seen


def test_every_forward_of_a_backward_is_sampled_once():
    """The loss of a backward pass is the mean of its forwards' means, and that of a step the mean
    of its passes'."""
    x, y = (torch.cat(parts) for parts in zip(*micro_batches(0, 2), strict=True))
    whole, first, second = (x, y), (x[:3], y[:3]), (x[3:], y[3:])
    all_rows, one, other = (sampled_G([rows])[0] for rows in (whole, first, second))
    mean = {key: (one[key] + other[key]) / 2 for key in one}
    # the R_p of all rows, and terms that count half
    summed = {key: 8 / 4 * (one[key] / 3 + other[key] / 5) for key in one}
    for what, (found, _), expected in (
        ("a forward without gradients after it", sampled_G([whole], after=first), all_rows),
        ("a forward without a backward", sampled_G([second], before=first), other),
        ("one by one", sampled_G([first], [second]), mean),
        ("two forwards", sampled_G([first, second]), summed),
    ):
        for key, G in expected.items():
            assert G.abs().sum() > 0
            close(found[key], G, sums=2 * 8 * 3 + 100, what=f"{what}: {key}")  # rows and widths
    # 0.01: far above rounding, and below what another draw of labels makes
    assert any((all_rows[key] - G).norm() > 0.01 * G.norm() for key, G in other.items())


def test_only_terms_that_the_true_loss_has_are_sampled():
    """Of a loss that ignores some labels, which the model does not see. R_p counts all rows of the
    last layer, see docs/explanation/formulas.md."""
    ((x, y),) = micro_batches(0, 1)
    y[:, 1:] = IGNORED
    found, ((logits, reached),) = sampled_G([(x, y)])
    assert torch.equal(reached, y != IGNORED)
    g = logits.softmax(-1) - F.one_hot(labels_of(logits), logits.shape[-1])
    g = g[reached] / reached.sum()
    close(found["head/G"], symmetric_pack(y.numel() * g.T @ g), sums=100)


def test_a_second_backward_through_a_sampled_forward_is_legal():
    """The sampled loss has one of the two."""
    engine = build(BY_NAME["z0"], kfac=SAMPLED)
    for step, updates in enumerate((1, 1, 2)):
        ((x, y),) = micro_batches(step, 1)
        loss = engine(x, y)
        engine.backward(loss, retain_graph=True)
        engine.backward(0.5 * loss)
        engine.step()
        assert engine.kfac.preconditioner.curvature.factors["head/G"].updates == updates
