"""Universal checkpoints: converted by DeepSpeed's tool, loaded at another world size, with K-FAC's
state."""

import io
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_kfac.directions.kfac_adamw.optimizer import FLAG, KFACTorchAdamW
from tests.close import exact, near
from tests.deepspeed.modes import BY_NAME, LR
from tests.deepspeed.runs import build, weights
from tests.deepspeed.test_checkpoint import (
    ROWS,
    check_same,
    distance,
    merged,
    own_state,
    train_rows,
)
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
    """AdamW steps the norm's parameters, whose moments are DeepSpeed's to convert."""
    rows = ROWS // torch.distributed.get_world_size()
    engine = build(BY_NAME[name], 1, kfac=KFAC, train_micro_batch_size_per_gpu=rows, **options)
    if engine.bfloat16_enabled():
        engine.module.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].bfloat16(), *inputs[1:])
        )
    return engine


def flags(engine) -> list[bool]:
    """Which parameter groups are K-FAC's."""
    return [bool(group.get(FLAG)) for group in engine.basic_optimizer.param_groups]


def moments_of_layers(engine) -> list[torch.Tensor]:
    """What the inner optimizer keeps of parameters that are K-FAC's."""
    inner = engine.basic_optimizer
    ours = {id(p) for group in inner.param_groups if group.get(FLAG) for p in group["params"]}
    if engine.zero_optimization_stage() == 3:
        partitions = engine.optimizer.fp32_partitioned_groups_flat
        groups = engine.optimizer.sub_group_to_group_id.values()
        pairs = zip(partitions, groups, strict=True)
        ours = {id(p) for p, group in pairs if inner.param_groups[group].get(FLAG)}
    states = [state for p, state in inner.state.items() if id(p) in ours]
    return [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]


def worker(payload: tuple[str, str, str, dict]) -> dict:
    """Save a run after four steps or load one; and the weights after two steps more."""
    folder, name, universal, options = payload
    engine = engine_of(name, **options)
    if universal:
        engine.load_checkpoint(folder, tag="tag_universal")
    else:
        train_rows(engine, 4)
        engine.save_checkpoint(folder, tag="tag")
    found = {"state": own_state(engine), "weights": weights(engine), "flags": flags(engine)}
    found["steps"] = engine.kfac.preconditioner.steps
    train_rows(engine, 2, first=4)
    return found | {"next": weights(engine), "kept": moments_of_layers(engine)}


def converted_and_loaded(folder: Path, cases: dict[str, str]) -> tuple[list[dict], dict]:
    """What the savers found on each of two ranks, and the loaders on one."""
    target, saved, loaded = "tests.deepspeed.test_universal:worker", [{}, {}], {}
    for name in cases:
        payload = str(folder / name), name, "", {}
        for rank, found in enumerate(run_ranks(target, world=2, payload=payload)):
            saved[rank][name] = found
    converted([folder / name / "tag" for name in cases])
    for name, other in cases.items():
        options = {"seed": 99, "checkpoint": {"load_universal": True}}
        payload = str(folder / name), other, "universal", options
        (loaded[name],) = run_ranks(target, world=1, payload=payload)
    return saved, loaded


def check(name: str, saved: list[dict], result: dict) -> None:
    first = saved[0]
    check_same(result["state"], merged([part["state"] for part in saved]), name)
    exact(result["weights"], first["weights"], what=name)
    assert result["steps"] == 4 and result["flags"] == first["flags"] and not result["kept"], name
    # with AdamW's moments of the other parameters: of bf16 only as good as its products
    bound = (0.2 if "bf16" in name else 1e-3) * distance(first["next"], first["weights"])
    near(result["next"], first["next"], bound, "rounding in two steps", what=name)


@pytest.mark.distributed
def test_a_universal_checkpoint_resumes_at_another_world_size(tmp_path):
    """ds_to_universal does not copy the kfac folder; it is found next to the converted tag. Before,
    it stopped at KFACAdamW's groups, which keep no optimizer state (KeyError: exp_avg)."""
    saved, loaded = converted_and_loaded(tmp_path, CASES)
    for name, result in loaded.items():
        check(name, [part[name] for part in saved], result)


def test_zeros_in_place_of_moments_take_no_space_and_are_not_loaded():
    matrix, bias = nn.Parameter(torch.ones(256, 256)), nn.Parameter(torch.ones(7))
    groups = [{"params": [matrix], FLAG: True}, {"params": [bias], FLAG: False}]
    optimizer, other = (KFACTorchAdamW([{**g} for g in groups], lr=LR) for _ in range(2))
    for _ in range(3):
        matrix.grad, bias.grad = torch.ones_like(matrix), torch.ones_like(bias)
        optimizer.step()
    assert not optimizer.state.get(matrix), "no state in memory"
    saved = optimizer.state_dict()
    for key in ("exp_avg", "exp_avg_sq"):
        assert saved["state"][0][key].shape == matrix.shape and not saved["state"][0][key].any()
    step = float(saved["state"][0]["step"])
    assert step == 3.0, "that of the others, which may be asked for in place of theirs"
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    assert buffer.tell() < 8000 < matrix.nbytes
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert matrix not in other.state
    exact(other.state[bias]["exp_avg"], optimizer.state[bias]["exp_avg"])
