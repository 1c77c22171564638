"""The blocks that are known are those of transformers' code: without its values an attention's
output is zero, without its gate that of a gated layer. A cut elsewhere would leave some of them."""

import json

import pytest
import torch

from ds_kfac.model.scan import LayerChoice, scan
from tests.integrations.tiny_models import Architecture, batch_of, tiny
from tests.ranks import ROOT

pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")

CASES = {
    "gpt2": {"c_attn": 2},
    "openai-gpt": {"c_attn": 2},
    "gpt_bigcode": {"c_attn": 2},
    "codegen": {"qkv_proj": 1},
    "phi3": {"qkv_proj": 2, "gate_up_proj": 0},
    "mpt": {"Wqkv": 2},
    "dbrx": {"Wqkv": 2},
    "modernbert": {"Wqkv": 2, "Wi": 0},
    "gpt_neox": {"query_key_value": 2},
    "falcon": {"query_key_value": 2},
    "jetmoe": {"kv_proj": 1, "input_linear": 0},
    "mixtral": {"gate_up_proj": 0},
    "gpt_oss": {"gate_up_proj": 0},
    "llama4_text": {"gate_up_proj": 0},
    "granitemoe": {"gate_up_proj": 0},
    "deepseek_v3": {"kv_b_proj": 1},
    "mamba": {"in_proj": 0},
    "mamba2": {"in_proj": 1},
    "zamba": {"in_proj": 0},
    "jamba": {"in_proj": 0},
    "bamba": {"in_proj": 1},
    "lfm2_moe": {"in_proj": 0},
    "qwen3_next": {"in_proj_qkvz": 2},
    "qwen3_5_text": {"in_proj_qkv": 2},
}
"""Architecture -> end of a weight's name -> the block without which the module's output is zero."""


def first(output):
    return output if isinstance(output, torch.Tensor) else first(output[0])


def run(model, holder, batch):
    """The largest output of a module."""
    seen = []
    handle = holder.register_forward_hook(
        lambda module, inputs, output: seen.append(float(first(output).abs().max()))
    )
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return max(seen, default=None)


def without(parameter, layer, block):
    """Zero in the rows of one block, as they lie in the parameter."""
    index, count = layer.part
    O, I = layer.G.dim, layer.A.dim - (layer.bias is not None)  # noqa: E741
    weight = parameter.data.view(count, *((I, O) if layer.kind == "Conv1D" else (O, I)))[index]
    rows = weight.mT if layer.kind == "Conv1D" else weight
    rows.unflatten(0, (-1, sum(layer.blocks))).split(layer.blocks, dim=1)[block].zero_()


@pytest.mark.parametrize("name", CASES)
def test_the_blocks_of_known_models_are_those_of_their_code(name):
    rows = json.loads((ROOT / "benchmarks/results/coverage/models.json").read_text())["models"]
    row = Architecture(name, rows[name]["head"])
    torch.manual_seed(0)
    model, batch = tiny(row).eval(), batch_of(row)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    layers = scan(model, LayerChoice()).layers
    for end, block in CASES[name].items():
        own = [
            layer
            for layer in layers
            if layer.weight.removesuffix(".weight").endswith("." + end) and layer.blocks
        ]
        weight = own[0].weight
        holder = model.get_submodule(weight.removesuffix(".weight").rpartition(".")[0])
        assert run(model, holder, batch) > 0, (name, end)
        parameter = model.get_parameter(weight)
        kept = parameter.detach().clone()
        for other in range(len(own[0].blocks)):
            for layer in own:
                if layer.weight == weight:
                    without(parameter, layer, other)
            assert run(model, holder, batch) == 0 or other != block, (name, end, own[0].blocks)
            parameter.data.copy_(kept)
