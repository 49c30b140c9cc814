"""Copies of a model: with parameters of its own, or with those of the original and only the modules its own."""

import copy
from dataclasses import replace

from headrace.model.load import LanguageModel


def shared_view(lm: LanguageModel) -> LanguageModel:
    """Other modules over the same parameters and buffers: layers may be exchanged in it and the original not know."""
    tensors = [*lm.model.parameters(), *lm.model.buffers()]
    memo = {id(tensor): tensor for tensor in tensors} | {id(lm.model.config): lm.model.config}
    return replace(lm, model=copy.deepcopy(lm.model, memo))


def full_copy(lm: LanguageModel) -> LanguageModel:
    """Parameters of its own, without gradients."""
    twin = replace(lm, model=copy.deepcopy(lm.model))
    for parameter in twin.model.parameters():
        parameter.grad = None
    return twin
