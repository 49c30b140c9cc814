"""Reduce over the segments of a flat tensor of tokens, without asking the device how many segments there are.

T tokens have at most T segments, so results have length T: entry s belongs to segment s, and entries past the last
segment are empty. T tokens, S = T segments.
"""

import torch
from torch import Tensor


def dense_index(labels_T: Tensor) -> Tensor:
    """Number distinct labels 0, 1, 2, ... in the order of their values, so that every number is below T."""
    sorted_T, order_T = torch.sort(labels_T, stable=True)
    steps_T = torch.zeros_like(order_T)
    steps_T[1:] = (sorted_T[1:] != sorted_T[:-1]).to(order_T.dtype)
    return torch.empty_like(order_T).scatter_(0, order_T, steps_T.cumsum(0))


def segment_sum(values_T: Tensor, index_T: Tensor) -> Tensor:
    """out_S[s] = sum of the values whose index is s."""
    assert values_T.shape == index_T.shape
    return torch.zeros_like(values_T).index_add(0, index_T, values_T)


def segment_mean(values_T: Tensor, counted_T: Tensor, index_T: Tensor) -> Tensor:
    """out_S[s] = mean of the counted values whose index is s; 0 where none is counted."""
    total_S = segment_sum(torch.where(counted_T, values_T, 0.0), index_T)
    count_S = segment_sum(counted_T.to(values_T.dtype), index_T)
    return total_S / count_S.clamp(min=1.0)


def segment_any(hits_T: Tensor, index_T: Tensor) -> Tensor:
    """out_S[s] = whether any token of segment s is hit."""
    return segment_sum(hits_T.to(torch.float32), index_T) > 0


def segment_logsumexp(values_T: Tensor, counted_T: Tensor, index_T: Tensor) -> Tensor:
    """out_S[s] = log sum exp of the counted values of segment s; 0 where none is counted."""
    low = torch.finfo(values_T.dtype).min
    masked_T = torch.where(counted_T, values_T, low)
    top_S = torch.full_like(values_T, low).scatter_reduce(0, index_T, masked_T.detach(), "amax")
    top_S = torch.where(segment_any(counted_T, index_T), top_S, 0.0)
    total_S = segment_sum(torch.where(counted_T, (masked_T - top_S[index_T]).exp(), 0.0), index_T)
    return torch.where(total_S > 0, torch.where(total_S > 0, total_S, 1.0).log() + top_S, 0.0)
