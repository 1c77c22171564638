"""Which rows of a layer's matrix are maps of their own, and which large matrices are cut into layers.

**Blocks**: queries, keys and values in one weight, a gate beside what it gates, the projections of latent attention and
of state space models. They share A; each is orthogonalized and sized by itself, as with a weight of its own. Of names
in use (:data:`CUT`) the code around a layer says where its outputs are cut (``cuts.py``); for others, :func:`known`,
numbers do that only modules of that kind have. If neither does, the matrix is one map. The attach report says what was
taken by its name alone, and what has such a name and is one map. ``kfac.adam.blocks`` names others. Sizes are those of
:attr:`ds_kfac.model.layers.LayerSpec.blocks`.

**Parts**: a head over a large vocabulary is cut into parts of its outputs, a layer each: one owner would be too few.
Only where that changes nothing but who does it: G is the identity, and the update rule steps along rows that no product
mixes. The parts have one A. Their names depend on the layer's shape alone: a checkpoint fits any number of ranks.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from ds_kfac.curvature.factor import Side
from ds_kfac.model.cuts import HEADS, Sizes, cut_of, value_of
from ds_kfac.model.layers import LayerSpec

KINDS = ("Linear", "Conv1D")
"""Kinds of layers that have blocks: a tensor-parallel shard has some rows of each, in an order of its framework's."""
CUT = (
    "c_attn", "qkv", "qkv_proj", "Wqkv", "query_key_value", "kv_proj", "to_kv", "gate_up_proj", "gate_up",
    "input_linear", "Wi", "w12", "weights_in", "in_proj"
)  # fmt: skip
"""Ends of names of layers that are cut by the code around them."""
SEVERAL = tuple(name for name in CUT if name not in ("in_proj", "input_linear", "Wi"))
"""Of them those that are several maps by their name."""
BY_NAME = "by its name alone: the code does not show where its outputs are cut (kfac.adam.blocks)"
ONE_MAP = "as one map: the code does not show where its outputs are cut (kfac.adam.blocks)"
Blocks = int | Sequence[int]
"""How many equal ones there are, one after the other; or their sizes, repeated up to the last row."""
SHARED_HEADS = (
    "num_kv_heads", "num_key_value_heads", "kv_n_heads", "n_kv_heads", "n_kv_head", "num_query_groups", "n_query_groups"
)  # fmt: skip


def with_blocks(layer: LayerSpec, modules: Mapping[str, nn.Module], chosen: Sequence[tuple[str, Blocks]]) -> LayerSpec:
    """The layer, with its blocks; ``chosen``, (regex for the end of a name, its blocks), go before the others.

    Raises:
        ValueError: a matrix does not have as many rows.
    """
    if layer.kind not in KINDS or layer.groups > 1:
        return layer
    name = weight_name(layer)
    rows = layer.shape[-2]
    for pattern, blocks in chosen:
        if named(pattern, name):
            return replace(layer, blocks=of_rows(rows, blocks, f"kfac.adam.blocks {pattern!r}: {name}"))
    holder, _, last = re.sub(r"(\.\d+)+$", "", name).rpartition(".")  # of a list of modules its name
    module, guessed = modules.get(holder), ""
    finer = last == "in_proj" and value_of(module, "A_log") is not None  # Mamba2's convolution has three of them in one
    sizes = cut_of(module, last, rows) if last in CUT and not finer else None
    if sizes is None:
        try:
            sizes = known(last, module, rows)
        except _Unknown:
            sizes = ()
        if last in SEVERAL and not isinstance(module, nn.MultiheadAttention):
            guessed = BY_NAME if sizes else ONE_MAP
    fits = len(sizes) > 1 and min(sizes) > 0 and rows % sum(sizes) == 0
    return replace(layer, blocks=sizes if fits else (), guessed=guessed)


def named(pattern: str, name: str) -> bool:
    """Whether a pattern is the end of a name, from a dot or the beginning on: "head" is "head" and "vit.head", but
    neither "lm_head" nor "heads.0.key" nor "head.dense"."""
    return re.search(rf"(?:^|\.)(?:{pattern})$", name) is not None


def weight_name(layer: LayerSpec) -> str:
    """What patterns of blocks are matched with."""
    return layer.weight.removesuffix(".weight")


def of_rows(rows: int, blocks: Blocks, where: str) -> Sizes:
    """Sizes of the blocks of so many rows; () of a single one.

    Raises:
        ValueError: they do not fit.
    """
    each = blocks if isinstance(blocks, int) else sum(blocks)
    if rows % each:
        what = f"{blocks} equal blocks" if isinstance(blocks, int) else f"blocks of {list(blocks)} rows"
        raise ValueError(f"{where} has {rows} rows, which are no {what}")
    sizes = (rows // blocks,) * blocks if isinstance(blocks, int) else tuple(blocks)
    return sizes if len(sizes) > 1 else ()


def rows_of(layer: LayerSpec) -> str:
    """Of each block, for people: "128 + 128 + 128", "8 x (64 + 64)"; of many equal ones "32 of 128"."""
    blocks, repeats = layer.blocks, layer.shape[-2] // sum(layer.blocks)
    text = (
        f"{len(blocks)} of {blocks[0]}" if len(set(blocks)) == 1 and len(blocks) > 3 else " + ".join(map(str, blocks))
    )
    return f"{repeats} x ({text}) rows" if repeats > 1 else f"{text} rows"


class _Unknown(Exception):
    """What the module says does not tell the blocks."""


def _number(module: nn.Module | None, *names: str, default: int | None = None) -> int:
    """What a module says of its sizes: its first attribute of these names, then its config's, else ``default``, else
    raises :class:`_Unknown`."""
    for place in (module, value_of(module, "config")):
        for name in names:
            if isinstance(value := value_of(place, name), int) and value > 0:
                return value
    if default is None:
        raise _Unknown
    return default


def known(name: str, module: nn.Module | None, rows: int) -> Sizes:
    """Blocks of a weight by the end of its name and what its module says, () if that is none of these; raises
    :class:`_Unknown`. transformers 5.23; tests/integrations/test_blocks.py holds each of them."""
    number = partial(_number, module)
    match name:
        case "in_proj_weight":
            return (rows // 3,) * 3 if isinstance(module, nn.MultiheadAttention) else ()
        case "query_key_value":  # for each head, or each group of queries with one key and one value, these three
            heads = number(*HEADS)
            shared = number(*SHARED_HEADS, default=heads)
            width = rows // (heads + 2 * shared)
            return heads // shared * width, width, width
        case "kv_a_proj_with_mqa":  # the latent of keys and values, and the key that all heads share
            rank = number("kv_lora_rank")
            return rank, rows - rank
        case "kv_b_proj":  # for each head its key and its value
            return number("qk_nope_head_dim"), number("v_head_dim")
        case "in_proj":
            # Mamba's inputs and gates, in turn in Zamba; Mamba2's gates, inputs, B, C, steps
            inner = number("intermediate_size", "ssm_intermediate_size", "d_ssm")
            if value_of(module, "A_log") is None:
                return ()
            if rows == 2 * inner:
                return (1, 1) if value_of(module, "n_mamba_heads") else (inner, inner)
            heads = number("num_heads")
            return inner, inner, *((rows - 2 * inner - heads) // 2,) * 2, heads
        case "x_proj":  # Mamba's steps, B and C
            states = number("ssm_state_size")
            return rows - 2 * states, states, states
        case "in_proj_qkv":  # a gated delta net's queries, keys, values
            keys = number("key_dim")
            return keys, keys, rows - 2 * keys
        case "in_proj_qkvz":  # for each head of keys: query, key, and its values, and as many gates
            heads, width = number("num_k_heads"), number("head_k_dim")
            values = (rows // heads - 2 * width) // 2
            return width, width, values, values
        case "in_proj_ba":  # for each head of keys: two numbers of each of its values
            return (rows // (2 * number("num_k_heads")),) * 2
    return ()


LARGEST = 1 << 27
"""Elements of a layer that stays whole: a share of 8.6 G parameters on 64 ranks."""
PART = 1 << 25
"""Elements of a part, at most."""


def cut(layers: Iterable[LayerSpec], by_rows: Callable[[LayerSpec], bool]) -> tuple[LayerSpec, ...]:
    """The layers, large ones as parts. ``by_rows``: whether the rule's step of an output does not depend on others."""
    found: list[LayerSpec] = []
    for layer in layers:
        count, name = _parts(layer) if layer.numel > LARGEST and by_rows(layer) else 1, layer.name
        if count == 1:
            found.append(layer)
            continue
        part = replace(layer, G=Side.identity(layer.G.dim // count), blocks=())
        for index in range(count):
            shares = f"{name}.0" if index else None
            found.append(replace(part, name=f"{name}.{index}", part=(index, count), shares=shares))
    return tuple(found)


def _parts(layer: LayerSpec) -> int:
    """The smallest number of equal parts that are small enough; 1 if there is none, and of any but an upright matrix of
    one module, whose statistics are of A alone: no shard, copy, stack or groups."""
    whole = (layer.part, layer.cut, layer.groups, layer.copies) == ((0, 1), (1, 1), 1, 1) and not layer.product
    if not whole or layer.kind != "Linear" or layer.A.block == 0 or layer.G.block > 0:
        return 1
    return next((n for n in range(-(-layer.numel // PART), layer.G.dim + 1) if layer.G.dim % n == 0), 1)
