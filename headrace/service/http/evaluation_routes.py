"""The routes POST /runs/{run}/evaluate and /compare.

They answer when the evaluation is done, and nothing is journalled: a client that asks again gets the same numbers. A
client that hangs up ends its evaluation.
"""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Depends, Request

from headrace.infer.openai_api.app import while_connected
from headrace.service.evaluation.evaluate_policy import Evaluator
from headrace.service.http.auth import Access, ApiUser
from headrace.service.http.evaluation_schemas import Compare, Comparison, Evaluate, Evaluation


def evaluation_routes(evaluator: Evaluator, access: Access, rate_limit: Callable[..., Awaitable[ApiUser]]) -> APIRouter:
    routes = APIRouter()
    limited_user = Depends(rate_limit)

    @routes.post("/runs/{run}/evaluate")
    async def evaluate(request: Request, run: str, body: Evaluate, user: ApiUser = limited_user) -> Evaluation:
        """Evaluate the run's weights after its last saved update: perplexity of sequences; entropy, KL to a reference,
        diversity (distinct-n, self-BLEU) and reward of completions sampled for prompts."""
        with access.polling(user):
            return await while_connected(request, evaluator.evaluate(user.name, run, body))

    @routes.post("/runs/{run}/compare")
    async def compare(request: Request, run: str, body: Compare, user: ApiUser = limited_user) -> Comparison:
        """Compare two policies on one set, with the same random numbers: paired differences with 95 % intervals, the
        win rate under the reward, and the KL between them."""
        with access.polling(user):
            return await while_connected(request, evaluator.compare(user.name, run, body))

    return routes
