"""Sampling one sequence to its end across weight updates, so that episode workers never see one."""

from dataclasses import replace

from headrace.errors import SamplerError
from headrace.protocols import Sampler
from headrace.types import Completion, SampleRequest, Stop


async def sample_to_end(sampler: Sampler, request: SampleRequest, *, max_interrupts: int = 1000) -> Completion:
    """Sample, and continue from the partial completion for as long as it was interrupted.

    The tokens sampled so far keep their log-probs and versions. Raises SamplerError after `max_interrupts` updates.
    """
    completion = await sampler.sample(request)
    for _ in range(max_interrupts):
        if completion.stop is not Stop.INTERRUPTED:
            return completion
        completion = await sampler.sample(replace(request, continue_from=completion))
    raise SamplerError(
        f"a sequence was interrupted {max_interrupts} times and is at {len(completion.tokens)} tokens: "
        "publish less often or sample fewer tokens"
    )
