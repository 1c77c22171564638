"""Tasks that learn from rewards: their rules, their sampling with a cache, GRPO's loss, and the
whole command."""

import random

import pytest
import torch

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import bases, reward_tasks
from benchmarks.convergence.methods import REWARD_METHODS, REWARD_RATES
from benchmarks.convergence.results import Job, Run, read
from benchmarks.convergence.reward_report import collapsed
from benchmarks.convergence.reward_rules import RULES, encoded, part_of, with_answers
from benchmarks.convergence.reward_tasks import (
    IGNORED,
    Policy,
    generate,
    labels_of,
    log_probabilities,
    mask,
)
from examples.gpt import GPT, GPTConfig
from tests.close import close, exact, near

TINY = GPTConfig(width=16, blocks=2, heads=2, context=16)


@pytest.mark.parametrize(
    ("rule", "question", "answer"),
    [
        ("addition", "007+995=", "1002"),
        ("sorting", "907160=", "001679"),
        ("brackets", "([{}[(){=", "}]])"),
    ],
)
def test_a_right_answer_and_nothing_else_is_rewarded(rule, question, answer):
    found = RULES[rule]
    assert found.solve(question) == answer

    def reward(text: str) -> float:
        tokens = torch.full((1, found.longest), ord("9"))
        tokens[0, : len(text)] = torch.tensor(list(text.encode()))[: found.longest]
        return float(found.rewards([question], tokens))

    assert (
        reward(f"{answer}\n") == 1 and reward(f"{answer[:-1]}\n") == 0 and reward(f"{answer}0") == 0
    )
    assert reward(f"\n{answer}") == 0


@pytest.mark.parametrize("rule", RULES)
def test_the_parts_share_no_question_and_all_answers_fit(rule):
    found = {
        part: RULES[rule].questions(random.Random(1), 200, part)
        for part in ("train", "validation", "test")
    }
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


def test_noise_is_in_the_digits_of_answers_and_in_what_follows_them():
    questions = RULES["addition"].questions(random.Random(2), 500)
    tokens, labels = with_answers(RULES["addition"], questions, IGNORED)
    found, seen = reward_tasks.noisy(tokens, labels, 0.5, torch.Generator().manual_seed(0))
    answers = labels != IGNORED
    exact(seen[~answers], labels[~answers])
    exact(found[:, 1:][answers[:, :-1]], seen[:, :-1][answers[:, :-1]])
    exact(found[:, : len(questions[0])], tokens[:, : len(questions[0])])
    digits = labels >= ord("0")
    exact(seen[answers & ~digits], labels[answers & ~digits])
    changed = float((seen != labels)[digits].float().mean())
    near(changed, 0.45, 0.05, "nine tenths of a half; five standard errors of 1,500 draws and more")
    assert int(seen[digits].min()) >= ord("0") and int(seen[digits].max()) <= ord("9")


def wide() -> GPT:
    """Far from uniform, so that a wrong row would be seen."""
    torch.manual_seed(0)
    network = GPT(TINY)
    for parameter in network.parameters():
        parameter.data.mul_(8)
    return network


def test_the_cache_changes_no_probability():
    network, asked = wide().eval(), encoded(["12+34=", "77+08="])
    answers = generate(network, asked, 3, 5, torch.Generator().manual_seed(1))
    generator, found = torch.Generator().manual_seed(1), asked.repeat_interleave(3, 0)
    for _ in range(5):
        sampled = torch.multinomial(network(found)[:, -1].softmax(-1), 1, generator=generator)
        found = torch.cat([found, sampled], dim=1)
    assert answers.shape == (6, 5) and len({tuple(row) for row in answers.tolist()}) > 3
    exact(answers, found[:, 6:], what="without a cache")


def test_a_question_that_is_computed_once_gives_the_same_logits_and_gradients():
    network, asked = wide(), encoded(["12+34=", "77+08="])
    answers = torch.randint(256, (6, 4), generator=torch.Generator().manual_seed(1))
    whole = network(torch.cat([asked.repeat_interleave(3, 0), answers], dim=1))[:, 5:-1]
    whole.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    found = network.lm_head(reward_tasks.hidden(network, asked, answers))
    found.square().sum().backward()
    close(found, whole, sums=2 * 100, what="logits")
    for name, parameter in network.named_parameters():
        close(parameter.grad, expected[name], sums=2 * 100 + 60, what=name)


ASKED, ANSWERED = ["907160=", "312312="], [b"001679\n", b"1\n23123", b"112233\n", b"0000000"]


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    answers = torch.tensor([list(answer) for answer in ANSWERED])
    return encoded(ASKED), answers, labels_of(answers)


def test_on_policy_the_gradient_is_that_of_advantage_times_log_probability():
    torch.manual_seed(0)
    policy, (asked, answers, labels) = Policy(TINY), batch()
    advantages = torch.tensor([1.5, -0.5, 0.0, 1.0])
    policy(asked, answers, labels, advantages).backward()
    found = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    total = 0.0
    for row, (answer, advantage) in enumerate(zip(ANSWERED, advantages, strict=True)):
        length = len(answer.split(b"\n")[0]) + (b"\n" in answer)
        text = torch.cat([asked[row // 2], answers[row, :length]])[None]
        logp = policy.network(text)[0, 6:-1].log_softmax(-1)
        total = total + advantage * logp.gather(1, text[0, 7:, None]).sum()
    (-total / (7 + 2 + 7 + 7)).backward()
    for name, parameter in policy.named_parameters():
        close(found[name], parameter.grad, sums=300, what=name)
    assert float(found["network.lm_head.weight"].norm()) > 0


def test_a_ratio_beyond_the_clip_gives_no_gradient():
    torch.manual_seed(0)
    policy, (asked, answers, labels) = Policy(TINY), batch()
    now = log_probabilities(policy.network, asked, answers, labels).detach()
    for shift, advantage, moves in [
        (0.3, 1.0, False),
        (0.3, -1.0, True),
        (-0.3, -1.0, False),
        (0.1, 1.0, True),
    ]:
        policy.zero_grad()
        policy(asked, answers, labels, torch.full((4,), advantage), now - shift).backward()
        assert (float(policy.network.lm_head.weight.grad.norm()) > 0) == moves, (shift, advantage)


def test_what_follows_an_answers_end_is_padding():
    asked, answers, labels = batch()
    (kept,) = mask((asked, answers, labels, torch.ones(4), None), {})
    assert len(kept) == 2 * 6 + 4 * 7
    assert kept[:12].all()
    assert kept[12:].view(4, 7).sum(1).tolist() == [7, 2, 7, 7]


def test_a_collapse_is_seen():
    def run(*right: float) -> Run:
        rows = [{"loss": 1 - r, "held_out_loss": 1 - r, "held_out_accuracy": r} for r in right]
        return Run(Job("addition", "adamw", 1e-3, 0), rows)

    assert (
        collapsed(run(0.1, 0.05))
        and collapsed(run(0.1, 0.6, 0.2))
        and not collapsed(run(0.1, 0.6, 0.5))
    )


def test_every_method_of_rewards_has_rates():
    assert set(REWARD_METHODS) <= set(REWARD_RATES)


@pytest.mark.distributed
def test_the_command_learns_from_rewards_and_writes_its_own_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "rewards"
    argv = [
        "--tasks",
        "tiny_rewards",
        "--rates",
        "1e-3",
        "--extensions",
        "0",
        "--seeds",
        "0",
        "--out",
        str(out),
    ]
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
        assert last["kl"] > 0 and 0 < last["entropy"] < 6
        near(last["held_out_loss"], 1 - last["held_out_accuracy"], 1e-5, "six digits are written")
        assert f"| {method} | 0.001 |" in page
    assert (out / "tiny_rewards.png").stat().st_size > 0 and page.endswith(
        (out.parent / "rewards.md").read_text() + "\n"
    )
    assert len(list((tmp_path / bases.FOLDER).glob("parity_*.pt"))) == 1
