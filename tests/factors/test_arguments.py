"""What users give: texts, sources, models whose ranks differ, models around models."""

import os
from argparse import Namespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ds_kfac.config.values import read_config
from ds_kfac.factors import command
from ds_kfac.factors.files import FactorsError
from ds_kfac.factors.fitting import fit
from tests.close import exact
from tests.factors.test_fit import Sequences, sequences
from tests.ranks import free_port, run_ranks


def test_a_config_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="not a JSON object; name a DeepSpeed config file"):
        read_config(str(tmp_path / "ds.json"))


def test_ranks_without_a_sequence_have_no_batch(monkeypatch):
    class Tokenizer:
        eos_token_id = None

        def __call__(self, text: str) -> dict:
            return {"input_ids": list(text.encode())}

    monkeypatch.setattr(command, "_texts", lambda path: ["abcdefgh"])
    arguments = Namespace(data="text", length=4, limit=None, batch=2)
    found = [command.windows(arguments, Tokenizer(), rank, 3) for rank in range(3)]
    assert [len(batches) for batches in found] == [1, 1, 0]


def test_experts_of_deepspeed_are_refused(tmp_path):
    own = Sequences()
    own.head.weight.allreduce = False
    with pytest.raises(
        FactorsError, match=r"head\.weight is a tensor-parallel shard, or of DeepSpeed's experts"
    ):
        fit(own, sequences(1), out=tmp_path, progress=False)


def other_layers(payload: dict) -> str:
    rank = torch.distributed.get_rank()
    own = nn.Sequential(nn.Linear(4, 4 + rank))
    try:
        fit(
            own, [torch.ones(2, 4)], lambda own, x: own(x).sum(), out=payload["out"], progress=False
        )
    except FactorsError as problem:
        return str(problem)
    return ""


@pytest.mark.distributed
def test_ranks_with_other_layers_are_told(tmp_path):
    said = run_ranks(
        "tests.factors.test_arguments:other_layers",
        world=2,
        payload={"out": str(tmp_path)},
        timeout=60,
    )
    assert all("ranks have different layers" in text for text in said)


def joins(payload: dict) -> float:
    # as in a script of a launcher, which has not joined its job
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = payload["port"]  # the last job's store may still be there
    found = fit(Sequences(), sequences(2), out=payload["out"], progress=False)
    return found.header["sequences"]


@pytest.mark.distributed
def test_a_launched_script_that_has_not_joined_its_job_does(tmp_path):
    payload = {"out": str(tmp_path), "port": str(free_port())}
    said = run_ranks("tests.factors.test_arguments:joins", world=2, payload=payload, timeout=60)
    assert said == [12, 12]


class Around(nn.Module):
    """A model whose only child is called "module", as that of an engine."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.module(**batch)


@pytest.mark.parametrize("kind", [Around, nn.DataParallel])
def test_a_model_around_a_model_is_no_engine(kind, tmp_path):
    expected = fit(Sequences(), sequences(1), out=tmp_path / "bare", progress=False)
    found = fit(kind(Sequences()), sequences(1), out=tmp_path / "around", progress=False)
    assert list(found) == (["module.twice", "module.head"] if kind is Around else list(expected))
    exact(found.factor(next(iter(found)), "A"), expected.factor("twice", "A"))


def test_a_loader_of_a_stream_has_no_length(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(sequences(2))

    found = fit(Sequences(), DataLoader(Stream(), batch_size=None), out=tmp_path, progress=False)
    assert found.header["batches"] == 2


def test_a_model_without_parameters_has_no_layer(tmp_path):
    with pytest.raises(ValueError, match="Identity has no layer to precondition"):
        fit(nn.Identity(), sequences(1), out=tmp_path, progress=False)


class Moved(tuple):
    """A batch that moves itself."""

    def to(self, device: torch.device) -> dict:
        return {name: x.to(device) for name, x in self[0].items()}


def test_a_batch_that_moves_itself_does(tmp_path):
    found = fit(Sequences(), [Moved(sequences(1))], out=tmp_path, progress=False)
    assert found.header["batches"] == 1


class Returns(Sequences):
    def __init__(self, how) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor, labels: torch.Tensor):
        return self.how(super().forward(x, labels))


@pytest.mark.parametrize(
    "how",
    [
        lambda loss: {"logits": torch.ones(3), "loss": loss},
        lambda loss: (torch.ones(3), loss),
        lambda loss: Namespace(loss=loss),
    ],
    ids=["mapping", "tuple", "object"],
)
def test_the_loss_that_a_model_returns_is_found(how, tmp_path):
    expected = fit(Sequences(), sequences(1), out=tmp_path / "scalar", progress=False)
    found = fit(Returns(how), sequences(1), out=tmp_path / "other", progress=False)
    exact(found.factor("head", "G"), expected.factor("head", "G"))
