"""`headrace verify`: the proofs that matter to a user, on their machine and their model, with measured figures.

Every proof looks at the parts it is given (`parts.Parts`) and at one batch of rollouts made with them; comparisons are
pure functions beside the measurements. `docs/verify.md` says what each line means.
"""

from collections.abc import Callable, Iterator, Mapping

from headrace.errors import HeadraceError, ModelError, boundary
from headrace.verify.gradient_check import prove_gradients
from headrace.verify.mask_check import prove_groups, prove_masks
from headrace.verify.property_result import PropertyResult, property_failed_to_run
from headrace.verify.resume_check import prove_resume
from headrace.verify.sampling_check import prove_bits, prove_first_step, prove_sampler
from headrace.verify.subject import BOUNDS, NEEDED_CONTEXT, Played, VerifySubject, play

PROOFS: Mapping[str, Callable[[VerifySubject, Played], PropertyResult | tuple[PropertyResult, ...]]] = {
    "gradients": prove_gradients,
    "the first step is on policy": prove_first_step,
    "sampler and trainer agree": prove_sampler,
    "a crowd changes no bit": prove_bits,
    "masks cover what was sampled": prove_masks,
    "groups keep their identity": prove_groups,
    "a restart changes nothing": prove_resume,
}


def verify(parts: VerifySubject) -> Iterator[PropertyResult]:
    """Every proof in turn; one that cannot be carried out has failed, and says why.

    Raises ModelError when the model is too small or of a precision that nothing is known about, and what rollouts
    raise when none can be made.
    """
    if parts.lm.context < NEEDED_CONTEXT:
        raise ModelError(f"verify needs a context of {NEEDED_CONTEXT} tokens and this model has {parts.lm.context}")
    if parts.lm.dtype not in BOUNDS:
        raise ModelError(f"verify has no bounds for {parts.lm.dtype}: load the model in float32 or bfloat16")
    played = play(parts)
    for name, prove in PROOFS.items():
        try:
            with boundary(HeadraceError, "the proof broke off"):
                found = prove(parts, played)
        except HeadraceError as exc:
            found = property_failed_to_run(name, str(exc))
        yield from (found,) if isinstance(found, PropertyResult) else found
