"""Questions whose one right answer a rule knows, as bytes: what the tasks with rewards ask."""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PARTS = {"validation": 0, "test": 1}
"""A tenth of all questions each, by a hash; the others train."""
END = b"\n"
PAIRS = {"(": ")", "[": "]", "{": "}"}
DEEPEST = 5


@dataclass(frozen=True)
class Rule:
    """All questions have one length; ``longest``: bytes of the longest answer, its end included."""

    draw: Callable[[random.Random], str]
    solve: Callable[[str], str]
    longest: int

    def questions(self, source: random.Random, count: int, part: str = "train") -> list[str]:
        """So many of a part; "validation", "test" and "train" share none."""
        found: list[str] = []
        while len(found) < count:
            question = self.draw(source)
            if part_of(question) == part:
                found.append(question)
        return found

    def rewards(self, questions: Sequence[str], answers: Tensor) -> Tensor:
        """1 for each right answer, else 0: fp32 [N], of bytes [N, longest]; what follows an
        answer's end is ignored."""
        ends = [bytes(row).split(END)[0] for row in answers.tolist()]
        right = [
            answer == self.solve(question).encode()
            for question, answer in zip(questions, ends, strict=True)
        ]
        return torch.tensor(right, dtype=torch.float32)


def part_of(question: str) -> str:
    place = zlib.crc32(question.encode()) % 10
    return next((part for part, own in PARTS.items() if place == own), "train")


def encoded(texts: Sequence[str]) -> Tensor:
    """Bytes int64 [N, T] of texts of one length."""
    return torch.tensor([list(text.encode()) for text in texts])


def with_answers(rule: Rule, questions: Sequence[str], ignored: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, int64 [N, T]: questions with their right answers, of which only the
    answers are learned."""
    start = len(questions[0])
    length = start + rule.longest
    tokens = torch.full((len(questions), length), END[0])
    labels = torch.full((len(questions), length), ignored)
    for row, question in enumerate(questions):
        text = torch.tensor(list(f"{question}{rule.solve(question)}".encode() + END))
        tokens[row, : len(text)] = text
        labels[row, start - 1 : len(text) - 1] = text[start:]
    return tokens, labels


def draw_brackets(source: random.Random) -> str:
    """Eight brackets, of which some are still open."""
    while True:
        text, stack = "", ""
        while len(text) < 8:
            if stack and (len(stack) == DEEPEST or source.random() < 0.4):
                text, stack = text + PAIRS[stack[-1]], stack[:-1]
            else:
                bracket = source.choice("([{")
                text, stack = text + bracket, stack + bracket
        if stack:
            return f"{text}="


def close_brackets(question: str) -> str:
    stack: list[str] = []
    for bracket in question[:-1]:
        if bracket in PAIRS:
            stack.append(PAIRS[bracket])
        else:
            stack.pop()
    return "".join(reversed(stack))


RULES = {
    "addition": Rule(
        draw=lambda source: f"{source.randrange(1000):03}+{source.randrange(1000):03}=",
        solve=lambda question: str(sum(map(int, question[:-1].split("+")))),
        longest=5,
    ),
    "sorting": Rule(
        draw=lambda source: "".join(str(source.randrange(10)) for _ in range(6)) + "=",
        solve=lambda question: "".join(sorted(question[:-1])),
        longest=7,
    ),
    "brackets": Rule(draw=draw_brackets, solve=close_brackets, longest=DEEPEST + 1),
    "parity": Rule(
        draw=lambda source: "".join(source.choice("01") for _ in range(8)) + "=",
        solve=lambda question: str(question.count("1") % 2),
        longest=2,
    ),
}
"""The sum of two numbers of three digits; six digits in their order; what closes the open brackets;
whether the ones among eight bits are odd, to try the benchmark."""
