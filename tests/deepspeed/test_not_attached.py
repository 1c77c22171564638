"""A "kfac" block that nobody acts on is said, and so is a second attach; a frozen model is left as
it is."""

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_kfac
from tests.close import exact
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build
from tests.deepspeed.said import heard
from tests.models import make_net
from tests.ranks import on_ranks

pytestmark = pytest.mark.distributed


def said(action) -> str:
    """What DeepSpeed's logger and we ourselves write meanwhile."""
    with heard("INFO") as lines:
        action()
    return "\n".join(line for line in lines if "ds_kfac" in line)


def started(initialize, kfac: dict | None) -> str:
    """What is said when an engine is made with this block, or with none."""
    model, config = make_net(), BY_NAME["z2"].config(1, 2) | {"kfac": kfac}
    if kfac is None:
        del config["kfac"]
    return said(lambda: initialize(model=model, model_parameters=model.parameters(), config=config))


WITHOUT = "this engine trains without K-FAC: the DeepSpeed config names it nowhere"


@on_ranks(2)
def test_a_block_without_effect_is_said_once():
    """By rank 0."""
    first, block, off = dist.get_rank() == 0, {}, {"enabled": False}
    text = started(deepspeed.initialize, block)
    if first:
        assert text.count("not attached") == 1
        assert "ds_kfac.enable()" in text and "DS_KFAC=1" in text
    else:
        assert text == ""
    assert started(deepspeed.initialize, None) == started(deepspeed.initialize, off) == ""
    assert ('"enabled": false' in started(ds_kfac.initialize, off)) == first
    assert started(ds_kfac.initialize, None).count(WITHOUT) == first
    model, config = make_net(), BY_NAME["adam-z2"].config(1, 2)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    assert engine.kfac, "an optimizer that only ds_kfac knows needs no enable()"
    ds_kfac.enable()
    assert "not attached" not in started(deepspeed.initialize, block)
    assert "trains without" not in started(deepspeed.initialize, None), "as others have it"
    ds_kfac.engine.entry._unattached = "as in a program whose first engine this is"
    assert started(deepspeed.initialize, None).count(WITHOUT) == first


@on_ranks(2)
def test_a_second_attach_says_that_there_is_nothing_to_do():
    engine = build(BY_NAME["z2"], 1)
    line = "ds_kfac: attached already: this call of ds_kfac.attach changes nothing"
    for given in ((), (engine.config["kfac"],)):
        kept = []
        text = said(lambda: kept.append(ds_kfac.attach(engine, *given)))  # noqa: B023
        assert kept == [engine.kfac] and text == (line if dist.get_rank() == 0 else "")


@on_ranks(1)
def test_a_frozen_model_is_left_as_it_is():
    """A reference model, of which the config is that of a trained one."""
    for name in ("adam-z0", "z0", "adam-z3"):
        for dtype in (torch.float32, torch.bfloat16):
            model = make_net().requires_grad_(False).to(dtype)
            x = torch.ones(1, 3, 13, dtype=dtype)
            expected = model(x)
            config = BY_NAME[name].config(1, 1) | {"bf16": {"enabled": dtype is torch.bfloat16}}
            engine, *_ = ds_kfac.initialize(model=model, config=config)
            assert not hasattr(engine, "kfac"), name
            exact(engine(x), expected, what=name)
    frozen = "all parameters are frozen: unfreeze what is to be trained"
    with pytest.raises(ValueError, match=frozen):
        config = BY_NAME["adam-z2"].config(1, 1)
        ds_kfac.initialize(model=make_net().requires_grad_(False), config=config)
