"""`headrace verify`: check on the user's machine and model the properties that training relies on, with figures.

Every check takes the parts under test (`subject.VerifySubject`) and one batch of rollouts made with them; comparisons
are pure functions beside the measurements. `docs/verify.md` says what each line means.

- `subject.py` holds the parts under test, and plays the rollouts.
- `gradient_check.py`: loss and gradient equal a slow reference, however the data is laid out.
- `sampling_check.py`: sampler and trainer agree, and a request does not depend on its batch.
- `mask_check.py`: masks cover exactly the sampled tokens, and episodes stay in their group.
- `adapter_check.py`: LoRA layers compute what merged weights do, and so do their gradients.
- `resume_check.py`: training continues from a checkpoint as if it had never stopped.
- `reference.py` is that slow reference, in float64.
- `property_result.py` holds figures and their bounds, and formats the table.
"""

from collections.abc import Callable, Iterator, Mapping

from headrace.errors import HeadraceError, ModelError, boundary
from headrace.verify.adapter_check import check_adapters
from headrace.verify.gradient_check import check_gradients
from headrace.verify.mask_check import check_groups, check_masks
from headrace.verify.property_result import PropertyResult, property_failed_to_run
from headrace.verify.resume_check import check_resume
from headrace.verify.sampling_check import check_bits, check_first_step, check_sampler
from headrace.verify.subject import BOUNDS, NEEDED_CONTEXT, Played, VerifySubject, play

CHECKS: Mapping[str, Callable[[VerifySubject, Played], PropertyResult | tuple[PropertyResult, ...]]] = {
    "gradients": check_gradients,
    "the first step is on policy": check_first_step,
    "sampler and trainer agree": check_sampler,
    "a crowd changes no bit": check_bits,
    "masks cover what was sampled": check_masks,
    "groups keep their identity": check_groups,
    "a restart changes nothing": check_resume,
    "adapters are merged weights": check_adapters,
}


def verify(parts: VerifySubject) -> Iterator[PropertyResult]:
    """Yield the result of every check in turn; a check that cannot be carried out has failed, and says why.

    Raises ModelError when the model's context is too short or its precision has no bounds, and the errors of rollouts
    when none can be made.
    """
    if parts.lm.context < NEEDED_CONTEXT:
        raise ModelError(f"verify needs a context of {NEEDED_CONTEXT} tokens and this model has {parts.lm.context}")
    if parts.lm.dtype not in BOUNDS:
        raise ModelError(f"verify has no bounds for {parts.lm.dtype}: load the model in float32 or bfloat16")
    played = play(parts)
    for name, check in CHECKS.items():
        try:
            with boundary(HeadraceError, "the proof broke off"):
                result = check(parts, played)
        except HeadraceError as exc:
            result = property_failed_to_run(name, str(exc))
        yield from (result,) if isinstance(result, PropertyResult) else result
