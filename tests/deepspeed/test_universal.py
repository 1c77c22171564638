"""Universal checkpoints: converted by DeepSpeed's tool, loaded at another world size, with K-FAC's
state."""

import io
from pathlib import Path

import pytest
import torch

from ds_kfac.directions.kfac_adamw.optimizer import FLAG, KFACTorchAdamW
from tests.deepspeed.modes import BY_NAME, LR
from tests.deepspeed.runs import build, weights
from tests.deepspeed.test_checkpoint import ROWS, distance, own_state, train_rows
from tests.deepspeed.test_moving import converted
from tests.ranks import run_ranks

KFAC = {"factor": {"update_interval": 1}, "eigenbasis": {"refresh_interval": 3}}
# saved at two ranks -> loaded at one, in another stage where DeepSpeed allows it
CASES = {
    "z2": "z2",
    "adam-z2": "adam-z1",
    "adam-z1": "adam-z2",
    "adam-z1-bf16-accum32": "adam-z1-bf16-accum32",
    "adam-z3": "adam-z3",
}


def engine_of(name: str, **options):
    """The biases are no layer's, so that AdamW steps some parameters: their moments are DeepSpeed's
    to convert."""
    rows = ROWS // torch.distributed.get_world_size()
    return build(BY_NAME[name], 1, kfac=KFAC, train_micro_batch_size_per_gpu=rows, **options)


def train_typed(engine, steps: int, first: int = 0) -> None:
    if engine.bfloat16_enabled():
        engine.module.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].bfloat16(), *inputs[1:])
        )
    train_rows(engine, steps, first)


def save_worker(payload: tuple[str, dict[str, str]]) -> dict:
    folder, cases = payload
    results = {}
    for name in cases:
        engine = engine_of(name)
        train_typed(engine, 4)
        engine.save_checkpoint(f"{folder}/{name}", tag="tag")
        results[name] = {
            "state": own_state(engine),
            "weights": weights(engine),
            "flags": flags(engine),
        }
        train_typed(engine, 2, first=4)
        results[name]["next"] = weights(engine)
    return results


def flags(engine) -> list[bool]:
    return [bool(group.get(FLAG)) for group in engine.basic_optimizer.param_groups]


def load_worker(payload: tuple[str, dict[str, str]]) -> dict:
    folder, cases = payload
    results = {}
    for saved, loaded in cases.items():
        engine = engine_of(loaded, seed=99, checkpoint={"load_universal": True})
        engine.load_checkpoint(f"{folder}/{saved}", tag="tag_universal")
        results[saved] = {
            "state": own_state(engine),
            "weights": weights(engine),
            "steps": engine.kfac.preconditioner.steps,
            "flags": flags(engine),
        }
        train_typed(engine, 2, first=4)
        inner = engine.basic_optimizer
        ours = {id(p) for group in inner.param_groups if group.get(FLAG) for p in group["params"]}
        if engine.zero_optimization_stage() == 3:
            partitions = engine.optimizer.fp32_partitioned_groups_flat
            groups = zip(partitions, engine.optimizer.sub_group_to_group_id.items(), strict=True)
            ours = {id(p) for p, (_, group) in groups if inner.param_groups[group].get(FLAG)}
        kept = sum(
            value.nbytes
            for p, state in inner.state.items()
            if id(p) in ours
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        results[saved] |= {"next": weights(engine), "kept": kept}
    return results


def converted_and_loaded(folder: Path, cases: dict[str, str]) -> tuple[list[dict], dict]:
    """What the savers found on each of two ranks, and the loaders on one."""
    saved = run_ranks(
        "tests.deepspeed.test_universal:save_worker", world=2, payload=(str(folder), cases)
    )
    converted([folder / name / "tag" for name in cases])
    (loaded,) = run_ranks(
        "tests.deepspeed.test_universal:load_worker", world=1, payload=(str(folder), cases)
    )
    return saved, loaded


def check(name: str, saved: list[dict], result: dict) -> None:
    expected = {layer: tensors for part in saved for layer, tensors in part["state"].items()}
    assert result["steps"] == 4 and result["state"].keys() == expected.keys()
    for layer, tensors in expected.items():
        assert all(
            torch.equal(a, b) for a, b in zip(result["state"][layer], tensors, strict=True)
        ), (name, layer)
    first = saved[0]
    assert all(torch.equal(result["weights"][n], w) for n, w in first["weights"].items()), name
    assert result["flags"] == first["flags"] and result["kept"] == 0, name
    # two more steps, with AdamW's moments of the other parameters: of bf16 only as good as its
    # products
    moved, error = (
        distance(first["next"], first["weights"]),
        distance(result["next"], first["next"]),
    )
    assert error < (0.2 if "bf16" in name else 1e-3) * moved, (name, error, moved)


@pytest.mark.distributed
def test_a_universal_checkpoint_resumes_at_another_world_size(tmp_path):
    """ds_to_universal does not copy the kfac folder; it is found next to the converted tag. Before,
    it stopped at KFACAdamW's groups, which keep no optimizer state (KeyError: exp_avg)."""
    saved, loaded = converted_and_loaded(tmp_path, CASES)
    for name, result in loaded.items():
        check(name, [part[name] for part in saved], result)


def test_zeros_in_place_of_moments_take_no_space_and_are_not_loaded():
    matrix, bias = torch.nn.Parameter(torch.ones(256, 256)), torch.nn.Parameter(torch.ones(7))
    groups = [{"params": [matrix], FLAG: True}, {"params": [bias], FLAG: False}]
    optimizer, other = (
        KFACTorchAdamW(groups, lr=LR),
        KFACTorchAdamW([{**group} for group in groups], lr=LR),
    )
    for _ in range(3):
        matrix.grad, bias.grad = torch.ones_like(matrix), torch.ones_like(bias)
        optimizer.step()
    assert not optimizer.state.get(matrix), "no state in memory"
    saved = optimizer.state_dict()
    for key in ("exp_avg", "exp_avg_sq"):
        assert saved["state"][0][key].shape == matrix.shape and not saved["state"][0][key].any()
    assert float(saved["state"][0]["step"]) == 3.0, (
        "that of the others, which may be asked for in place of theirs"
    )
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    assert buffer.tell() < 8000 < matrix.nbytes
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert matrix not in other.state and torch.equal(
        other.state[bias]["exp_avg"], optimizer.state[bias]["exp_avg"]
    )
