"""Checkpoints: resuming equals not stopping; other world sizes and stages; what is missing is
said."""

import contextlib
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ds_kfac.checkpoint.files import CheckpointError
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, patched, train, weights
from tests.deepspeed.said import error_of, heard
from tests.models import make_batch, make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
# Refresh at steps 0, 3, 6; saved after 4 steps, between two refreshes, so bases and factors differ
# in age.
KFAC = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 3},
    "burn_in": {"steps": 0},
}
# kl-clip is by the largest rate so far, which a resumed run must know
FALLING = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": 0.02,
        "warmup_max_lr": 0.1,
        "warmup_num_steps": 2,
        "total_num_steps": 12,
    },
}


def peak_rates(kfac) -> dict:
    """Largest learning rate so far of each parameter group, where kl-clip goes by it."""
    return kfac.direction.state().get("peak_lr", {})


def own_state(engine) -> dict:
    """Copies, by layer: the next step changes all of it in place."""
    kfac = engine.kfac.preconditioner
    found = {}
    for name, state in kfac.state.items():
        keys = [f"{name}/{side}" for side in "AG" if f"{name}/{side}" in kfac.curvature.specs]
        factors = [kfac.curvature.factors[key] for key in keys]
        moments = vars(state.moments).values() if state.moments else ()
        packed = [part for factor in factors for part in (factor.packed_P, factor.updates)]
        tensors = (*state.A.vectors, state.G.values, *packed, state.terms, *moments)
        found[name] = [tensor.clone() for tensor in tensors]
    return found


UNSAVED = ("z2", "z3-bf16", "adam-z3")
"""Trained without a save, too."""


def resume_worker(payload) -> dict:
    folder, names = payload
    results = {}
    for name in names:
        mode, options = BY_NAME[name.removesuffix("-falling_lr")], {"kfac": KFAC}
        if name.endswith("-falling_lr"):
            options["scheduler"] = FALLING
        with patched(mode):
            unbroken = build(mode, 1, **options)
            losses = train(unbroken, 1, steps=4)
            unbroken.save_checkpoint(f"{folder}/{name}", client_state={"mine": 5})
            losses += train(unbroken, 1, steps=4, first=4)
            second = build(mode, 1, seed=99, **options)
            _, client_state = second.load_checkpoint(f"{folder}/{name}")
            resumed = train(second, 1, steps=4, first=4)
            unsaved = losses
            if name in UNSAVED:
                other = build(mode, 1, **options)
                unsaved = train(other, 1, steps=8)
                other.destroy()
        kfac, pairs = (
            second.kfac.preconditioner,
            zip(weights(second).items(), weights(unbroken).items(), strict=True),
        )
        results[name] = {
            "losses": losses[4:],
            "resumed": resumed,
            "undisturbed": unsaved == losses,
            "steps": kfac.steps,
            "client_state": client_state,
            "same": all(torch.equal(own, other) for (_, own), (_, other) in pairs),
            "rates": (float(peak_rates(kfac).get(0, 0.0)), second.get_lr()[0]),
            "nu": kfac.metrics.nu,
            "files": sorted(p.name for p in Path(folder, name).rglob("kfac/*/*")),
        }
        unbroken.destroy()
        second.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_gives_the_losses_of_not_stopping(world, tmp_path):
    names = [
        "z0",
        "z1",
        "z2",
        "z2-offload",
        "z3",
        "z1-bf16",
        "z1-bf16-accum32",
        "z3-bf16",
        "z2-fp16",
        "z2-falling_lr",
    ]
    names += [
        f"adam-{name}"
        for name in ("z0", "z1", "z2", "z2-offload", "z3", "z1-bf16-accum32", "z3-bf16", "z2-fp16")
    ]
    names = names if world > 1 else names[::3]
    results = run_ranks(
        "tests.deepspeed.test_checkpoint:resume_worker", world=world, payload=(str(tmp_path), names)
    )
    for result in results:
        for name, run in result.items():
            assert run["resumed"] == run["losses"] and run["same"], (
                "the same world and stage: to the bit"
            )
            assert run["undisturbed"], "saving changes nothing"
            assert run["client_state"].get("mine") == 5 and "ds_kfac" not in run["client_state"]
            assert run["steps"] == 8
            kinds = [".A.factor.pt", ".layer.pt"] + [".G.factor.pt"] * (not name.startswith("adam"))
            files = [layer + kind for layer in ("first", "head", "middle") for kind in kinds]
            assert run["files"] == sorted([*files, "header.json", "states.json"]), (
                "each factor and each layer once, nothing else"
            )
        peak, last = result["z2-falling_lr"]["rates"]
        assert last < 0.7 * peak and result["z2-falling_lr"]["nu"] < 1, (
            "the rate fell, and kl-clip was at work"
        )


ROWS = 8  # of the global batch, whatever the world
SIZE = 0.2
"""Of KFACAdamW's steps: with larger ones the batch is fitted, and its gradient is what rounding
leaves of it."""


def rows_engine(name: str, **options):
    """One gradient worker a layer, so that every layer's state is on one rank. SGD has no state
    that a load at another world size would lose: what a step does to the layers follows from
    weights, batch and K-FAC's state alone."""
    rows, mode = ROWS // torch.distributed.get_world_size(), replace(BY_NAME[name], size=SIZE)
    kfac = {
        **KFAC,
        "assignment": {"gradient_worker_fraction": 1 / torch.distributed.get_world_size()},
    }
    if not mode.adam:
        options["optimizer"] = {"type": "SGD", "params": {"lr": 0.02}}
    return build(mode, 1, kfac=kfac, train_micro_batch_size_per_gpu=rows, **options)


def train_rows(engine, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x, y = make_batch(step, ROWS)
        rows = ROWS // engine.world_size
        share = slice(engine.global_rank * rows, (engine.global_rank + 1) * rows)
        engine.backward(engine(x[share], y[share]))
        engine.step()


def layer_weights(engine) -> dict:
    return {name: w for name, w in weights(engine).items() if "norm" not in name}


def save_worker(payload) -> dict:
    folder, names = payload
    results = {}
    for name in names:
        engine = rows_engine(name)
        train_rows(engine, 4)
        engine.save_checkpoint(f"{folder}/{name}", tag="tag")
        results[name] = {"state": own_state(engine), "weights": weights(engine)}
        train_rows(engine, 1, first=4)
        results[name]["next"] = layer_weights(engine)
    return results


def load_worker(payload) -> dict:
    """Into another stage or world size, and a step."""
    folder, cases, saved_weights = payload
    results = {}
    for saved, loaded, how in cases:
        model = make_net(seed=99)
        if how == "state":  # which is K-FAC's alone
            model.load_state_dict(saved_weights[saved])
        engine = rows_engine(loaded, model=model)
        if saved == loaded == "z2":  # of two ranks, into one
            with pytest.raises(CheckpointError, match="of another number of ranks"):
                engine.load_checkpoint(f"{folder}/{saved}", tag="tag")
        if how == "engine":
            options = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
            engine.load_checkpoint(f"{folder}/{saved}", tag="tag", **options)
            assert engine.kfac.preconditioner.steps == 0, "K-FAC's state is the optimizer's"
            assert all(state.basis is None for state in engine.kfac.preconditioner.state.values())
        engine.kfac.load_state(f"{folder}/{saved}", "tag")
        state, steps = own_state(engine), engine.kfac.preconditioner.steps
        train_rows(engine, 1, first=4)
        results[saved, loaded, how] = {
            "state": state,
            "steps": steps,
            "next": layer_weights(engine),
        }
        engine.destroy()
    return results


def distance(one: dict, other: dict) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_state_loads_at_any_world_size_and_stage(tmp_path):
    saved = {}
    for world, names in ((1, ["z0", "z1", "adam-z0"]), (2, ["z2", "z3", "adam-z2"])):
        parts = run_ranks(
            "tests.deepspeed.test_checkpoint:save_worker",
            world=world,
            payload=(str(tmp_path), names),
        )
        for name in names:
            state = {
                layer: tensors for part in parts for layer, tensors in part[name]["state"].items()
            }
            saved[name] = {**parts[0][name], "state": state}
    # uninterrupted runs of other worlds and stages differ by rounding
    spread = {
        family: max(
            torch.finfo(torch.float32).eps
            * max(float(w.abs().max()) for w in saved[names[0]]["next"].values()),
            *(distance(saved[names[0]]["next"], saved[name]["next"]) for name in names[1:]),
        )
        for family, names in {False: ["z0", "z1", "z2", "z3"], True: ["adam-z0", "adam-z2"]}.items()
    }
    cases = {
        1: [("z2", "z2", "engine"), ("z3", "z2", "state"), ("adam-z2", "adam-z0", "state")],
        2: [
            ("z1", "z2", "engine"),
            ("z2", "z0", "engine"),
            ("z0", "z3", "state"),
            ("adam-z0", "adam-z2", "state"),
            ("adam-z2", "adam-z2", "engine"),
        ],
        4: [("z2", "z1", "engine"), ("z3", "z3", "state")],
    }
    all_weights = {name: own["weights"] for name, own in saved.items()}
    for world in cases:
        payload = (str(tmp_path), cases[world], all_weights)
        results = run_ranks(
            "tests.deepspeed.test_checkpoint:load_worker", world=world, payload=payload
        )
        for case in cases[world]:
            parts, expected = [result[case] for result in results], saved[case[0]]
            actual = {layer: tensors for part in parts for layer, tensors in part["state"].items()}
            assert (
                sum(len(part["state"]) for part in parts)
                == len(actual)
                == len(expected["state"])
                == 3
            )
            for layer, tensors in expected["state"].items():
                same = [torch.equal(a, b) for a, b in zip(actual[layer], tensors, strict=True)]
                assert all(same), (case, world, layer)
            moved = distance(
                expected["next"], {n: expected["weights"][n] for n in expected["next"]}
            )
            error = max(distance(part["next"], expected["next"]) for part in parts)
            assert all(part["steps"] == 4 for part in parts)
            bound = 10 * spread[BY_NAME[case[0]].adam]
            assert error <= bound < 0.1 * moved, (case, world, error, bound, moved)


def damage_worker(folder: str) -> dict:
    """Checkpoints without, with incomplete and with foreign K-FAC state."""
    mode, results = BY_NAME["z2"], {}
    plain = build(mode, 1, kfac={"enabled": False})
    train(plain, 1, steps=2)
    plain.save_checkpoint(f"{folder}/plain", tag="tag")
    engine = build(mode, 1, kfac=KFAC)
    train(engine, 1, steps=3)
    for name in ("module_only", "missing_file", "missing_folder", "header"):
        engine.save_checkpoint(f"{folder}/{name}", tag="tag")
    trained = list(weights(engine).values())
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        saves = {
            path.parents[2].name: path
            for path in Path(folder).glob("*/tag/kfac/*")
            if path.is_dir()
        }
        (saves["missing_file"] / "middle.layer.pt").unlink()
        saves["missing_folder"].parent.rename(saves["missing_folder"].parent.with_name("gone"))
        header = saves["header"] / "header.json"
        header.write_text(json.dumps({**json.loads(header.read_text()), "crc32": 99}))
    torch.distributed.barrier()

    def load(name, **options):
        given = {**KFAC, "checkpoint": {"on_missing": "fresh"}} if name == "fresh" else KFAC
        fresh = build(mode, 1, seed=7, kfac=given)
        name = "missing_file" if name == "fresh" else name
        with heard() as messages:
            error = error_of(
                lambda: fresh.load_checkpoint(f"{folder}/{name}", tag="tag", **options)
            )
        same = all(torch.equal(a, b) for a, b in zip(weights(fresh).values(), trained, strict=True))
        # Adam's steps, as they are in the files: DeepSpeed's part was loaded
        moments = [
            float(state["step"])
            for state in fresh.basic_optimizer.state.values()
            if "step" in state
        ]
        said = "\n".join(m for m in messages if "ds_kfac" in m)
        return {
            "error": error,
            "said": said,
            "engine": fresh,
            "deepspeed": same and set(moments) == {3.0},
        }

    for name in ("plain", "missing_file", "fresh", "missing_folder", "header"):
        results[name] = load(name)
    results["module_only"] = load("module_only", load_module_only=True)
    for result in results.values():
        fresh = result.pop("engine")
        result["steps"] = fresh.kfac.preconditioner.steps
        result["trains"] = all(loss == loss for loss in train(fresh, 1, steps=1))
    results["nowhere"] = {"error": error_of(lambda: engine.kfac.load_state(folder, "no_such_tag"))}
    return results


def test_what_is_missing_or_damaged_is_said_on_every_rank(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()):
        results = run_ranks(
            "tests.deepspeed.test_checkpoint:damage_worker", world=2, payload=str(tmp_path)
        )
    for rank, result in enumerate(results):
        assert result["plain"]["error"] == "" and result["plain"]["steps"] == 0
        assert "middle.layer.pt: is missing" in result["missing_file"]["error"], result[
            "missing_file"
        ]
        assert '"checkpoint": {"on_missing": "fresh"}' in result["missing_file"]["error"], (
            "a way that keeps the rest"
        )
        assert all(
            result[name]["deepspeed"]
            for name in ("missing_file", "fresh", "missing_folder", "header")
        )
        assert result["fresh"]["error"] == "" and result["fresh"]["steps"] == 0
        assert "no K-FAC state" in result["missing_folder"]["error"]
        assert "header.json: wrong checksum" in result["header"]["error"]
        assert "no K-FAC state" in result["nowhere"]["error"]
        for name in ("missing_file", "header", "missing_folder", "module_only"):
            assert result[name]["steps"] == 0, "nothing is loaded by halves"
            assert result[name]["trains"]
        if rank == 0:
            assert "middle.layer.pt: is missing" in result["fresh"]["said"], "why it starts afresh"
            assert "no K-FAC state, K-FAC starts afresh" in result["plain"]["said"]
            assert "load_module_only=True: K-FAC starts afresh" in result["module_only"]["said"]


def overwrite_worker(folder: str) -> dict:
    """A tag written again: by a killed save, by a run without K-FAC; and loaded by an engine that
    has trained."""
    from ds_kfac.checkpoint.save import save

    mode, results = BY_NAME["z2"], {}
    engine = build(mode, 1, kfac=KFAC)
    train(engine, 1, steps=4)
    engine.save_checkpoint(folder, tag="tag")
    first = own_state(engine)
    train(engine, 1, steps=2)
    save(engine.kfac.job, Path(folder, "tag"))  # killed before DeepSpeed wrote its files
    fresh = build(mode, 1, seed=99, kfac=KFAC)
    fresh.load_checkpoint(folder, tag="tag")
    same = all(
        torch.equal(a, b) for n in first for a, b in zip(own_state(fresh)[n], first[n], strict=True)
    )
    results["killed save"] = same, fresh.kfac.preconditioner.steps
    engine.save_checkpoint(folder, tag="tag")
    torch.distributed.barrier()
    results["folders"] = len([path for path in Path(folder, "tag/kfac").iterdir() if path.is_dir()])

    plain = build(mode, 1, kfac={"enabled": False})
    train(plain, 1, steps=1)
    plain.save_checkpoint(folder, tag="tag")
    # has trained, and the folder of an older save is still there
    fresh.load_checkpoint(folder, tag="tag")
    kfac = fresh.kfac.preconditioner
    empty = all(float(state.updates) == 0 for state in kfac.curvature.factors.values())
    empty = empty and all(state.basis is None for state in kfac.state.values())
    results["plain save over it"] = empty, kfac.steps, peak_rates(kfac)
    return results


def test_an_overwritten_tag_never_mixes_two_saves(tmp_path):
    for result in run_ranks(
        "tests.deepspeed.test_checkpoint:overwrite_worker", world=2, payload=str(tmp_path)
    ):
        assert result["killed save"] == (True, 4)
        assert result["folders"] == 1, "old states are removed after the new save is complete"
        assert result["plain save over it"] == (True, 0, {})


def regrouped_worker(folder: str) -> dict:
    """Saved with one of two equal layers left out, loaded with the other one, with both and with
    none left out."""
    import ds_kfac

    def engine(stage, left_out):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "KFACAdamW", "params": {"torch_adam": True}},
            "kfac": {**KFAC, "layers": {"exclude": left_out}},
            "zero_allow_untested_optimizer": True,
        }
        return ds_kfac.initialize(model=model, config=config)[0]

    def step(engine):
        engine.backward(engine(torch.randn(8, 4)).square().mean())
        engine.step()

    found = {}
    for stage in (0, 1, 3):
        first = engine(stage, ["0"])
        step(first)
        first.save_checkpoint(f"{folder}/{stage}", tag="tag")
        for left_out in (["0"], ["1"], ["0", "1"], []):
            load = partial(engine(stage, left_out).load_checkpoint, f"{folder}/{stage}", tag="tag")
            found[(stage, *left_out)] = error_of(load)
    return found


def test_a_state_of_other_layers_is_refused_also_where_its_sizes_fit(tmp_path):
    (found,) = run_ranks(
        "tests.deepspeed.test_checkpoint:regrouped_worker", world=1, payload=str(tmp_path)
    )
    for (stage, *left_out), said in found.items():
        if left_out == ["0"]:
            assert said == "", (stage, said)
        elif left_out == ["1"]:
            assert "has 0.weight, 1.weight in other parameter groups: kfac.layers" in said, (
                stage,
                said,
            )
        else:
            assert "has other parameter groups than this engine's KFACTorchAdamW" in said, (
                stage,
                left_out,
                said,
            )
