"""What users give: files of texts, sources, folders that a killed run has left, models whose ranks differ."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ds_kfac.config.values import read_config
from ds_kfac.factors.command import _data, _texts
from ds_kfac.factors.files import FactorsError
from ds_kfac.factors.fitting import fit
from ds_kfac.factors.passes import _to
from tests.close import exact
from tests.factors.test_fit import Sequences, sequences
from tests.ranks import free_port, run_ranks


def test_a_line_of_jsonl_may_have_other_separators_in_it(tmp_path):
    texts = ["one\u2028two", "three\x85four"]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), encoding="utf-8")
    assert list(_texts(path)) == texts


@pytest.mark.parametrize("row", ["7", '"text"', '{"words": "x"}', '{"text": 7}', "{"])
def test_a_row_without_a_text_is_named(row, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "good"}\n' + row)
    with pytest.raises(FactorsError, match=r"texts\.jsonl, row 1: .*text"):
        list(_texts(path))


def test_a_config_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="not a JSON object; name a DeepSpeed config file"):
        read_config(str(tmp_path / "ds.json"))


def test_ranks_without_a_sequence_have_no_batch(tmp_path):
    class Tokenizer:
        eos_token_id = None

        def __call__(self, text: str) -> dict:
            return {"input_ids": list(text.encode())}

    (tmp_path / "text").write_text("abcdefgh")
    arguments = Namespace(data=str(tmp_path / "text"), length=4, limit=None, batch=2)
    assert [len(_data(arguments, Tokenizer(), rank, 3)) for rank in range(3)] == [1, 1, 0]


def test_a_source_is_compared_as_it_is_read(tmp_path):
    source = {"files": ("a", "b")}
    for _ in range(2):
        fit(Sequences(), sequences(1), out=tmp_path / "made", source=source, progress=False)
    with pytest.raises(ValueError, match=r"source: .*plain values"):
        fit(Sequences(), sequences(1), out=tmp_path / "other", source={"file": Path("a")}, progress=False)


def test_what_killed_saves_have_left_goes(tmp_path):
    for name in ("partial-00007-00000.safetensors", "partial-00008-00000.safetensors.tmp"):
        (tmp_path / name).write_text("")
    found = fit(
        Sequences(), sequences(1), out=tmp_path, config={"factor": {"fisher": "activations_only"}}, progress=False
    )
    assert not list(tmp_path.glob("partial-*"))
    with pytest.raises(FactorsError, match="head has no G"):
        found.count("head", "G")


def test_experts_of_deepspeed_are_refused(tmp_path):
    own = Sequences()
    own.head.weight.allreduce = False
    with pytest.raises(FactorsError, match=r"head\.weight is a parameter of DeepSpeed's experts"):
        fit(own, sequences(1), out=tmp_path, progress=False)


def other_layers(payload: dict) -> str:
    rank = torch.distributed.get_rank()
    own = nn.Sequential(nn.Linear(4, 4 + rank))
    try:
        fit(own, [torch.ones(2, 4)], lambda own, x: own(x).sum(), out=payload["out"], progress=False)
    except FactorsError as problem:
        return str(problem)
    return ""


@pytest.mark.distributed
def test_ranks_with_other_layers_are_told(tmp_path):
    said = run_ranks("tests.factors.test_arguments:other_layers", world=2, payload={"out": str(tmp_path)}, timeout=60)
    assert all("ranks have different layers" in text for text in said)


def joins(payload: dict) -> float:
    torch.distributed.destroy_process_group()  # as in a script of a launcher, which has not joined its job
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


def test_a_batch_that_moves_itself_does(tmp_path):
    class Moved(tuple):
        def to(self, device: torch.device) -> dict:
            return {name: x.to(device) for name, x in self[0].items()}

    assert _to(Moved(sequences(1)), torch.device("cpu")).keys() == {"x", "labels"}
