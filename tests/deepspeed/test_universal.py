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
from tests.ranks import call_on_ranks, on_rank_0

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


def save(folder, names) -> None:
    """After four steps. A file beside the tag has what was there, and the weights after two steps
    more."""
    for name in names:
        engine = engine_of(name)
        train_rows(engine, 4)
        engine.save_checkpoint(f"{folder}/{name}", tag="tag")
        found = {"state": merged(own_state(engine)), "weights": weights(engine)}
        found["flags"] = flags(engine)
        train_rows(engine, 2, first=4)
        found["next"] = weights(engine)
        on_rank_0(torch.save, found, f"{folder}/{name}/found")


def resume(folder, cases) -> None:
    for saved, loaded in cases.items():
        was = torch.load(f"{folder}/{saved}/found")
        engine = engine_of(loaded, seed=99, checkpoint={"load_universal": True})
        engine.load_checkpoint(f"{folder}/{saved}", tag="tag_universal")
        check_same(own_state(engine), was["state"], saved)
        exact(weights(engine), was["weights"], what=saved)
        assert flags(engine) == was["flags"] and engine.kfac.preconditioner.steps == 4, saved
        train_rows(engine, 2, first=4)
        assert not moments_of_layers(engine), saved
        # with AdamW's moments of the other parameters: of bf16 only as good as its products
        bound = (0.2 if "bf16" in saved else 1e-3) * distance(was["next"], was["weights"])
        near(weights(engine), was["next"], bound, "rounding in two steps", what=saved)


def save_convert_and_resume(folder: Path, cases: dict[str, str]) -> None:
    call_on_ranks(2, save, str(folder), [*cases])
    converted([folder / name / "tag" for name in cases])
    call_on_ranks(1, resume, str(folder), cases)


@pytest.mark.distributed
def test_a_universal_checkpoint_resumes_at_another_world_size(tmp_path):
    """ds_to_universal does not copy the kfac folder; it is found next to the converted tag. Before,
    it stopped at KFACAdamW's groups, which keep no optimizer state (KeyError: exp_avg)."""
    save_convert_and_resume(tmp_path, CASES)


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
