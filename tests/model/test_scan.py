"""Which layers are found, and that everything else is listed with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_kfac.curvature.factor import Side
from ds_kfac.diagnostics.share import share_of
from ds_kfac.directions.kfac_adamw.matrices import other_matrices
from ds_kfac.model.capture import Capture
from ds_kfac.model.product_code import MatrixLayout, multiplied
from ds_kfac.model.rows import ROWS
from ds_kfac.model.scan import LayerChoice, scan
from tests.model.written import written


class Conv1D(nn.Module):
    """As in transformers: weight [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(
            *x.shape[:-1], self.nf
        )


class Overriding(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def reasons(model: nn.Module, **patterns) -> dict[str, str]:
    return {
        skipped.name: skipped.reason for skipped in scan(model, LayerChoice(**patterns)).skipped
    }


def test_linear_and_conv1d_are_found_with_their_shapes():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4, bias=False), Conv1D(7, 4))
    layers = scan(model).layers
    assert [(lay.kind, lay.A.dim, lay.G.dim, lay.bias) for lay in layers] == [
        ("Linear", 4, 5, "0.bias"),
        ("Linear", 5, 4, None),
        ("Conv1D", 5, 7, "2.bias"),
    ]
    assert scan(nn.Linear(2, 2)).layers[0].weight == "weight"


def test_everything_else_is_listed_with_its_reason():
    model = nn.ModuleDict(
        {
            "keep": nn.Linear(4, 4),
            "frozen": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
            "embed": nn.Embedding(9, 4),
            "tied": nn.Linear(4, 9, bias=False),
            "own": Overriding(4, 4),
            "mha": nn.MultiheadAttention(4, 2),
        }
    )
    model["frozen"].weight.requires_grad_(False)
    model["tied"].weight = model["embed"].weight
    choice = {"types": ("Linear",)}
    found = reasons(model, **choice)
    taken = {"keep", "own", "mha.in_proj_weight", "mha.out_proj"}
    assert {layer.name for layer in scan(model, LayerChoice(**choice)).layers} == taken
    assert (
        found["frozen"] == "weight is frozen"
        and found["norm"] == "LayerNorm is not in kfac.layers.types"
    )
    assert (
        found["tied"] == "weight is shared by embed, tied"
        and found["embed"] == "no K-FAC layer type for it"
    )
    modules = {
        name for name, module in model.named_modules() if list(module.parameters(recurse=False))
    }
    assert set(found) | {name.removesuffix(".in_proj_weight") for name in taken} == modules


def test_a_module_used_twice_is_one_layer():
    shared = nn.Linear(4, 4)
    assert len(scan(nn.Sequential(shared, nn.Tanh(), shared)).layers) == 1


def test_modules_with_the_same_parameters_are_one_layer():
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    model[3].weight = model[2].weight  # each with a bias of its own
    (layer,) = scan(model).layers
    assert (layer.name, layer.also) == ("0", ("1",))
    assert "weight is shared by 2, 3" in reasons(model)["2"] and set(reasons(model)) == {"2", "3"}


def test_properties_that_raise_are_no_parts_of_a_model():
    """As those of a model that can tell its encoder or experts only once it has run."""

    class Late(nn.Sequential):
        @property
        def encoder(self):
            raise RuntimeError("not before the first forward")

        decoder = experts = batch_first = tied_modules = encoder

    model = Late(nn.Linear(4, 4))
    layers = scan(model).layers
    capture = Capture(model, layers, lambda announced: 1.0)
    capture.begin_step(frozenset(layers[0].keys), 0)
    model(torch.randn(3, 3, 4)).sum().backward()
    assert float(capture.sums["0/A"].counts[ROWS]) == 9
    capture.remove()


def test_complex_weights_are_left_alone_and_said():
    """Their rows would lose their imaginary parts."""
    model = nn.ModuleDict(
        {"real": nn.Linear(4, 4), "complex": nn.Linear(4, 4, dtype=torch.complex64)}
    )
    model["raw"] = Matrix()
    model["raw"].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    found = scan(model)
    assert [layer.name for layer in found.layers] == ["real"]
    reasons = {left.name: left.reason for left in found.skipped}
    assert reasons["complex"] == "weight is complex64; factors are of real numbers"


def test_a_weight_without_elements_is_no_layer():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 0))
    assert [layer.name for layer in scan(model).layers] == ["0"]
    assert reasons(model)["1"] == "weight has no elements"


def test_computed_weights_are_refused_with_a_reason():
    model = nn.ModuleDict(
        {"keep": nn.Linear(4, 4), "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))}
    )
    assert "computed by a parametrization" in reasons(model)["normed"]
    model = nn.ModuleDict(
        {
            "keep": nn.Linear(4, 4),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, False)),
        }
    )
    assert [layer.name for layer in scan(model).layers] == ["keep"]


def test_a_long_side_is_in_blocks_and_a_vocabularys_diagonal(monkeypatch):
    monkeypatch.setattr("ds_kfac.model.scan.LONGEST", 49)
    model = nn.ModuleDict(
        {"body": nn.Linear(4, 4), "up": nn.Linear(9, 49), "head": nn.Linear(4, 50)}
    )
    for dense_max, kinds in ((50, ["dense"] * 3), (20, ["dense", "blocks of 10", "diagonal"])):
        assert [
            layer.G.kind for layer in scan(model, LayerChoice(dense_max=dense_max)).layers
        ] == kinds
    assert (
        scan(nn.Linear(65536, 4, False), LayerChoice(dense_max=20, gradients=False))
        .layers[0]
        .A.kind
        == "blocks of 10"
    )


def test_without_curvature_both_sides_are_identities():
    for layer in scan(nn.ModuleDict({"one": nn.Linear(4, 4)}), LayerChoice(curvature=False)).layers:
        assert layer.A.block == layer.G.block == 0


def test_what_the_optimizer_does_not_step_is_listed():
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    found = scan(model, optimized=[model["body"].weight])
    assert [(layer.name, layer.bias) for layer in found.layers] == [("body", None)]
    assert found.skipped[0].reason == "weight is not among the optimizer's parameters"


def test_a_frozen_bias_is_no_column():
    model = nn.Sequential(nn.Linear(3, 5))
    model[0].bias.requires_grad_(False)
    assert scan(model).layers[0].A.dim == 3


def test_patterns_choose_modules():
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 9)})
    assert [layer.name for layer in scan(model, LayerChoice(exclude=("^head$",))).layers] == [
        "body"
    ]
    assert [layer.name for layer in scan(model, LayerChoice(include=("head",))).layers] == ["head"]
    assert "kfac.layers.exclude '^head$'" in reasons(model, exclude=("^head$",))["head"]
    assert reasons(model, include=("head",))["body"] == "not matched by kfac.layers.include"


def test_a_pattern_without_a_match_is_an_error():
    with pytest.raises(
        ValueError, match=r"kfac.layers.exclude: pattern 'haed' matches no module.*head"
    ):
        scan(nn.ModuleDict({"head": nn.Linear(4, 4)}), LayerChoice(exclude=("haed",)))


def test_nothing_to_precondition_is_an_error():
    with pytest.raises(ValueError, match=r"no layer to precondition.*Embedding"):
        scan(nn.Sequential(nn.Embedding(4, 4)))


def test_norms_have_the_structure_of_their_type():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "n": nn.LayerNorm(4),
            "r": nn.RMSNorm(4),
            "b": nn.LayerNorm(4, bias=False),
        }
    )
    sides = {layer.name: (layer.A, layer.G) for layer in scan(model).layers}
    assert sides["n"] == (Side(8, 2), Side.identity(1)) and sides["r"] == (
        Side.diagonal(4),
        Side.identity(1),
    )
    assert sides["b"] == (Side.diagonal(4), Side.identity(1))
    assert "activations_only" in reasons(model, gradients=False)["n"]


def test_adapters_get_the_factor_of_their_small_side():
    class Adapter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = torch.nn.Linear(40, 60)
            self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(40, 4, bias=False)})
            self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 60, bias=False)})
            self.base_layer.requires_grad_(False)

    found = scan(Adapter())
    assert [layer.name for layer in found.layers] == ["lora_A.default", "lora_B.default"]
    assert [(layer.A.kind, layer.G.kind) for layer in found.layers] == [
        ("identity", "dense"),
        ("dense", "identity"),
    ]
    assert sum(layer.A.numel + layer.G.numel for layer in found.layers) == 2 * 10
    assert {left.reason for left in found.skipped} == {"weight is frozen"}


class Holding(nn.Module):
    """Has its head's bias as its own, as RoBERTa's head has."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(4, 9)
        self.bias = self.decoder.bias

    def forward(self, x):
        return self.decoder(x)


def test_a_bias_that_another_module_only_holds_is_the_layers_and_no_two_layers_have_one():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "holding": Holding()})
    (_, layer) = scan(model).layers
    assert layer.name == "holding.decoder" and layer.bias == "holding.bias"
    model.add_module("b", nn.Linear(4, 9))
    model["b"].bias = model["holding"].bias
    assert reasons(model)["b"] == "bias is shared with holding.decoder"
    assert reasons(model)["holding.decoder"] == "bias is shared with b"


class Matrix(nn.Module):
    shape: tuple[int, ...] = (9, 4)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(self.shape))


class Stack(Matrix):
    shape = (3, 4, 4)


TABLE = written("return F.embedding(x, self.weight)", Matrix)
"""As I-BERT has it."""
KERNEL = written("return some_kernel(x, self.weight) @ self.weight.T", Matrix)
"""Nothing shows what its kernel does."""
HEAD_AS_TABLE = written(
    """
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)

    def forward(self, x):
        return self.head(self.head.weight[x])
    """
)
"""The table is the weight of a Linear that is called."""
TABLES = {
    "table and head": written("def logits(self, x):\n    return x @ self.weight.T", TABLE),
    "by index": written("table = self.weight.float()\nreturn table[x] @ self.weight.T", Matrix),
    "columns of a Linear's, as LayoutLM's": written(
        "return self.weight.t()[x] + x @ self.weight.T", Matrix
    ),
    "codebook": written(
        "nearest = (x @ self.weight.T).argmin(-1)\nreturn self.weight.index_select(0, "
        "index=nearest)",
        Matrix,
    ),
    "books of residual quantization": written(
        """
        for level in range(3):
            book = self.weight[level]
            x = x - book[(x @ book.T).argmin(-1)]
        return x
        """,
        Stack,
    ),
    "head as table": HEAD_AS_TABLE,
}


class Scaled(nn.Linear):
    """Its weight is a property."""

    def __init__(self):
        super().__init__(4, 4)
        self.raw = nn.Parameter(self._parameters.pop("weight").detach())

    weight = property(lambda self: 2 * self.raw)


class Inheriting(Scaled):
    pass


class Drawing(nn.Module):
    def forward(self, weight):
        return weight + torch.rand_like(weight)


def test_a_parametrized_weight_is_not_computed_to_know_that_it_is_one():
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("keep", "drawn", "normed", "old")})
    model["property"] = Inheriting()
    nn.utils.parametrize.register_parametrization(model["drawn"], "weight", Drawing())
    normed = nn.utils.parametrizations.spectral_norm(model["normed"])
    nn.utils.spectral_norm(model["old"])
    state, before = torch.get_rng_state(), normed.parametrizations.weight[0]._u.clone()
    assert {"drawn", "normed", "old", "property"} <= {
        name for name, why in reasons(model).items() if "computed" in why
    }
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(normed.parametrizations.weight[0]._u, before)


@pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES)
def test_what_rows_are_looked_up_in_is_a_table_also_if_it_is_multiplied(kind):
    model = nn.Sequential(nn.Linear(4, 4), kind())
    found = scan(model)
    assert [layer.name for layer in found.layers] == ["0"]
    assert [left.reason for left in found.skipped] == [
        "rows are looked up in weight: it is a table"
    ]
    assert share_of(model, found).fraction == 1, "as of an embedding"


@pytest.mark.parametrize(
    "kind",
    [
        written(
            "return x @ self.weight[start:, :].T + self.weight[-1, 0] + self.weight[None][..., 0]",
            Matrix,
        ),
        written("return x @ self.weight[chosen] + (x @ self.weight[:, chosen[0] :]).sum()", Stack),
    ],
    ids=["some rows", "of a stack"],
)
def test_slices_and_matrices_of_a_stack_are_no_tables(kind):
    names = [layer.weight for layer in scan(nn.Sequential(kind())).layers]
    assert set(names) == {"0.weight"}


def test_a_product_of_two_parameters_makes_no_layer():
    class Update(nn.Module):
        """W + B A, a penalty, and a product with what is no parameter; a variable that is not
        always one."""

        def __init__(self):
            super().__init__()
            self.w, self.b, self.a, self.c, self.d = (
                nn.Parameter(torch.zeros(4, 4)) for _ in range(5)
            )
            self.e = nn.Parameter(torch.zeros(4, 4))
            self.register_buffer("basis", torch.zeros(4, 4))

        def forward(self, x, i):
            y = self.d
            y = y + x
            rows = self.b[i]
            x = F.linear(x, self.w + self.b @ self.a) + (self.w.T @ self.w).sum()
            return x, self.c @ self.basis, y @ self.d, rows @ self.e

    assert multiplied(Update()) == {
        "c": MatrixLayout(False),
        "d": MatrixLayout(True),
        "e": MatrixLayout(True),
    }


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.middle, self.stack = (
            nn.Parameter(torch.zeros(3, 1, 5, 4)),
            nn.Parameter(torch.zeros(3, 5, 4)),
        )


def test_tables_are_no_matrices():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "table": TABLE(),
            "positions": Positions(),
            "c": nn.Conv1d(4, 4, 1),
        }
    )
    model["c"].weight.requires_grad_(False)
    share = share_of(model, scan(model))
    assert share.matrices - share.stepped == 3 * 5 * 4, (
        "of a stack nothing shows that it is a table"
    )
    model["table"] = KERNEL()
    share = share_of(model, scan(model))
    assert share.matrices == 16 + 3 * 5 * 4 + 9 * 4 and share.stepped == 16 + 9 * 4


def test_matrices_of_torchscript_are_left_to_the_optimizer():
    """Which gives no parameter by its name."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    assert other_matrices(model, scan(model)) == {"1.0.weight"}
