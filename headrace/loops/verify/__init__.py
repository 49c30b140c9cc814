"""`headrace verify`: the proofs that matter to a user, on their machine and their model, with measured figures.

Every proof looks at the parts it is given (`parts.Parts`) and at one batch of rollouts made with them; comparisons are
pure functions beside the measurements. `docs/verify.md` says what each line means.
"""

from collections.abc import Callable, Iterator, Mapping

from headrace.errors import HeadraceError, ModelError, boundary
from headrace.loops.verify.gradients import prove_gradients
from headrace.loops.verify.parts import BOUNDS, NEEDED_CONTEXT, Parts, Played, play
from headrace.loops.verify.proof import Proof, broken_off
from headrace.loops.verify.records import prove_groups, prove_masks
from headrace.loops.verify.resume import prove_resume
from headrace.loops.verify.sampling import prove_bits, prove_first_step, prove_sampler

PROOFS: Mapping[str, Callable[[Parts, Played], Proof | tuple[Proof, ...]]] = {
    "gradients": prove_gradients,
    "the first step is on policy": prove_first_step,
    "sampler and trainer agree": prove_sampler,
    "a crowd changes no bit": prove_bits,
    "masks cover what was sampled": prove_masks,
    "groups keep their identity": prove_groups,
    "a restart changes nothing": prove_resume,
}


def verify(parts: Parts) -> Iterator[Proof]:
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
            found = broken_off(name, str(exc))
        yield from (found,) if isinstance(found, Proof) else found
