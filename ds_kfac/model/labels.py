"""What a model's labels are of, as its class shows: of its positions, of the next ones, or of whole examples.

Hugging Face's causal language models shift labels inside; some of their classes have such a name and do not (XLNet's,
Bart's decoder alone). The code of the class that computes the loss says which.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.model.layers import value_of
from ds_kfac.model.product_code import codes_of, name_of

CAUSAL = "CausalLM", "LMHeadModel", "BertGenerationDecoder"
"""In names of classes whose position t is trained on label t + 1."""
GENERATING = "ForConditionalGeneration"
"""The same, but of a model with an encoder and a decoder."""
SAME = "XLMWithLMHeadModel", "FlaubertWithLMHeadModel"
"""Their labels are of masked tokens, by a loss in a module of theirs."""
ALIGNED = re.compile("(CTC|RNNT|TDT)(?![a-z])")
"""In names of classes whose loss has a term for each example: its labels are of no positions."""


def shifts(model: nn.Module, *, two_sided: bool) -> bool:
    """Whether position t is trained on label t + 1. The class that says so may be inside: of PEFT's, torch.compile's or
    a user's own module around it. ``two_sided``: the model has an encoder and a decoder, whose labels are of positions.
    """
    words = CAUSAL if two_sided else (*CAUSAL, GENERATING)
    inside = _inside(model)
    modules = {type(model): model, type(inside): inside} if two_sided else {type(x): x for x in inside.modules()}
    for kind, module in modules.items():
        if any(word in kind.__name__ for word in words):
            return kind.__name__ not in SAME and _shifts(kind, module)
    return False


def encoder_decoders(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(encoder, decoder) names: siblings called "encoder" and "decoder" with children (T5, BART, nn.Transformer)."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        pair = [children.get(part) for part in ("encoder", "decoder")]
        if all(part is not None and any(True for _ in part.children()) for part in pair):
            prefix = f"{name}." if name else ""
            yield f"{prefix}encoder", f"{prefix}decoder"


def aligned(model: nn.Module) -> bool:
    """Whether the loss has a term for each example, such as CTC's."""
    return ALIGNED.search(type(_inside(model)).__name__) is not None


def have_loss(labels: Tensor, model: nn.Module) -> Tensor:
    """Bool, of the shape of integer labels: which have a loss. Segmentation has a number of its own beside -100."""
    ignored = value_of(value_of(_inside(model), "config"), "semantic_loss_ignore_index")
    pixels = labels.ndim > 2 and isinstance(ignored, int)  # the same configs are of classifiers
    return (labels != -100) & (labels != ignored) if pixels else labels != -100


def of_examples(labels: Tensor, model: nn.Module) -> Mapping[str, Any]:
    """What is known of the loss of an :func:`aligned` model: of one term an example, maybe their sum."""
    config = value_of(_inside(model), "config")
    terms = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    return {"labelled": terms, "items": 1.0 if value_of(config, "ctc_loss_reduction") == "sum" else None}


def _inside(model: nn.Module) -> Any:
    """Without torch.compile's and PEFT's modules around it."""
    model = model._modules.get("_orig_mod") or model
    below: Any = getattr(model, "get_base_model", None)
    return model if below is None else below()


def _shifts(kind: Any, module: nn.Module) -> bool:
    """Whether the forward of a class with such a name shifts labels; a loss that is computed elsewhere does."""
    code = next((code for code in codes_of(kind) if code.name == "forward"), None)
    nodes = () if code is None else code.nodes
    names = {name_of(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}
    if "loss_function" in names:  # transformers' own, by the kind of class
        return value_of(module, "loss_type") in (None, "ForCausalLM", GENERATING)
    sliced = (
        node for node in nodes if isinstance(node, ast.Subscript) and re.search("label|target", name_of(node.value))
    )
    if any("shift" in name for name in names) or any("1:" in ast.unparse(node.slice) for node in sliced):
        return True
    return not any(re.search("cross_?entropy", name, re.IGNORECASE) for name in names)
