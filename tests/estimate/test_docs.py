"""The table of predictions in docs/howto/cost.md is what `python -m ds_kfac estimate` prints."""

import re

import pytest

from ds_kfac.__main__ import main
from tests.ranks import ROOT

PAGE = (ROOT / "docs/howto/cost.md").read_text()
MODELS = {
    "GPT-2 XL": "gpt2_xl",
    "Llama-7B": "llama_7b",
    "GPT-OSS-20B": "gpt_oss_20b",
    "Qwen3-30B-A3B": "qwen3_30b_a3b",
    "BERT-Large": "bert_large",
}
CONFIGS = {"KFACAdamW": "adam", "K-FAC into AdamW": "gradient"}
CLUSTER = "--world 64 --model-flops 3e14 --link-gbps 400 --node-size 8 --node-gbps 3600"
SHOWN = ("K-FAC state", "in a step", "sent/step", "time/step", "of the model")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, its first row included."""
    lines = PAGE.split(f"## {heading}\n")[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


HEAD, *ROWS = table("Predictions for 64 ranks")


@pytest.mark.parametrize(
    ("model", "optimizer", "stage", "tokens", "shown"), [(*row[:4], row[4:]) for row in ROWS]
)
def test_a_row_is_what_the_command_prints(
    model, optimizer, stage, tokens, shown, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    command = (
        f"estimate --model benchmarks.models:{MODELS[model]} --stage {stage} {CLUSTER} "
        f"--config docs/estimator/{CONFIGS[optimizer]}.json --batch-rows {tokens.replace(',', '')}"
    )
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = (line for line in lines if line.startswith("  strategy "))
    (chosen,) = (line for line in lines if re.match(r"  \S.* \*  ", line))
    columns = re.split(r"\s{2,}", head.strip())
    cells = dict(zip(columns, re.split(r"\s{2,}", chosen.strip()), strict=True))
    assert [cells[name] for name in SHOWN] == shown


def test_every_model_has_a_row_and_the_sentence_of_the_page_is_of_the_first():
    assert tuple(HEAD[4:]) == SHOWN and {row[0] for row in ROWS} == MODELS.keys()
    state, beside, *_, share = ROWS[0][4:]
    sentence = (
        f"K-FAC keeps {state} of state on a rank, and needs at most {beside} more in a step; it "
        f"adds {share}"
    )
    assert sentence in " ".join(PAGE.split())
