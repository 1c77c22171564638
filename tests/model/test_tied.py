"""An embedding and a head with one weight: both partial traces of the sum of their two Fishers."""

import torch

from ds_kfac.curvature.side import Side
from ds_kfac.model.batch_sum import BatchSum, UseSums
from ds_kfac.ops.functional import symmetric_pack
from ds_kfac.step.factor_state import tied_sums
from tests.close import close

WIDTH, VOCABULARY = 3, 4


def test_factors_of_a_tied_weight_have_the_partial_traces_of_the_sum():
    generator = torch.Generator().manual_seed(0)
    head_x, embedding_g = (torch.randn(9, WIDTH, generator=generator) for _ in range(2))
    head_g, counts = (torch.rand(VOCABULARY, generator=generator) for _ in range(2))
    A_head, G_embedding = head_x.T @ head_x, 3 * embedding_g.T @ embedding_g
    head = UseSums(BatchSum(symmetric_pack(A_head), torch.tensor(9.0)), BatchSum(head_g, torch.tensor(6.0)))
    embedding = UseSums(BatchSum(counts, torch.tensor(5.0)), BatchSum(symmetric_pack(G_embedding), torch.tensor(2.0)))
    of_width, of_vocabulary = tied_sums(head, embedding, Side.dense(WIDTH), Side.diagonal(VOCABULARY))
    fisher = torch.kron(torch.diag(head_g) / 6, A_head / 9) + torch.kron(torch.diag(counts) / 5, G_embedding / 2)
    fisher = fisher.view(VOCABULARY, WIDTH, VOCABULARY, WIDTH)
    assert of_width.count == of_vocabulary.count == 1
    close(of_width.sum_P, symmetric_pack(torch.einsum("vwvx->wx", fisher)), sums=9 + VOCABULARY)
    total = torch.einsum("vwvw->", fisher)
    close(of_vocabulary.sum_P * total, torch.einsum("vwuw->vu", fisher).diagonal(), sums=9 + VOCABULARY * WIDTH)
    close(of_vocabulary.sum_P.sum(), torch.ones(()), sums=VOCABULARY * WIDTH)


def test_without_rows_of_the_head_nothing_is_folded():
    empty = UseSums(BatchSum(torch.zeros(6), torch.zeros(())), BatchSum(torch.zeros(VOCABULARY), torch.zeros(())))
    embedding = UseSums(BatchSum(torch.ones(VOCABULARY), torch.ones(())), BatchSum(torch.ones(6), torch.ones(())))
    for batch in tied_sums(empty, embedding, Side.dense(WIDTH), Side.diagonal(VOCABULARY)):
        assert batch.count == 0 and batch.sum_P.isfinite().all()
