"""Tasks that learn from rewards: their rules, their sampling with a cache, GRPO's loss, and the whole command."""

import random

import pytest
import torch

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import reward_tasks
from benchmarks.convergence.methods import REWARD_METHODS, REWARD_RATES
from benchmarks.convergence.results import Job, Run, read
from benchmarks.convergence.reward_report import collapsed
from benchmarks.convergence.reward_rules import RULES, encoded, part_of, with_answers
from benchmarks.convergence.reward_tasks import IGNORED, Policy, generate, labels_of, log_probabilities
from ds_kfac.model.batch import ArgumentReader
from examples.gpt import GPT, GPTConfig
from tests.close import close, exact

TINY = GPTConfig(width=16, blocks=2, heads=2, context=16)


@pytest.mark.parametrize(
    ("rule", "question", "answer"),
    [("addition", "007+995=", "1002"), ("sorting", "907160=", "001679"), ("brackets", "([{}[(){=", "}]])")],
)
def test_a_right_answer_and_nothing_else_is_rewarded(rule, question, answer):
    found = RULES[rule]
    assert found.solve(question) == answer

    def reward(text: str) -> float:
        tokens = torch.full((1, found.longest), ord("9"))
        tokens[0, : len(text)] = torch.tensor(list(text.encode()))[: found.longest]
        return float(found.rewards([question], tokens))

    assert reward(f"{answer}\n") == 1 and reward(f"{answer[:-1]}\n") == 0 and reward(f"{answer}0") == 0
    assert reward(f"\n{answer}") == 0


@pytest.mark.parametrize("rule", RULES)
def test_the_parts_share_no_question_and_all_answers_fit(rule):
    found = {part: RULES[rule].questions(random.Random(1), 200, part) for part in ("train", "validation", "test")}
    for part, questions in found.items():
        assert {part_of(question) for question in questions} == {part}
        assert len({len(question) for question in questions}) == 1
        assert max(len(RULES[rule].solve(question)) for question in questions) < RULES[rule].longest


def test_supervision_is_of_answers_only():
    question = "123+456="
    tokens, labels = with_answers(RULES["addition"], [question], IGNORED)
    assert bytes(tokens[0].tolist()) == b"123+456=579\n\n"
    assert bytes(value for value in labels[0].tolist() if value != IGNORED) == b"579\n"
    assert (labels[0] != IGNORED).nonzero().flatten().tolist() == [7, 8, 9, 10]
    exact(labels_of(tokens, len(question)), labels, what="what was sampled is labelled alike")


def test_the_cache_changes_no_probability():
    torch.manual_seed(0)
    network = GPT(TINY).eval()
    for parameter in network.parameters():  # far from uniform, so that another token would be seen
        parameter.data.mul_(8)
    asked = encoded(["12+34=", "77+08="])
    tokens = generate(network, asked, 3, 5, torch.Generator().manual_seed(1))
    assert tokens.shape == (6, 11)
    exact(tokens[:, :6], asked.repeat_interleave(3, 0), what="questions stay")
    generator, found = torch.Generator().manual_seed(1), asked.repeat_interleave(3, 0)
    for _ in range(5):
        found = torch.cat([found, torch.multinomial(network(found)[:, -1].softmax(-1), 1, generator=generator)], dim=1)
    exact(tokens, found, what="without a cache")


def test_on_policy_the_gradient_is_that_of_advantage_times_log_probability():
    torch.manual_seed(0)
    policy = Policy(TINY)
    tokens, labels = with_answers(RULES["sorting"], ["907160=", "312312="], IGNORED)
    advantages = torch.tensor([1.5, -0.5])
    policy(tokens, labels, advantages).backward()
    found = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    logp = log_probabilities(policy.network(tokens), labels)
    (-(logp * advantages[:, None]).sum() / (labels != IGNORED).sum()).backward()
    for name, parameter in policy.named_parameters():
        close(found[name], parameter.grad, sums=100, scale=parameter.grad.abs().max(), what=name)
    assert float(found["network.lm_head.weight"].norm()) > 0


def test_a_ratio_beyond_the_clip_gives_no_gradient():
    torch.manual_seed(0)
    policy = Policy(TINY)
    tokens, labels = with_answers(RULES["sorting"], ["907160="], IGNORED)
    now = log_probabilities(policy.network(tokens), labels).detach()
    for shift, advantage, moves in [(0.3, 1.0, False), (0.3, -1.0, True), (-0.3, -1.0, False), (0.1, 1.0, True)]:
        policy.zero_grad()
        policy(tokens, labels, torch.tensor([advantage]), now - shift).backward()
        assert (float(policy.network.lm_head.weight.grad.norm()) > 0) == moves, (shift, advantage)


def test_rows_of_questions_and_after_the_end_do_not_count_in_the_statistics():
    tokens, labels = with_answers(RULES["addition"], ["123+456=", "999+999="], IGNORED)
    info = ArgumentReader(Policy(TINY))((tokens, labels, torch.ones(2), None), {})
    assert info.rows.sum(1).tolist() == [4, 5]
    exact(info.rows, info.labelled, what="rows are those with a label")


def test_a_collapse_is_seen():
    def run(*right: float) -> Run:
        rows = [{"loss": 1 - r, "held_out_loss": 1 - r, "held_out_accuracy": r} for r in right]
        return Run(Job("addition", "adamw", 1e-3, 0), rows)

    assert collapsed(run(0.1, 0.05)) and collapsed(run(0.1, 0.6, 0.2)) and not collapsed(run(0.1, 0.6, 0.5))


def test_every_method_of_rewards_has_rates():
    assert set(REWARD_METHODS) <= set(REWARD_RATES)


@pytest.mark.distributed
def test_the_command_learns_from_rewards_and_writes_its_own_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "rewards"
    argv = ["--tasks", "tiny_rewards", "--rates", "1e-3", "--extensions", "0", "--seeds", "0", "--out", str(out)]
    methods = ["adamw", "muon", "kfac_sgd", "kfacadamw_adam_1"]
    with convergence.make_pool(1) as pool:
        assert convergence.main([*argv, "--methods", *methods], pool) == 0
        page = capsys.readouterr().out
        assert convergence.main([*argv, "--data", str(tmp_path)], pool) == 2
        assert "make their own questions" in capsys.readouterr().err
    for method in methods:
        run = read(Job("tiny_rewards", method, 1e-3, 0, final=True), out)
        assert [row["samples"] for row in run.rows] == [32, 32, 64, 64]
        last = run.rows[-1]
        assert last["kl"] > 0 and 0 < last["entropy"] < 6 and last["held_out_loss"] == 1 - last["held_out_accuracy"]
        assert f"| {method} | 0.001 |" in page
    assert (out / "tiny_rewards.png").stat().st_size > 0 and page.endswith(
        (out.parent / "rewards.md").read_text() + "\n"
    )
    assert len(list((tmp_path / reward_tasks.BASES.name).glob("parity_*.pt"))) == 1
