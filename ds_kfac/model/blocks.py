"""Find row blocks of a matrix that are separate linear maps, and cut large matrices into several
layers.

**Blocks** are the linear maps of a weight that holds several of them. Examples are fused QKV, a
gate with its values, and the projections of latent attention and state space models. The blocks
share A, but each is orthogonalized and scaled like a separate weight. The user names blocks in
``kfac.adam.blocks``. For names that are in common use, :func:`known_sizes` computes the blocks from
attributes of the module around the layer, such as its number of heads. Any other matrix is treated
as one map. The attach report lists matrices whose blocks were chosen by their name alone, and
matrices that are treated as one map although their name suggests several.
:attr:`ds_kfac.model.layers.LayerSpec.blocks` holds the sizes of a layer's blocks.

**Parts** are the layers into which a large matrix is cut. Each part has some of the matrix's
outputs. A head over a large vocabulary is cut into parts, because a single rank would be too slow
for it. A matrix is cut only if G is the identity and the update rule does not mix rows, so that the
cut does not change the update. Parts share A. The number of parts depends on the layer's shape
alone, so that a checkpoint fits any number of ranks.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import LayerSpec, parameter_shape, value_of

KINDS = ("Linear", "Conv1D")
"""Kinds of layers that may have blocks. A tensor-parallel shard may not have blocks, because it
holds some rows of each block in an unknown order."""
SEVERAL = (
    "c_attn",
    "qkv",
    "qkv_proj",
    "Wqkv",
    "query_key_value",
    "to_kv",
    "gate_up_proj",
    "gate_up",
    "w12",
    "weights_in",
)
"""Weights with one of these names (last component only) usually consist of several maps."""
BY_NAME = "by its name (kfac.adam.blocks)"
IN_TURN = ("GptOssExperts", "OpenAIPrivacyFilterExperts")
"""Modules in which the rows of gates and values alternate."""
ONE_MAP = "as one map: nothing shows its parts (kfac.adam.blocks)"
WRAPPERS = (
    r"modules_to_save\.[^.]+",
    "original_module",
    "base_layer",
    "_orig_mod",
    "_checkpoint_wrapped_module",
)
"""Regexes of suffixes that PEFT, torch.compile and torch's checkpoint_wrapper append to the name of
a module that they wrap."""
WRAPPED = re.compile(rf"(\.({'|'.join(WRAPPERS)}))+$")
Sizes = tuple[int, ...]
SizesOf = Callable[[nn.Module | None, int], Sizes]
"""A function that gets a weight's module and the weight's number of rows, and returns the sizes of
the weight's blocks."""
Blocks = int | Sequence[int]
"""Either the number of equal blocks, or the sizes of the blocks. The sequence of sizes repeats down
to the last row."""
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head")
SHARED_HEADS = (
    "num_kv_heads",
    "num_key_value_heads",
    "kv_n_heads",
    "n_kv_heads",
    "n_kv_head",
    "kv_heads",
    "num_query_groups",
    "n_query_groups",
)


def with_blocks(
    layer: LayerSpec, modules: Mapping[str, nn.Module], chosen: Sequence[tuple[str, Blocks]]
) -> LayerSpec:
    """Return a layer with its blocks.

    Args:
        layer: the layer.
        modules: the model's modules by name.
        chosen: (regex for the end of a name, blocks) pairs. The first pair that matches the layer's
            name decides, and takes precedence over :func:`known_sizes`.

    Raises:
        ValueError: the number of rows is not a multiple of the sum of the chosen blocks' sizes.
    """
    if layer.kind not in KINDS or layer.groups > 1:
        return layer
    name = weight_name(layer)
    rows = layer.shape[-2]
    for pattern, blocks in chosen:
        if named(pattern, name):
            where = f"kfac.adam.blocks {pattern!r}: {name}"
            return replace(layer, blocks=block_sizes(rows, blocks, where))
    # an entry of a ModuleList is looked up by the list's name
    holder, _, last = re.sub(r"(\.\d+)+$", "", unwrapped(name)).rpartition(".")
    module = modules.get(holder)
    guessed = ""
    try:
        sizes = known_sizes(last, module, rows)
    except LookupError:  # the module lacks an attribute that gives the sizes
        sizes = ()
    fits = len(sizes) > 1 and min(sizes) > 0 and rows % sum(sizes) == 0
    if last in SEVERAL:
        guessed = BY_NAME if fits else ONE_MAP
    return replace(layer, blocks=sizes if fits else (), guessed=guessed)


def named(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a whole name, or everything after one of the name's dots.

    "head" matches "head" and "vit.head", but not "lm_head", "heads.0.key" or "head.dense". The
    pattern need not contain the suffix of a wrapper: "score" also matches
    "score.modules_to_save.default".
    """
    ends_with = re.compile(rf"(?:^|\.)(?:{pattern})$")
    return any(ends_with.search(candidate) for candidate in (name, unwrapped(name)))


def unwrapped(name: str) -> str:
    """Return a module's name without the suffixes that wrappers have appended."""
    return WRAPPED.sub("", name)


def weight_name(layer: LayerSpec) -> str:
    """Return the name against which patterns of blocks are matched."""
    return layer.weight.removesuffix(".weight")


def block_sizes(rows: int, blocks: Blocks, where: str) -> Sizes:
    """Return the sizes of the blocks of a matrix with ``rows`` rows; () if it is a single block.

    Args:
        rows: number of rows of the matrix.
        blocks: a number of equal blocks, or their sizes.
        where: text that names the setting and the matrix in the error message.

    Raises:
        ValueError: the blocks do not fit.
    """
    if isinstance(blocks, int):
        fits = rows % blocks == 0
        sizes: Sizes = (rows // blocks,) * blocks
        what = f"{blocks} equal blocks"
    else:
        fits = rows % sum(blocks) == 0
        sizes = tuple(blocks)
        what = f"blocks of {list(blocks)} rows"
    if not fits:
        raise ValueError(f"{where} has {rows} rows, which cannot be cut into {what}")
    return sizes if len(sizes) > 1 else ()


def blocks_text(layer: LayerSpec) -> str:
    """Return a layer's blocks as text for people.

    For example "128 + 128 + 128 rows", "8 x (64 + 64) rows", or, for many equal blocks, "32 of 128
    rows".
    """
    blocks = layer.blocks
    repeats = layer.shape[-2] // sum(blocks)
    text = " + ".join(map(str, blocks))
    if len(set(blocks)) == 1 and len(blocks) > 3:
        text = f"{len(blocks)} of {blocks[0]}"
    return f"{repeats} x ({text}) rows" if repeats > 1 else f"{text} rows"


def _number(module: nn.Module | None, *names: str, default: int | None = None) -> int:
    """Return the first positive integer among a module's attributes ``names``, or else among its
    config's.

    Args:
        default: the result if there is no such attribute.

    Raises:
        LookupError: there is no such attribute, and no default.
    """
    for place in (module, value_of(module, "config")):
        for name in names:
            value = value_of(place, name)
            if isinstance(value, int) and value > 0:
                return value
    if default is None:
        raise LookupError(names)
    return default


def _inputs(module: Any) -> int:
    """Return I, the number of inputs of a linear module's weight [.., O, I]; 0 without a weight."""
    weight = value_of(module, "weight")
    return 0 if weight is None else parameter_shape(weight)[-1]


def known_sizes(name: str, module: nn.Module | None, rows: int) -> Sizes:
    """Return the blocks of a weight, given the last part of its name; () if no blocks are known for
    this name.

    The blocks are right for transformers 5.23. tests/integrations/test_blocks.py compares them with
    the code of transformers.

    Args:
        module: the module that holds the weight. Its attributes and config give the sizes.
        rows: number of rows of the weight.

    Raises:
        LookupError: the module lacks an attribute that gives the sizes.
    """
    sizes_of = BY_LAST_NAME.get(name)
    return () if sizes_of is None else sizes_of(module, rows)


def _heads(module: nn.Module | None, default: int | None = None) -> tuple[int, int]:
    """Return (number of query heads, number of key heads)."""
    heads = _number(module, *HEADS, default=default)
    return heads, _number(module, *SHARED_HEADS, default=heads)


def _queries_keys_values(module: nn.Module | None, rows: int) -> Sizes:
    class_name = type(module).__name__
    if class_name == "CodeGenAttention":  # the blocks repeat for each quarter of the heads
        return (rows // 12,) * 3
    # the blocks repeat for each head
    if class_name == "MiniMaxLightningAttention" or value_of(module, "multi_query") is False:
        return (rows // (3 * _number(module, *HEADS)),) * 3
    if value_of(module, "q_attn") is not None:  # GPT-2's cross-attention: keys and values
        return (rows // 2,) * 2
    heads, shared = _heads(module, default=1)
    width = rows // (heads + 2 * shared)
    return heads * width, shared * width, shared * width


def _queries_key_value_of_each_key_head(module: nn.Module | None, rows: int) -> Sizes:
    heads, shared = _heads(module)
    width = rows // (heads + 2 * shared)
    return heads // shared * width, width, width


def _gate_and_values(module: nn.Module | None, rows: int) -> Sizes:
    if type(module).__name__ in IN_TURN:
        return 1, 1
    return (rows // 2,) * 2


def _gate_and_values_before(after: str) -> SizesOf:
    """Return a function that finds the blocks of a weight that may hold a gate and its values. The
    weight holds both if the linear layer that follows (the module's attribute ``after``) has half
    as many inputs as the weight has rows."""

    def sizes(module: nn.Module | None, rows: int) -> Sizes:
        is_gated = 2 * _inputs(value_of(module, after)) == rows
        return (rows // 2,) * 2 if is_gated else ()

    return sizes


def _keys_and_values(module: nn.Module | None, rows: int) -> Sizes:
    """Return JetMoE's two blocks, the keys and the values. DeepSeek's weight of the same name is
    one map, and its module does not have ``kv_projection_size``."""
    return (_number(module, "kv_projection_size"),) * 2


def _torch_attention(module: nn.Module | None, rows: int) -> Sizes:
    return (rows // 3,) * 3 if isinstance(module, nn.MultiheadAttention) else ()


def _latent_and_shared_key(module: nn.Module | None, rows: int) -> Sizes:
    """Return the blocks: the latent of keys and values, and the key that all heads share."""
    rank = _number(module, "kv_lora_rank")
    return rank, rows - rank


def _key_and_value_of_each_head(module: nn.Module | None, rows: int) -> Sizes:
    return _number(module, "qk_nope_head_dim"), _number(module, "v_head_dim")


def _mamba_inputs(module: nn.Module | None, rows: int) -> Sizes:
    """Mamba's input projection has inputs and gates, whose rows alternate in Zamba. Mamba2's input
    projection has gates, inputs, B, C and time steps. The input projection of LFM's short
    convolution has B, C and inputs."""
    if type(module).__name__.endswith("ShortConv"):
        return (rows // 3,) * 3
    if value_of(module, "A_log") is None:
        return ()
    inner = _number(module, "intermediate_size", "ssm_intermediate_size", "d_ssm")
    if rows == 2 * inner:
        return (1, 1) if value_of(module, "n_mamba_heads") else (inner, inner)
    heads = _number(module, "num_heads")
    states = (rows - 2 * inner - heads) // 2
    return inner, inner, states, states, heads


def _mamba_time_steps_and_states(module: nn.Module | None, rows: int) -> Sizes:
    states = _number(module, "ssm_state_size")
    return rows - 2 * states, states, states


def _delta_net_queries_keys_values(module: nn.Module | None, rows: int) -> Sizes:
    keys = _number(module, "key_dim")
    return keys, keys, rows - 2 * keys


def _delta_net_with_gates(module: nn.Module | None, rows: int) -> Sizes:
    """Return the blocks, which repeat for each key head: the query, the key, the key's values, and
    as many gates as values."""
    heads = _number(module, "num_k_heads")
    width = _number(module, "head_k_dim")
    values = (rows // heads - 2 * width) // 2
    return width, width, values, values


def _delta_net_b_and_a(module: nn.Module | None, rows: int) -> Sizes:
    """Return the two blocks, which repeat for each key head. The first has a row of b for each
    value head of this key head. The second has a row of a for each of these value heads."""
    return (rows // (2 * _number(module, "num_k_heads")),) * 2


BY_LAST_NAME: dict[str, SizesOf] = {
    **dict.fromkeys(("c_attn", "qkv", "qkv_proj", "Wqkv"), _queries_keys_values),
    "query_key_value": _queries_key_value_of_each_key_head,
    **dict.fromkeys(("gate_up_proj", "gate_up", "w12", "weights_in", "to_kv"), _gate_and_values),
    "input_linear": _gate_and_values_before("output_linear"),
    "Wi": _gate_and_values_before("Wo"),
    "kv_proj": _keys_and_values,
    "in_proj_weight": _torch_attention,
    "kv_a_proj_with_mqa": _latent_and_shared_key,
    "kv_b_proj": _key_and_value_of_each_head,
    "in_proj": _mamba_inputs,
    "x_proj": _mamba_time_steps_and_states,
    "in_proj_qkv": _delta_net_queries_keys_values,
    "in_proj_qkvz": _delta_net_with_gates,
    "in_proj_ba": _delta_net_b_and_a,
}
"""Last component of a weight's name -> function that returns the weight's blocks."""

LARGEST = 1 << 27
"""A layer with more elements than this is cut. The number is one rank's share of a model with 8.6
billion parameters on 64 ranks."""
PART = 1 << 25
"""Limit on the number of elements of a part."""


def cut(layers: Iterable[LayerSpec], by_rows: Callable[[LayerSpec], bool]) -> tuple[LayerSpec, ...]:
    """Return the layers, with large ones cut into parts.

    Args:
        layers: the layers.
        by_rows: returns whether the update rule updates each row of a layer independently of the
            other rows.
    """
    specs: list[LayerSpec] = []
    for layer in layers:
        count = 1
        if layer.numel > LARGEST and by_rows(layer):
            count = _parts(layer)
        if count == 1:
            specs.append(layer)
            continue
        name = layer.name
        part = replace(layer, G=Side.identity(layer.G.dim // count), blocks=())
        for index in range(count):
            shares = f"{name}.0" if index else None
            specs.append(replace(part, name=f"{name}.{index}", part=(index, count), shares=shares))
    return tuple(specs)


def _parts(layer: LayerSpec) -> int:
    """Return the smallest number of equal parts with at most :data:`PART` elements each; 1 if the
    layer cannot be cut.

    Only a Linear with a factor A and without a factor G can be cut. It must not be a
    tensor-parallel shard or copy, a product, or part of a stack, and must not have groups.
    """
    is_alone = layer.part == (0, 1) and layer.cut == (1, 1) and layer.groups == layer.copies == 1
    if not is_alone or layer.product or layer.kind != "Linear":
        return 1
    if layer.A.block == 0 or layer.G.block > 0:
        return 1
    fewest = -(-layer.numel // PART)  # rounded up
    for count in range(fewest, layer.G.dim + 1):
        if layer.G.dim % count == 0:
            return count
    return 1
