"""Models and ranks for tests of training on several ranks."""

from headrace.train.fsdp.rank_backend import Model


def build_tiny(*, lora_rank: int = 0) -> Model:
    """The model of the contract tests, on any rank."""
    from support.implementations import tiny_model

    return Model(lm=tiny_model(lora_rank=lora_rank))
