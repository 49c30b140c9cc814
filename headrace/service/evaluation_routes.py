"""POST /runs/{run}/evaluate and /compare. They answer when they are done, and nothing of them is journalled: a client
that asks again gets the same numbers. Who hangs up ends it."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Depends, Request

from headrace.infer.endpoint.app import while_connected
from headrace.service.access import Access, ApiUser
from headrace.service.evaluation import Evaluator
from headrace.service.evaluation_bodies import Compare, Comparison, Evaluate, Evaluation


def evaluation_routes(evaluator: Evaluator, access: Access, worker: Callable[..., Awaitable[ApiUser]]) -> APIRouter:
    routes = APIRouter()
    busy = Depends(worker)

    @routes.post("/runs/{run}/evaluate")
    async def evaluate(request: Request, run: str, body: Evaluate, user: ApiUser = busy) -> Evaluation:
        """Perplexity of given sequences; of completions sampled for prompts their entropy, KL to a reference,
        diversity (distinct-n, self-BLEU) and reward. Of the run's weights after its last saved update."""
        access.begin_poll(user)
        try:
            return await while_connected(request, evaluator.evaluate(user.name, run, body))
        finally:
            access.end_poll(user)

    @routes.post("/runs/{run}/compare")
    async def compare(request: Request, run: str, body: Compare, user: ApiUser = busy) -> Comparison:
        """Two policies on one set, with the same random numbers: paired differences with 95 % intervals, the win rate
        under the reward, and the KL between them."""
        access.begin_poll(user)
        try:
            return await while_connected(request, evaluator.compare(user.name, run, body))
        finally:
            access.end_poll(user)

    return routes
