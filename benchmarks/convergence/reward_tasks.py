"""Tasks of the convergence benchmark that learn from rewards: GRPO on a tiny GPT that a few
supervised steps have taught a little of a rule.

Of every question several answers are sampled; an answer's advantage is its reward minus the mean of
its question's, over their standard deviation (Shao et al. 2024, arXiv:2402.03300). Without a KL
term. On policy a step takes all samples of a generation; with minibatches it takes a part, and the
ratio to the sampling policy is clipped (PPO).
"""

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.convergence.bases import made_once
from benchmarks.convergence.reward_rules import END, RULES, Rule, encoded, with_answers
from examples.gpt import GPT, GPTConfig

IGNORED = -100
BASE_SEED, BASE_ROWS, BASE_RATE, BASE_WARMUP, BASE_DECAY = 0, 256, 1e-3, 20, 60
"""Of the base: its rate rises over the first steps and falls to 0 over the last ones. One that is
stopped at its full rate is so sharp that AdamW destroys it at 3e-4 in ten steps."""
NOISY = 100
"""Steps at the end of a base's training whose answers have noise."""
CLIP = 0.2
"""Of the ratio."""
SAMPLES = 8
"""Answers to a question."""
DEAD = 10
"""Generations in a row without a right answer, so without a gradient, that end a run."""
HELD_OUT, HELD_OUT_SEED = 512, 10_000


class Policy(nn.Module):
    """A network and the loss of GRPO."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.network = GPT(config)

    def forward(
        self,
        questions: Tensor,
        answers: Tensor,
        labels: Tensor,
        advantages: Tensor,
        sampled: Tensor | None = None,
    ) -> Tensor:
        """Mean over the answers' tokens.

        Args:
            questions, answers: int64 [P, T] and [N, L], N / P answers to each question in turn.
            labels: int64 [N, L], the answers, -100 after their ends.
            advantages: fp32 [N].
            sampled: fp32 [N, L], the log-probabilities that answers were sampled with; None: on
                policy.
        """
        counts = labels != IGNORED
        found = log_probabilities(self.network, questions, answers, labels)[counts]
        ratio = torch.exp(found - (found.detach() if sampled is None else sampled[counts]))
        weight = advantages[:, None].expand_as(labels)[counts]
        return -torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight).mean()


def mask(arguments: tuple, keywords: Mapping) -> Tensor:
    """For ``engine.kfac.mask``: bool [1, R] of the rows of :func:`hidden`, False for what follows
    an answer's end."""
    questions, _, labels = arguments[:3]
    counts = (labels != IGNORED).flatten()
    return torch.cat([counts.new_ones(questions[:, 1:].numel()), counts]).unsqueeze(0)


def log_probabilities(network: GPT, questions: Tensor, answers: Tensor, labels: Tensor) -> Tensor:
    """Of labels, fp32 [N, L], 0 where there is none."""
    counts = labels != IGNORED
    logits = network.lm_head(hidden(network, questions, answers)[counts]).float()
    found = -F.cross_entropy(logits, labels[counts], reduction="none")
    return found.new_zeros(labels.shape).masked_scatter(counts, found)


def hidden(network: GPT, questions: Tensor, answers: Tensor) -> Tensor:
    """What the head sees, [N, L, D], where an answer's tokens are predicted. A question is computed
    once for all of its answers: rows of all layers are those of the questions, but for their last
    bytes, and after them those of the answers."""
    (P, T), (N, L) = questions.shape, answers.shape
    last = questions[:, -1:].repeat_interleave(N // P, 0)
    tokens = torch.cat(
        [questions[:, :-1].flatten(), torch.cat([last, answers[:, :-1]], dim=1).flatten()]
    )
    places = torch.arange(T - 1 + L, device=tokens.device)
    cut, sees = P * (T - 1), places[None] <= places[T - 1 :, None]
    at = torch.cat([places[: T - 1].repeat(P), places[T - 1 :].repeat(N)])
    h = network.embed_bytes(tokens) + network.embed_positions(at)
    for block in network.blocks:
        attention = block.attention
        rows = attention.qkv(block.norm_attention(h))
        asked, answered = (
            part.view(*shape, 3, attention.heads, -1).permute(2, 0, 3, 1, 4)
            for part, shape in ((rows[:cut], (P, T - 1)), (rows[cut:], (N, L)))
        )
        keys, values = torch.cat([asked[1:].repeat_interleave(N // P, 1), answered[1:]], dim=3)
        y = [
            F.scaled_dot_product_attention(*asked, is_causal=True),
            F.scaled_dot_product_attention(answered[0], keys, values, attn_mask=sees),
        ]
        h = h + attention.out(
            torch.cat([part.transpose(1, 2).reshape(-1, h.shape[1]) for part in y])
        )
        h = h + block.mlp(block.norm_mlp(h))
    return network.norm(h[cut:]).view(N, L, -1)


@torch.no_grad()
def generate(
    network: GPT, questions: Tensor, samples: int, length: int, generator: torch.Generator
) -> Tensor:
    """Sample so many answers to each question at temperature 1, with a cache of keys and values.

    Args:
        questions: int64 [P, T].

    Returns int64 [P * samples, length].
    """
    caches: list[tuple[Tensor, Tensor]] = []
    tokens, start, found = questions, 0, []
    for place in range(length):
        h = (
            network.embed_bytes(tokens)
            + network.embed_positions.weight[start : start + tokens.shape[1]]
        )
        start += tokens.shape[1]
        for index, block in enumerate(network.blocks):
            attention, x = block.attention, block.norm_attention(h)
            shape = (*x.shape[:2], 3, attention.heads, -1)
            q, k, v = attention.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
            if place:
                k, v = (torch.cat(pair, dim=2) for pair in zip(caches[index], (k, v), strict=True))
                caches[index] = k, v
            else:  # the questions themselves; their cache serves all samples
                caches.append((k.repeat_interleave(samples, 0), v.repeat_interleave(samples, 0)))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=not place)
            h = h + attention.out(y.transpose(1, 2).reshape(x.shape))
            h = h + block.mlp(block.norm_mlp(h))
        logits = network.lm_head(network.norm(h[:, -1])).float()
        if not place:
            logits = logits.repeat_interleave(samples, 0)
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        found.append(tokens)
    return torch.cat(found, dim=1)


def labels_of(answers: Tensor) -> Tensor:
    """Answers [N, L] up to their ends; -100 after that."""
    ends = (answers == END[0]).long()
    return answers.masked_fill(ends.cumsum(1) - ends > 0, IGNORED)


@dataclass(frozen=True)
class Base:
    """A model that knows a little, and how it was made."""

    name: str
    weights: dict[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class RewardTask:
    """A rule, and how much of it is known before; ``rows``: samples in a step, ``minibatches``:
    steps a generation, ``noise``: the part of the digits in the base's answers that are drawn at
    random."""

    model: GPTConfig
    rule: str
    base_steps: int
    rows: int
    steps: int
    minibatches: int = 1
    noise: float = 0.0
    base = "adamw"
    unit = "nats per token"

    def corpus(self, path: str | None) -> Base:
        """The base model, made once, below the temporary folder.

        Raises:
            ValueError: these tasks read no data.
        """
        if path is not None:
            raise ValueError(
                f"--data {path}: tasks with rewards make their own questions; leave it out"
            )
        rates = {"rate": BASE_RATE, "rows": BASE_ROWS, "seed": BASE_SEED, "decay": BASE_DECAY}
        if self.noise:
            rates |= {"noise": self.noise, "noisy": NOISY}
        made = {"rule": self.rule, "steps": self.base_steps, **rates, "model": asdict(self.model)}
        weights = made_once(
            self.rule,
            made,
            lambda: supervised(self.model, RULES[self.rule], self.base_steps, self.noise),
        )
        generation = f"{SAMPLES} samples, {self.minibatches} steps a generation"
        return Base(f"{self.rule}, {generation}, base: {self.base_steps} steps, {rates}", weights)

    def build(self, seed: int) -> Policy:
        """The same base for every seed; seeds are of questions and samples."""
        torch.manual_seed(seed)
        policy = Policy(self.model)
        policy.network.load_state_dict(self.corpus(None).weights)
        return policy

    def questions(self, part: str) -> list[str]:
        return RULES[self.rule].questions(random.Random(HELD_OUT_SEED), HELD_OUT, part)

    def train(self, engine, seed: int, part: str, steps: int, interval: int) -> Iterator[dict]:
        """A row for every step, up to the one that shows a dead run: ``loss`` is the share of wrong
        answers in the generation, ``held_out_loss`` that among held-out questions, ``samples`` the
        answers generated so far; entropy and KL to the base are in nats per token."""
        from deepspeed.accelerator import get_accelerator

        generator_of = GPT(self.model).eval()  # a copy, as of a server for inference
        referee = Referee(self, self.questions(part))
        seconds, batches, wrong_only = 0.0, [], 0
        if hasattr(engine, "kfac"):
            engine.kfac.mask = mask
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            if not batches:
                generator_of.load_state_dict(engine.module.network.state_dict())
                batches, right = self.generation(generator_of, seed, step)
                wrong_only = 0 if right else wrong_only + 1
            loss = engine(
                *(None if values is None else values.to(engine.device) for values in batches.pop(0))
            )
            finite = bool(torch.isfinite(loss.detach()))
            if finite:
                engine.backward(loss)
                engine.step()
            get_accelerator().synchronize()
            elapsed = time.perf_counter() - begin
            seconds += elapsed
            samples = self.rows * self.minibatches * -(-step // self.minibatches)
            wrong = 1 - right if finite else torch.nan
            row = {
                "step": step,
                "seconds": seconds,
                "loss": wrong,
                "step_seconds": elapsed,
                "samples": samples,
            }
            if finite and (step % interval == 0 or step in (1, steps) or wrong_only == DEAD):
                generator_of.load_state_dict(engine.module.network.state_dict())
                row |= referee.judge(generator_of)
            yield row
            if not finite or wrong_only == DEAD:
                return

    def generation(self, network: GPT, seed: int, step: int) -> tuple[list[tuple], float]:
        """The minibatches of a generation, and the share of right answers in it."""
        rule, source = RULES[self.rule], random.Random(f"{seed} {step}")
        generator = torch.Generator().manual_seed(source.getrandbits(48))
        questions = rule.questions(source, self.rows * self.minibatches // SAMPLES)
        asked = encoded(questions)
        answers = generate(network, asked, SAMPLES, rule.longest, generator)
        rewards = rule.rewards([q for q in questions for _ in range(SAMPLES)], answers)
        groups = rewards.view(-1, SAMPLES)
        advantages = (
            (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        ).flatten()
        labels, sampled = labels_of(answers), [None]
        if self.minibatches > 1:
            with torch.no_grad():
                sampled = log_probabilities(network, asked, answers, labels).chunk(self.minibatches)
        parts = [values.chunk(self.minibatches) for values in (asked, answers, labels, advantages)]
        return list(zip(*parts, sampled, strict=True)), float(rewards.mean())


class Referee:
    """Asks held-out questions, the same with the same random numbers at every call, and measures
    how far a network is from its base."""

    def __init__(self, task: RewardTask, questions: list[str]) -> None:
        self.rule, self.questions, self.asked = RULES[task.rule], questions, encoded(questions)
        self.base = GPT(task.model).eval()
        self.base.load_state_dict(task.corpus(None).weights)

    @torch.no_grad()
    def judge(self, network: GPT) -> dict[str, float]:
        answers = generate(
            network, self.asked, 1, self.rule.longest, torch.Generator().manual_seed(HELD_OUT_SEED)
        )
        right = float(self.rule.rewards(self.questions, answers).mean())
        counts = labels_of(answers) != IGNORED
        ours, theirs = (
            net.lm_head(hidden(net, self.asked, answers)[counts]).float().log_softmax(-1)
            for net in (network, self.base)
        )
        p = ours.exp()
        return {
            "held_out_loss": 1 - right,
            "held_out_accuracy": right,
            "entropy": float(-(p * ours).sum(-1).mean()),
            "kl": float((p * (ours - theirs)).sum(-1).mean()),
        }


def noisy(
    tokens: Tensor, labels: Tensor, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens and labels [N, T], of which a part of the answers' digits is drawn anew."""
    drawn = (torch.rand(labels.shape, generator=generator) < noise) & (labels >= ord("0"))
    labels = torch.where(
        drawn, torch.randint(ord("0"), ord("9") + 1, labels.shape, generator=generator), labels
    )
    tokens = tokens.clone()
    tokens[:, 1:] = torch.where(drawn, labels, tokens.roll(-1, 1))[:, :-1]
    return tokens, labels


def supervised(config: GPTConfig, rule: Rule, steps: int, noise: float) -> GPT:
    """A network after so many steps of AdamW on right answers; in the last of them a part of the
    digits is random."""
    torch.manual_seed(BASE_SEED)
    network = GPT(config)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=BASE_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    for step in range(steps):
        part = min(1.0, (step + 1) / BASE_WARMUP, (steps - step) / BASE_DECAY)
        optimizer.param_groups[0]["lr"] = BASE_RATE * part
        source = random.Random(f"base {BASE_SEED} {step}")
        tokens, labels = with_answers(rule, rule.questions(source, BASE_ROWS), IGNORED)
        if noise and step >= steps - NOISY:
            tokens, labels = noisy(
                tokens, labels, noise, torch.Generator().manual_seed(source.getrandbits(48))
            )
        network(tokens, labels).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return network


NETWORK = GPTConfig(width=128, blocks=3, context=24)
REWARD_TASKS = {
    "addition": RewardTask(NETWORK, "addition", base_steps=550, noise=0.5, rows=512, steps=100),
    "addition_clipped": RewardTask(
        NETWORK, "addition", base_steps=550, noise=0.5, rows=128, steps=200, minibatches=4
    ),
    "brackets": RewardTask(NETWORK, "brackets", base_steps=56, rows=512, steps=100),
    "brackets_clipped": RewardTask(
        NETWORK, "brackets", base_steps=56, rows=128, steps=200, minibatches=4
    ),
    "sorting": RewardTask(NETWORK, "sorting", base_steps=68, rows=512, steps=100),
    "tiny_rewards": RewardTask(
        GPTConfig(width=16, blocks=1, heads=2, context=16), "parity", 200, 16, 4, minibatches=2
    ),
}
