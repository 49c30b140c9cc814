"""Evaluation of policies at the service.

- `evaluate_policy`: evaluate one policy, or compare two on one set.
- `evaluation_metrics`: metrics and paired differences. Pure.
- `distributions`: entropy and KL in nats per token.
- `completion_rewards`: reward completions with the owner's functions.
- `reference_scoring`: score data under reference models by name.
- `diversity`: how alike samples are. Pure.
"""
