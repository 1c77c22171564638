"""Which masks the proof finds to be of other rows: what padding leaves out has no gradient."""

import pytest
import torch
from torch import nn

from ds_kfac.model.batch import BatchInfo
from tests.model.test_proof import ROWS, WIDTH, prove
from tests.models import cross_entropy


class Padded(nn.Module):
    """Positions of which a mask leaves some out; ``how`` their rows get a gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head, self.how = nn.Linear(WIDTH, 48), nn.Linear(48, 7), how

    def forward(self, x, attention_mask):
        z, mask = torch.tanh(self.first(x)), attention_mask[..., None]
        pooled = (z * mask).sum(dim=1) / mask.sum(dim=1)
        if self.how == "a pooled token's":
            pooled = 30 * z[:, 0] + z.mean(dim=1)
        elif self.how == "the last pad's":
            last = (7 - attention_mask.sum(dim=1)).clamp(min=0)
            pooled = pooled + z[torch.arange(len(x)), last]
        loss = cross_entropy(self.head(pooled), torch.arange(len(x)) % 7)
        return loss + 1e-3 * z.square().mean() if self.how == "an auxiliary loss's" else loss


@pytest.mark.parametrize("how, foreign", [
    ("none", False), ("an auxiliary loss's", False), ("the last pad's", False), ("a pooled token's", True),
])  # fmt: skip
@pytest.mark.parametrize("known", ["padding", "padding beside prompts", ""])
def test_a_mask_is_of_other_rows_where_those_that_it_leaves_out_have_a_gradient(how, foreign, known):
    """Prompts have no label, and a gradient: of rows with labels only padding tells."""
    mask = (torch.arange(8) >= torch.tensor([0, 4, 5, 3, 4])[:, None]).long()  # padded on the left
    torch.manual_seed(0)
    x = torch.randn(ROWS, 8, WIDTH)

    def read(arguments, keywords):
        rows, prompts = mask.bool(), torch.arange(8) == 6
        if known == "padding":
            return BatchInfo(rows, padding=True)
        return BatchInfo(rows & ~prompts, attended=rows if known else None)

    found = prove(Padded(how), [{"x": x, "attention_mask": mask}], read_batch=read)
    assert [found[name].foreign for name in ("first", "head")] == [foreign and bool(known), False]
    assert all(seen.fits for seen in found.values())


class Flipped(Padded):
    """The same layer for the batch and for the batch from behind, as a scan that goes both ways has it. Pads have next
    to no gradient in the first."""

    def forward(self, x, attention_mask):
        first = torch.tanh(self.first(x))
        z = first + torch.tanh(self.first(x.flip(1))).flip(1)
        loss = cross_entropy(self.head((z * attention_mask[..., None]).sum(dim=1)), torch.arange(len(x)) % 7)
        return loss + 1e-6 * first.square().mean()


def test_a_mask_is_of_other_rows_in_a_later_call():
    mask, x = torch.arange(8) < torch.tensor([8, 4, 3, 5, 4])[:, None], torch.randn(ROWS, 8, WIDTH)
    batches = [{"x": x, "attention_mask": mask.long()}]
    found = prove(Flipped(""), batches, read_batch=lambda arguments, keywords: BatchInfo(mask, padding=True))
    assert found["first"].foreign


class Sorted(Padded):
    """Examples in the order of their lengths, as packing needs them: the mask is of the batch's order."""

    def forward(self, x, attention_mask):
        order = attention_mask.sum(dim=1).argsort(descending=True)
        return super().forward(x[order], attention_mask[order])


@pytest.mark.parametrize("lengths", [[6, 8, 4, 5, 7], [7, 3, 8, 8, 8]])
def test_a_mask_of_another_order_of_the_examples_is_of_other_rows(lengths):
    """Though few of the rows that it leaves out have a gradient."""
    mask, x = torch.arange(8) < torch.tensor(lengths)[:, None], torch.randn(ROWS, 8, WIDTH)
    batches = [{"x": x, "attention_mask": mask.long()}]
    for kind, foreign in ((Sorted, True), (Padded, False)):
        found = prove(kind(""), batches, read_batch=lambda arguments, keywords: BatchInfo(mask, padding=True))
        assert found["first"].foreign is foreign


def test_a_row_that_predicts_and_one_with_next_to_no_gradient_are_padding():
    """One pad in each example but one, all of which predict; a second pad's gradient is small."""

    class Last(Padded):
        def forward(self, x, attention_mask):
            z = torch.tanh(self.first(x))
            last = (7 - attention_mask.sum(dim=1)).clamp(min=0)
            pooled = z[torch.arange(len(x)), last] + 0.1 * (z * attention_mask[..., None]).sum(dim=1) + 1e-6 * z[:, 0]
            return cross_entropy(self.head(pooled), torch.arange(len(x)) % 7)

    mask, x = torch.arange(8) >= torch.tensor([1, 1, 1, 1, 2])[:, None], torch.randn(ROWS, 8, WIDTH)
    batches = [{"x": x, "attention_mask": mask.long()}]
    found = prove(Last(""), batches, read_batch=lambda arguments, keywords: BatchInfo(mask, padding=True))
    assert not found["first"].foreign


def test_pads_in_reach_of_a_convolution_are_padding():
    """Two of each example have a gradient, and all rows that count."""

    class Near(Padded):
        def forward(self, x, attention_mask):
            z = torch.tanh(self.first(x))
            near = sum(torch.roll(z, -k, dims=1) for k in range(3))[:, :6] * attention_mask[:, :6, None]
            return cross_entropy(self.head(near.sum(dim=1)), torch.arange(len(x)) % 7)

    mask, x = torch.arange(8) < torch.tensor([3, 2, 3, 1, 2])[:, None], torch.randn(ROWS, 8, WIDTH)
    batches = [{"x": x, "attention_mask": mask.long()}]
    found = prove(Near(""), batches, read_batch=lambda arguments, keywords: BatchInfo(mask, padding=True))
    assert not found["first"].foreign
