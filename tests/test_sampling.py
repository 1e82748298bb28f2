"""Greedy sampling."""

import torch

from disagg.engine.sampling import greedy


def test_each_row_gives_its_likeliest_token():
    logits = torch.tensor([[0.0, 2.0, 1.0], [-1.0, -3.0, -2.0], [5.0, 5.0, 4.0]])
    assert greedy(logits) == [1, 0, 0]
    assert greedy(logits.to(torch.bfloat16)) == [1, 0, 0]


def test_no_rows_give_no_tokens():
    assert greedy(torch.empty(0, 7)) == []
