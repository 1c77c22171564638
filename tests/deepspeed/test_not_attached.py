"""A "kfac" block that nobody acts on is said, and so is a checkpoint of another optimizer."""

import pytest
import torch

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import heard
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def said(action) -> str:
    """What DeepSpeed's logger and we ourselves write meanwhile."""
    with heard("INFO") as lines:
        action()
    return "\n".join(line for line in lines if "ds_kfac" in line)


def warnings_worker(_) -> dict:
    import deepspeed

    import ds_kfac

    config = BY_NAME["z2"].config(1, torch.distributed.get_world_size())

    def start(initialize, kfac) -> str:
        model = make_net()
        given = (
            {**config, "kfac": kfac}
            if kfac is not None
            else {k: v for k, v in config.items() if k != "kfac"}
        )
        return said(
            lambda: initialize(model=model, model_parameters=model.parameters(), config=given)
        )

    found = {
        "plain": start(deepspeed.initialize, config["kfac"]),
        "plain, no block": start(deepspeed.initialize, None),
        "plain, disabled": start(deepspeed.initialize, {"enabled": False}),
        "ours, disabled": start(ds_kfac.initialize, {"enabled": False}),
        "ours, no block": start(ds_kfac.initialize, None),
    }
    engine, *_ = deepspeed.initialize(
        model=(model := make_net()),
        model_parameters=model.parameters(),
        config=BY_NAME["adam-z2"].config(1, 1),
    )
    found["named in the config"] = type(engine.kfac).__name__
    ds_kfac.enable()
    found["enabled"] = start(deepspeed.initialize, config["kfac"])
    found["enabled, no block, as others have it"] = start(deepspeed.initialize, None)
    ds_kfac.engine.entry._unattached = "as in a program whose first engine this is"
    found["enabled, no block"] = start(deepspeed.initialize, None)
    return found


def test_a_block_without_effect_is_said_once():
    first, second = run_ranks("tests.deepspeed.test_not_attached:warnings_worker", world=2)
    text = first["plain"]
    assert text.count("not attached") == 1 and "ds_kfac.enable()" in text and "DS_KFAC=1" in text
    assert second["plain"] == "", "rank 0 says it"
    assert first["plain, no block"] == first["plain, disabled"] == ""
    assert '"enabled": false' in first["ours, disabled"]
    assert "not attached" not in first["enabled"]
    for case in ("ours, no block", "enabled, no block"):
        assert (
            first[case].count(
                "this engine trains without K-FAC: the DeepSpeed config names it nowhere"
            )
            == 1
        ), first
        assert second[case] == "", "rank 0 says it"
    assert "trains without" not in first["enabled, no block, as others have it"]
    assert first["named in the config"] == "Attachment", (
        "an optimizer that only ds_kfac knows needs no enable()"
    )


def twice_worker(_) -> tuple[str, str, bool]:
    import ds_kfac

    engine = build(BY_NAME["z2"], 1)
    kept = []
    return (
        said(lambda: kept.append(ds_kfac.attach(engine))),
        said(lambda: kept.append(ds_kfac.attach(engine, engine.config["kfac"]))),
        kept == [engine.kfac, engine.kfac],
    )


def test_a_second_attach_says_that_there_is_nothing_to_do():
    first, second = run_ranks("tests.deepspeed.test_not_attached:twice_worker", world=2)
    line = "ds_kfac: attached already: this call of ds_kfac.attach changes nothing"
    assert first == (line, line, True) and second == ("", "", True), "rank 0 says it"


def frozen_worker(_) -> dict:
    """Reference models, of which the config is that of a trained one."""
    import ds_kfac

    found = {}
    for name, dtype in FROZEN:
        model = make_net().requires_grad_(False).to(dtype)
        x = torch.ones(1, 3, 13, dtype=dtype)
        expected = model(x)
        config = BY_NAME[name].config(1, 1) | {"bf16": {"enabled": dtype is torch.bfloat16}}
        engine, *_ = ds_kfac.initialize(model=model, config=config)
        found[name, dtype] = hasattr(engine, "kfac"), torch.equal(engine(x), expected)
    with pytest.raises(
        ValueError, match="all parameters are frozen: unfreeze what is to be trained"
    ):
        ds_kfac.initialize(
            model=make_net().requires_grad_(False), config=BY_NAME["adam-z2"].config(1, 1)
        )
    return found


FROZEN = [
    (name, dtype)
    for name in ("adam-z0", "z0", "adam-z3")
    for dtype in (torch.float32, torch.bfloat16)
]


def test_a_frozen_model_is_left_as_it_is():
    found = run_ranks("tests.deepspeed.test_not_attached:frozen_worker", world=1)[0]
    assert found == dict.fromkeys(FROZEN, (False, True))


def foreign_worker(folder: str) -> dict:
    found = {}
    for stage in range(4):
        adamw, kfac_adamw = BY_NAME[f"z{stage}"], BY_NAME[f"adam-z{stage}"]
        for saved, loading, block in (
            (adamw, kfac_adamw, {"enabled": False}),
            (kfac_adamw, adamw, {}),
        ):
            engine = build(saved, 1, **({"kfac": block} if block else {}))
            train(engine, 1, steps=2)
            engine.save_checkpoint(f"{folder}/{saved.name}", tag="tag")
            trained = weights(engine)
            engine.destroy()
            engine = build(loading, 1)
            try:
                engine.load_checkpoint(f"{folder}/{saved.name}", tag="tag")
                text = "loaded"
            except RuntimeError as error:
                text = f"{type(error).__name__}: {error}"
            engine.destroy()
            engine = build(loading, 1)
            remedy = {"load_module_only": True, "load_optimizer_states": False}
            engine.load_checkpoint(f"{folder}/{saved.name}", tag="tag", **remedy)
            same = all(torch.equal(w, trained[name]) for name, w in weights(engine).items())
            train(engine, 1, steps=1)
            engine.destroy()
            found[saved.name, loading.name] = text, same
    return found


def test_another_optimizers_checkpoint_says_what_to_do(tmp_path):
    found = run_ranks(
        "tests.deepspeed.test_not_attached:foreign_worker", world=1, payload=str(tmp_path)
    )[0]
    assert len(found) == 8
    for case, (text, same) in found.items():
        if case[0].endswith("z0"):  # moments of what both step by AdamW go on
            assert text == "loaded", (case, text)
        else:
            remedy = "load_module_only=True, load_optimizer_states=False"
            assert text.startswith("CheckpointError") and remedy in text, (case, text)
        assert same, f"{case}: the remedy has to work"
