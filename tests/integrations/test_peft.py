"""PEFT trains a copy of a module (modules_to_save) under a longer name. K-FAC steps it as the
module itself."""

import pytest
import torch

import ds_kfac
from tests.close import exact
from tests.ranks import run_ranks

pytest.importorskip("peft", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed
SIZES = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
SIZES["num_labels"] = 3
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "KFACAdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "kfac": {"report": "none"},
}


def classifier(trained: str, *, wrapped: bool) -> torch.nn.Module:
    """A GPT-2 of which one matrix is trained: by itself, or as PEFT's copy of it."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(GPT2Config(pad_token_id=0, **SIZES, **NO_DROPOUT))
    if wrapped:
        kept = {"modules_to_save": [trained], "fan_in_fan_out": True}
        lora = LoraConfig(task_type="SEQ_CLS", target_modules=["c_fc"], **kept)
        model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        copy = f"{trained}.modules_to_save.default.weight"
        parameter.requires_grad_(name.endswith(copy if wrapped else f"{trained}.weight"))
    return model


def worker(trained: str) -> list[torch.Tensor]:
    """The matrix after three steps, of the plain model and of PEFT's."""
    weights = []
    for wrapped in (False, True):
        model = classifier(trained, wrapped=wrapped)
        (weight,) = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = ds_kfac.initialize(model=model, model_parameters=[weight], config=CONFIG)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            ids = torch.randint(1, 40, (8, 12), generator=generator)
            mask, labels = torch.ones_like(ids), ids[:, 0] % 3
            engine.backward(engine(input_ids=ids, attention_mask=mask, labels=labels).loss)
            engine.step()
        weights.append(weight.detach().clone())
        engine.destroy()
    return weights


@pytest.mark.parametrize("trained", ["score", "c_attn"])
def test_a_module_that_peft_trains_whole_is_stepped_as_without_peft(trained):
    """A head keeps Adam's direction, and queries, keys and values are three maps, whatever PEFT
    calls them."""
    ((plain, wrapped),) = run_ranks("tests.integrations.test_peft:worker", world=1, payload=trained)
    exact(wrapped, plain)
