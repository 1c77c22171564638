"""Which layers are found, and that everything else is listed with a reason."""

import pytest
import torch
from torch import nn

from ds_kfac.curvature.factor import Side
from ds_kfac.diagnostics.share import share_of
from ds_kfac.directions.kfac_adamw.matrices import biases_of, other_matrices
from ds_kfac.model.layers import Linear
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.scan import LayerChoice, scan
from tests.model.recorder import Recorder
from tests.model.written import module, written
from tests.rule_cases import Conv1D


def reasons(model: nn.Module, **choice) -> dict[str, str]:
    return {left.name: left.reason for left in scan(model, LayerChoice(**choice)).skipped}


def names(model: nn.Module, choice: LayerChoice | None = None, **options) -> list[str]:
    return [layer.name for layer in scan(model, choice, **options).layers]


class Property(nn.Linear):
    """Its weight is a property."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.raw = nn.Parameter(self._parameters.pop("weight").detach())

    weight = property(lambda self: 2 * self.raw)


class Drawing(nn.Module):
    def forward(self, weight):
        return weight + torch.rand_like(weight)


def drawn() -> nn.Linear:
    linear = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(linear, "weight", Drawing())
    return linear


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


STANDARDIZED = written(
    "weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)\n"
    "return F.conv2d(x, weight, self.bias)",
    nn.Conv2d,
)
SHIFTED = written(
    "def _conv_forward(self, x, weight, bias):\n    weight = weight - weight.mean()\n"
    "    return super(type(self), self)._conv_forward(x, weight, bias)",
    nn.Conv2d,
)
CODEBOOK = "return self.weight.index_select(0, index=(x @ self.weight.T).argmin(-1))"
INDEXED = "table = self.weight.float()\nreturn table[x] @ self.weight.T"
TABLE_AND_HEAD = "def logits(self, x):\n    return x @ self.weight.T"
HEAD_AS_TABLE = """
def __init__(self):
    nn.Module.__init__(self)
    self.head = nn.Linear(4, 9, bias=False)

def forward(self, x):
    return self.head(self.head.weight[x])
"""
# as I-BERT has it
TABLE = written("return F.embedding(x, self.weight)")
HALF_TRAINED = nn.LayerNorm(4)
HALF_TRAINED.bias.requires_grad_(False)
TIED = nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
TIED["head"].weight = TIED["embed"].weight
HALF_TIED = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
HALF_TIED[1].weight = HALF_TIED[0].weight  # each with a bias of its own
WIDE = nn.ConvTranspose2d(4, 4, 2, dilation=2, output_padding=1)
IS_TABLE = "rows are looked up in weight: it is a table"
LEFT_ALONE = {
    "frozen": (frozen(nn.Linear(4, 4)), "weight is frozen"),
    "a norm of half": (HALF_TRAINED, "only one of its weight and bias is trained"),
    "a norm of ranks": (nn.SyncBatchNorm(4), "statistics of all ranks"),
    "an embedding": (nn.Embedding(9, 4), "no K-FAC layer type for it"),
    "complex": (nn.Linear(4, 4, dtype=torch.complex64), "weight is complex64"),
    "without elements": (nn.Linear(4, 0), "weight has no elements"),
    "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "computed"),
    "an old weight_norm": (nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), "computed"),
    "drawn": (drawn(), "computed"),
    "a property": (type("Inheriting", (Property,), {})(4, 4), "computed"),
    "standardized": (STANDARDIZED(3, 4, 3), "overrides Conv2d.forward, and does not convolve"),
    "shifted": (SHIFTED(3, 4, 3), "overrides Conv2d._conv_forward, and does not convolve"),
    "a wide output_padding": (WIDE, "its output_padding is not below its stride"),
    "tied": (TIED, "weight is shared by it.embed, it.head"),
    "tied but their biases": (HALF_TIED, "weight is shared by it.0, it.1"),
    "table and head": (module(TABLE_AND_HEAD, TABLE, weight=(9, 4)), IS_TABLE),
    "a table by index": (module(INDEXED, weight=(9, 4)), IS_TABLE),
    "codebook": (module(CODEBOOK, weight=(9, 4)), IS_TABLE),
    "head as table": (written(HEAD_AS_TABLE)(), IS_TABLE),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_everything_else_is_listed_with_its_reason(name):
    module, reason = LEFT_ALONE[name]
    model = nn.ModuleDict({"keep": nn.Linear(4, 4), "it": module})
    assert names(model) == ["keep"]
    assert reason in " ".join(reasons(model).values())
    if reason == IS_TABLE:
        assert share_of(model, scan(model)).fraction == 1, "as of an embedding"


def test_a_parametrized_weight_is_not_computed_to_know_that_it_is_one():
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.ModuleDict({"keep": nn.Linear(4, 4), "drawn": drawn(), "normed": normed})
    state, before = torch.get_rng_state(), normed.parametrizations.weight[0]._u.clone()
    assert {"drawn", "normed"} <= reasons(model).keys()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(normed.parametrizations.weight[0]._u, before)


def test_linear_and_conv1d_are_found_with_their_shapes():
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Linear(5, 4, bias=False), Conv1D(4, 7), nn.Linear(7, 2)
    )
    model[3].bias.requires_grad_(False)  # a frozen bias is no column
    found = [(layer.kind, layer.A.dim, layer.G.dim, layer.bias) for layer in scan(model).layers]
    assert found == [
        ("Linear", 4, 5, "0.bias"),
        ("Linear", 5, 4, None),
        ("Conv1D", 5, 7, "2.bias"),
        ("Linear", 7, 2, None),
    ]
    assert scan(nn.Linear(2, 2)).layers[0].weight == "weight"


def test_a_bias_that_another_module_only_holds_is_the_layers_and_no_two_layers_have_one():
    """As RoBERTa's head has it."""
    holding = module("return self.decoder(x)", decoder=nn.Linear(4, 9))
    holding.bias = holding.decoder.bias
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "holding": holding})
    (_, layer) = scan(model).layers
    assert layer.name == "holding.decoder" and layer.bias == "holding.bias"
    model.add_module("b", nn.Linear(4, 9))
    model["b"].bias = holding.bias
    assert reasons(model)["b"] == "bias is shared with holding.decoder"
    assert reasons(model)["holding.decoder"] == "bias is shared with b"


def test_properties_that_raise_are_no_parts_of_a_model():
    """As those of a model that can tell its encoder or experts only once it has run."""

    class Late(nn.Sequential):
        @property
        def encoder(self):
            raise RuntimeError("not before the first forward")

        decoder = experts = batch_first = tied_modules = encoder

    recorder = Recorder(Late(nn.Linear(4, 4)))
    recorder.backward(recorder.model(torch.randn(3, 3, 4)).sum())
    assert recorder.rows() == {"0": 9}


def test_what_the_optimizer_does_not_step_is_listed():
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    found = scan(model, optimized=[model["body"].weight])
    assert [(layer.name, layer.bias) for layer in found.layers] == [("body", None)]
    assert found.skipped[0].reason == "weight is not among the optimizer's parameters"


# what the user chooses


def test_patterns_choose_modules():
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 9)})
    assert names(model, LayerChoice(exclude=("^head$",))) == ["body"]
    assert names(model, LayerChoice(include=("head",))) == ["head"]
    assert "kfac.layers.exclude '^head$'" in reasons(model, exclude=("^head$",))["head"]
    assert reasons(model, include=("head",))["body"] == "not matched by kfac.layers.include"
    normed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert reasons(normed, types=("Linear",)) == {"1": "LayerNorm is not in kfac.layers.types"}
    with pytest.raises(ValueError, match=r"kfac.layers.exclude: pattern 'haed' matches no.*head"):
        scan(model, LayerChoice(exclude=("haed",)))


def test_nothing_to_precondition_is_an_error():
    with pytest.raises(ValueError, match=r"no layer to precondition.*Embedding"):
        scan(nn.Sequential(nn.Embedding(4, 4)))


def kinds(model: nn.Module, **choice) -> list[tuple[str, str]]:
    return [(layer.A.kind, layer.G.kind) for layer in scan(model, LayerChoice(**choice)).layers]


def test_a_long_side_is_in_blocks_and_a_vocabularys_diagonal(monkeypatch):
    monkeypatch.setattr("ds_kfac.model.scan.LONGEST", 49)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(9, 49), nn.Linear(4, 50))
    for dense_max, expected in ((50, ["dense"] * 3), (20, ["dense", "blocks of 10", "diagonal"])):
        assert [G for _, G in kinds(model, dense_max=dense_max)] == expected
    long = nn.Linear(65536, 4, False)
    assert kinds(long, dense_max=20, gradients=False) == [("blocks of 10", "identity")]
    assert kinds(nn.Linear(4, 4), curvature=False) == [("identity", "identity")]


def test_adapters_get_the_factor_of_their_small_side():
    small = {"lora_A": nn.Linear(40, 4, bias=False), "lora_B": nn.Linear(4, 60, bias=False)}
    model = nn.ModuleDict({"base_layer": frozen(nn.Linear(40, 60))})
    model.update({name: nn.ModuleDict({"default": each}) for name, each in small.items()})
    assert names(model) == ["lora_A.default", "lora_B.default"]
    assert kinds(model) == [("identity", "dense"), ("dense", "identity")]
    assert sum(layer.A.numel + layer.G.numel for layer in scan(model).layers) == 2 * 10


def test_norms_have_the_structure_of_their_type():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.LayerNorm(4, bias=False)
    )
    sides = [(layer.A, layer.G) for layer in scan(model).layers][1:]
    one = Side.identity(1)
    assert sides == [(Side(8, 2), one), (Side.diagonal(4), one), (Side.diagonal(4), one)]
    assert "activations_only" in reasons(model, gradients=False)["1"]


@pytest.mark.parametrize("kind", [STANDARDIZED, SHIFTED])
def test_a_weight_that_is_computed_of_another_has_no_curvature(kind):
    """Without G it is stepped all the same."""
    model = nn.ModuleDict({"ws": kind(3, 4, 3), "linear": nn.Linear(4, 4)})
    found = scan(model, LayerChoice(gradients=False))
    layer, _ = found.layers
    assert layer.name == "ws" and layer.shape == (4, 28) and layer.A.numel == layer.G.numel == 0
    share = share_of(model, found)
    assert share.updated == share.matrices == 4 * 27 + 16 and share.curved == 16


# tables

SLICES = "return x @ self.weight[start:, :].T + self.weight[-1, 0] + self.weight[None][..., 0]"
CHOSEN = "return x @ self.weight[chosen] + (x @ self.weight[:, chosen[0] :]).sum()"
PRUNED = """
def prune(self, kept):
    self.linear.weight.data = self.linear.weight[kept].clone()

def forward(self, x):
    return self.linear(x)
"""
DOUBLED = written("return super(type(self), self).forward(x) * 2", nn.Linear)
NO_TABLES = {
    "some rows": (module(SLICES, weight=(9, 4)), "0.weight"),
    "of a stack": (module(CHOSEN, weight=(3, 4, 4)), "0.weight"),
    "pruned": (module(PRUNED, linear=DOUBLED(4, 9)), "0.linear.weight"),
}


@pytest.mark.parametrize(("module", "weight"), NO_TABLES.values(), ids=NO_TABLES)
def test_slices_and_rows_that_forward_does_not_look_up_make_no_table(module, weight):
    assert {layer.weight for layer in scan(nn.Sequential(module)).layers} == {weight}


def test_tables_are_no_matrices():
    positions, kernel = nn.Module(), "return some_kernel(x, self.weight) @ self.weight.T"
    positions.middle = nn.Parameter(torch.zeros(3, 1, 5, 4))
    positions.stack = nn.Parameter(torch.zeros(3, 5, 4))
    modules = {
        "linear": nn.Linear(4, 4),
        "table": module("return F.embedding(x, self.weight)", weight=(9, 4)),
        "positions": positions,
    }
    model = nn.ModuleDict(modules | {"c": frozen(nn.Conv1d(4, 4, 1))})
    share = share_of(model, scan(model))
    # of a stack nothing shows that it is a table, nor what a kernel does
    assert share.matrices - share.updated == 3 * 5 * 4
    model["table"] = module(kernel, weight=(9, 4))
    share = share_of(model, scan(model))
    assert share.matrices == 16 + 3 * 5 * 4 + 9 * 4 and share.updated == 16 + 9 * 4


# class -> shape of its weight
MODULATED = "w = (self.weight * self.gain).flatten(0, 1)\nreturn F.conv2d(x, weight=w, padding=1)"
# a mask in ``forward`` reads a matrix like a table, so only the report's row tells
MASKED = PRUNED.replace("def prune(self, kept)", "def forward(self, x, kept=None)")
SCRIPTED = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
POINTWISE = "return F.conv2d(x, self.weight)"
POSITIONS = "return F.conv2d(x + self.weight, self.kernel)"
IN_NO_LAYER = {
    "a kernel of 1x1": (module(POINTWISE, weight=(9, 4, 1, 1)), {"matrices"}),
    "a kernel as StyleGAN2's": (module(MODULATED, weight=(1, 9, 4, 3, 3)), {"matrices"}),
    "of TorchScript, which gives no parameter by its name": (SCRIPTED, {"matrices"}),
    "positions before a convolution": (module(POSITIONS, weight=(1, 4, 5, 5)), {"unclear"}),
    "a masked matrix": (module(MASKED, linear=nn.Linear(4, 9, bias=False)), {"tables"}),
    "of no known shape": (module("return x", weight=(36,)), {"unclear"}),
}


@pytest.mark.parametrize("name", IN_NO_LAYER)
def test_what_is_in_no_layer_is_named_as_a_matrix_a_table_or_unclear(name):
    module, expected = IN_NO_LAYER[name]
    model = nn.ModuleDict({"linear": nn.Linear(4, 4), "embedding": nn.Embedding(9, 4)})
    model["it"] = module
    found = scan(model)
    share, matrices = share_of(model, found), other_matrices(model, found)
    seen = {"matrices": matrices, "tables": share.tables, "unclear": share.unclear}
    assert {kind for kind, names in seen.items() if names} == expected
    assert (share.fraction < 1) == bool(matrices) and len(matrices) < 2


def test_biases_of_matrices_are_found_by_their_module():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    model = nn.ModuleDict({"gru": nn.GRU(4, 4), "normed": normed, "norm": nn.LayerNorm(4)})
    named = dict(model.named_parameters())
    matrices = {name for name, p in named.items() if p.ndim == 2}
    expected = {"gru.bias_ih_l0", "gru.bias_hh_l0", "normed.bias"}
    assert biases_of(matrices, named) == expected


def test_a_layer_type_whose_module_has_no_weight_says_how_to_call_it(monkeypatch):
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(4))

    class OfSlope(Linear):
        kind = Slope

        def refusal(self, module):
            return None

    monkeypatch.setitem(LAYERS, "Slope", OfSlope())
    with pytest.raises(TypeError, match=r"type Slope describes module 0 .* has no weight. Call"):
        scan(nn.Sequential(Slope()), LayerChoice(types=("Slope",)))
