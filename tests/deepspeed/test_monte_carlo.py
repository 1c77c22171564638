"""Monte-Carlo Fisher in an engine: Newton's step where the Fisher is exact, training untouched,
errors."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_kfac
from ds_kfac.model.sampled_loss import mean_of_terms
from tests.close import close
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches, patched, train, weights
from tests.models import Net, cross_entropy, make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
ROWS, INPUTS, OUTPUTS = 16, 5, 3
SAMPLED = {
    "factor": {"rows": "all", "update_interval": 2, "fisher": "monte_carlo", "prediction": "head"},
    "eigenbasis": {"refresh_interval": 2},
    "burn_in": {"steps": 0},
    "layers": {"exclude": ["first", "middle"]},
    "preconditioner": {"kl_clip": 0},
    "damping": {"kind": "tikhonov", "value": 1e18},
}
"""Damping so large that K-FAC gives the gradient times 1e-18, nothing next to AdamW's eps: what is
left to see is what sampling does to training."""


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.linear(x), y)


def whitened(prediction: torch.Tensor, reached, generator: torch.Generator) -> torch.Tensor:
    """mse's sampler with noise that has exactly unit covariance over the batch: the exact
    Fisher."""
    noise = torch.randn(prediction.shape, generator=generator, device=prediction.device)
    noise = torch.linalg.qr(noise)[0] * (len(noise) * OUTPUTS / 2) ** 0.5
    return F.mse_loss(prediction, prediction.detach() + noise)


def newton_worker(stages) -> dict:
    results = {}
    generator = torch.Generator().manual_seed(7)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world * ROWS, INPUTS, generator=generator)
    y = torch.randn(world * ROWS, OUTPUTS, generator=generator)
    wide = torch.cat([x, torch.ones(len(x), 1)], 1)
    expected = torch.linalg.lstsq(wide.double(), y.double()).solution.T
    for stage in stages:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,  # DeepSpeed clips at 1 by default
            "kfac": {
                "factor": {
                    "rows": "all",
                    "fisher": "monte_carlo",
                    "prediction": "linear",
                    "sampler": "mse",
                },
                "damping": {"kind": "tikhonov", "value": 1e-7},
                "preconditioner": {"kl_clip": 1e6},
            },
        }
        with contextlib.redirect_stdout(io.StringIO()):
            engine, *_ = ds_kfac.initialize(model=Regression(), config=config)
        engine.kfac.sampler = whitened
        share = slice(rank * ROWS, (rank + 1) * ROWS)
        before = F.mse_loss(engine.module.linear(x), y)
        engine.backward(engine(x[share], y[share]))
        engine.step()
        found = weights(engine)
        W = torch.cat([found["linear.weight"], found["linear.bias"][:, None]], 1).double()
        least = (wide.double() @ expected.T - y).square().mean()
        kl = float(engine.kfac.preconditioner.metrics.kl / (before - least))
        results[stage] = float((W - expected).norm() / expected.norm()), kl
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_with_its_exact_fisher_a_linear_model_is_solved_in_one_step(world):
    for result in run_ranks(
        "tests.deepspeed.test_monte_carlo:newton_worker", world=world, payload=[0, 1, 2]
    ):
        # the normal equations are solved in fp32, with a damping of 1e-7; a wrong Fisher is off by
        # 0.01 and more
        assert all(error < 1e-4 for error, _ in result.values()), result
        # of a quadratic loss Newton's step takes off what it moves the model by, in the Fisher's
        # metric
        assert all(abs(kl - 1) < 1e-4 for _, kl in result.values()), result


def untouched_worker(names) -> dict:
    """The same training with and without sampling: everything but the factors must be the same to
    the bit."""
    results = {}
    for name in names:
        mode, runs = BY_NAME[name], []
        for fisher in ("monte_carlo", "empirical"):
            engine = build(
                mode, 2, kfac={**SAMPLED, "factor": {**SAMPLED["factor"], "fisher": fisher}}
            )
            with patched(mode):
                losses = train(engine, 2, steps=5)
            own = engine.kfac.preconditioner.curvature.factors.items()
            factors = {key: state.packed_P.clone() for key, state in own if key.endswith("/G")}
            runs.append((losses, weights(engine), factors))
            engine.destroy()
        (losses, sampled, sampled_G), (plain_losses, plain, plain_G) = runs
        others = [n for n in plain if not n.startswith("head")]
        results[name] = {
            "losses": losses == plain_losses,
            "weights": all(torch.equal(sampled[n], plain[n]) for n in others),
            "factors": all(not torch.equal(sampled_G[n], plain_G[n]) for n in plain_G),
        }
    return results


def test_sampling_changes_factors_and_nothing_else():
    names = ["z0-noclip", "z1", "z2", "z2-overlap", "z2-offload", "z1-bf16-accum32", "z2-fp16"]
    for result in run_ranks(
        "tests.deepspeed.test_monte_carlo:untouched_worker", world=2, payload=names
    ):
        wrong = {name: found for name, found in result.items() if not all(found.values())}
        assert not wrong


class Checkpointed(Net):
    use_reentrant = False

    def forward(self, x, y):
        x = x.requires_grad_()
        inner = checkpoint(
            lambda x: self.middle(self.norm(self.silu(self.first(x)))),
            x,
            use_reentrant=self.use_reentrant,
        )
        return cross_entropy(self.head(torch.tanh(inner)), y)


class Reentrant(Checkpointed):
    use_reentrant = True


def errors_worker(_) -> dict:
    block = {
        "factor": {
            "rows": "all",
            "update_interval": 1,
            "fisher": "monte_carlo",
            "prediction": "head",
        }
    }

    def attempt(model=None, kfac=block, plain_backward=False, sample=False, mode="z2") -> str:
        try:
            engine = build(BY_NAME[mode], 1, model=model, kfac=kfac)
            for x, y in micro_batches(0, 1):
                loss = engine(x, y)
                if sample:
                    engine.kfac.sample(loss)
                loss.backward() if plain_backward else engine.backward(loss)
                engine.step()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return f"fine {engine.kfac.preconditioner.metrics.counts['factor_updates']}"

    return {
        "non-reentrant": attempt(make_net(Checkpointed)),
        "reentrant": attempt(make_net(Reentrant)),
        "a loss": attempt(kfac={"factor": {**block["factor"], "prediction": None}}),
        "no such module": attempt(kfac={"factor": {**block["factor"], "prediction": "haed"}}),
        "forgotten": attempt(plain_backward=True),
        "by hand": attempt(plain_backward=True, sample=True),
        "stage 3": attempt(mode="z3"),
    }


def test_what_cannot_be_sampled_is_said():
    found = run_ranks("tests.deepspeed.test_monte_carlo:errors_worker", world=1)[0]
    assert found["non-reentrant"] == found["by hand"] == "fine 1"
    assert "use torch's with use_reentrant=False" in found["reentrant"]
    assert "name the module that computes it in kfac.factor.prediction" in found["a loss"]
    assert "the model has no module 'haed'" in found["no such module"]
    assert "call engine.kfac.sample(loss) before loss.backward()" in found["forgotten"]
    assert (
        'fisher "monte_carlo" at ZeRO stage 3' in found["stage 3"]
        and "use stage 0, 1 or 2" in found["stage 3"]
    )


DRAWN = {
    "factor": {"rows": "all", "update_interval": 1, "fisher": "monte_carlo"},
    "preconditioner": {"kl_clip": 0},
    "damping": {"kind": "tikhonov", "value": 1.0},
}


def draws_worker(folder) -> dict:
    """What the sampler draws in each forward, in a run and in one that is resumed from its
    checkpoint."""

    def run(steps, resume=False, save=False) -> dict:
        drawn: dict[tuple[int, int], list[float]] = {}
        engine = build(
            BY_NAME["z2"], 2, kfac={**DRAWN, "factor": {**DRAWN["factor"], "prediction": "head"}}
        )
        if resume:
            engine.load_checkpoint(folder, tag="t")

        def sampler(logits, reached, generator):
            state = generator.get_state()
            drawn.setdefault(now, []).append(torch.rand(2, generator=generator).tolist())
            generator.set_state(state)
            return cross_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))

        engine.kfac.sampler = sampler
        for step in steps:
            # the same batch: draws must differ by themselves
            for micro, (x, y) in enumerate(micro_batches(0, 2)):
                now = step, micro
                engine.backward(engine(x, y))
                engine.step()
            if save and step == 0:
                engine.save_checkpoint(folder, tag="t")
        engine.destroy()
        return drawn

    return {"run": run(range(3), save=True), "resumed": run(range(1, 3), resume=True)}


def test_every_forward_of_every_rank_draws_anew_and_the_same_when_resumed(tmp_path):
    ranks = run_ranks(
        "tests.deepspeed.test_monte_carlo:draws_worker", world=2, payload=str(tmp_path)
    )
    draws = [tuple(one) for rank in ranks for forward in rank["run"].values() for one in forward]
    assert len(draws) == len(set(draws)) == 2 * 3 * 2, "over ranks, steps and micro-batches"
    for rank in ranks:
        assert rank["resumed"] == {
            place: forward for place, forward in rank["run"].items() if place[0] > 0
        }


def unlikely(logits, reached, generator):
    """A sampler without chance: the label after the most likely one."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels_of(logits).flatten(), reduction="none")
    return mean_of_terms(losses, reached.any(-1))


def labels_of(logits: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(-1) + 1) % logits.shape[-1]


EXAMPLES = {"first": 3, "second": 5}


def forwards_worker(_) -> dict:
    """The first step's G of a batch of 8 examples, put through the model in several ways."""
    x, y = (torch.cat(parts) for parts in zip(*micro_batches(0, 2), strict=True))
    first, second = slice(0, 3), slice(3, 8)

    def loss(engine, rows):
        return F.cross_entropy(engine(x[rows]).flatten(0, 1), y[rows].flatten())

    def whole(engine):
        engine.backward(loss(engine, slice(0, 8)))

    def looked_at(engine):
        value = loss(engine, slice(0, 8))
        with torch.no_grad():
            loss(engine, first)
        engine.backward(value)

    def summed(engine):
        engine.backward(loss(engine, first) + loss(engine, second))

    def one_by_one(engine):
        values = [loss(engine, rows) for rows in (first, second)]
        for value in values:
            engine.backward(value)

    def only_second(engine):
        loss(engine, first)
        engine.backward(loss(engine, second))

    def first_alone(engine):
        engine.backward(loss(engine, first))

    def second_alone(engine):
        engine.backward(loss(engine, second))

    results = {}
    for way in (whole, looked_at, summed, one_by_one, only_second, first_alone, second_alone):
        engine = build(BY_NAME["z0"], 1, kfac=DRAWN)
        engine.kfac.sampler = unlikely
        way(engine)
        engine.step()
        factors = engine.kfac.preconditioner.curvature.factors
        results[way.__name__] = {
            key: state.packed_P.clone() for key, state in factors.items() if "/G" in key
        }
        engine.destroy()
    return results


def test_every_forward_of_a_backward_is_sampled_once():
    """The loss of a backward pass is the mean of its forwards' means, and that of a step the mean
    of its passes'."""
    found = run_ranks("tests.deepspeed.test_monte_carlo:forwards_worker", world=1)[0]
    first, second, rows = found["first_alone"], found["second_alone"], sum(EXAMPLES.values())
    expected = {
        "looked_at": found["whole"],
        "only_second": second,
        "one_by_one": {key: (first[key] + second[key]) / 2 for key in first},
        # the R_p of all rows, and terms that count half
        "summed": {
            key: rows / 4 * (first[key] / EXAMPLES["first"] + second[key] / EXAMPLES["second"])
            for key in first
        },
    }
    for way, of_way in expected.items():
        assert all(float(G.abs().sum()) > 0 for G in of_way.values())
        for key, G in of_way.items():
            # rows, and widths on the way
            close(found[way][key], G, sums=2 * 8 * 3 + 100, what=f"{way} {key}")
    # 0.01: far above rounding, and below what another draw of labels makes
    assert any((found["whole"][key] - G).norm() > 0.01 * G.norm() for key, G in second.items())


def ignored_worker(_) -> tuple:
    """What a sampler gets, the G of the last layer, and what they should be, of a loss that ignores
    some labels. The model sees no labels."""
    engine, seen = build(BY_NAME["z0"], 1, kfac=DRAWN), []

    def sampler(logits, reached, generator):
        seen.append((logits.detach().clone(), reached))
        return unlikely(logits, reached, generator)

    engine.kfac.sampler = sampler
    x, y = next(iter(micro_batches(0, 1)))
    y[:, 1:] = IGNORED
    engine.backward(F.cross_entropy(engine(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED))
    engine.step()
    factor = engine.kfac.preconditioner.curvature.factors["head/G"]
    (found,) = factor.side.blocks(factor.packed_P)[0]
    engine.destroy()
    ((logits, reached),) = seen
    g = logits.softmax(-1) - F.one_hot(labels_of(logits), logits.shape[-1])
    g = g[y != IGNORED] / (y != IGNORED).sum()
    return reached, y, found, y.numel() * g.T @ g


IGNORED = -1


def test_only_terms_that_the_true_loss_has_are_sampled():
    """R_p counts all rows of the last layer, see docs/explanation/formulas.md."""
    reached, labels, G, expected = run_ranks(
        "tests.deepspeed.test_monte_carlo:ignored_worker", world=1
    )[0]
    assert torch.equal(reached.any(-1), labels != IGNORED)
    close(G, expected, sums=100)


def retained_worker(_) -> list[float]:
    """Two backwards through one forward, of which the sampled loss has one."""
    engine = build(BY_NAME["z0"], 1, kfac=SAMPLED)
    terms = []
    for step in range(3):
        x, y = next(iter(micro_batches(step, 1)))
        loss = engine(x, y)
        engine.backward(loss, retain_graph=True)
        engine.backward(0.5 * loss)
        engine.step()
        terms.append(float(engine.kfac.preconditioner.curvature.factors["head/G"].updates))
    engine.destroy()
    return terms


def test_a_second_backward_through_a_sampled_forward_is_legal():
    assert run_ranks("tests.deepspeed.test_monte_carlo:retained_worker", world=1) == [
        [1.0, 1.0, 2.0]
    ]


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack, self.head = (
            nn.Parameter(torch.randn(2, INPUTS, INPUTS)),
            nn.Linear(INPUTS, OUTPUTS),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.bmm(x.unflatten(0, (2, -1)), self.stack).flatten(0, 1))


def stacked_worker(_) -> set[str]:
    engine = build(BY_NAME["z0"], 1, model=Stacked(), kfac={**SAMPLED, "layers": {}})
    engine.backward(F.cross_entropy(engine(torch.randn(8, INPUTS)), torch.arange(8) % OUTPUTS))
    engine.step()  # a layer that does not fit is an error
    return {layer.name for layer in engine.kfac.preconditioner.layers}


def test_a_stack_whose_layers_share_an_A_proves_its_rows():
    assert run_ranks("tests.deepspeed.test_monte_carlo:stacked_worker", world=1) == [
        {"stack.0", "stack.1", "head"}
    ]
