"""Say what this machine has and what would run on it, ending with a check of reproducible sampling."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager

from headrace import __version__
from headrace.errors import HeadraceError, boundary
from headrace.model.memory import choose_placement
from headrace.model.supported import ON_CUDA, REFUSED, SUPPORTED
from headrace.observe import machine
from headrace.observe.explain_text import chosen_text, support_table
from headrace.reward.user_term import sandbox_text

SamplingCheck = tuple[bool, str, tuple[str, ...]]  # reproducible?, in what respect, model types decoded in graphs
Waiting = Callable[[str], AbstractContextManager[Callable[[str], None]]]  # shows what is being waited for
CHECK_S = 900.0  # for the check of sampling: a GPU may compile kernels first


def describe_machine(checking: "Future[SamplingCheck]", waiting: Waiting, *, limit_s: float = CHECK_S) -> Iterator[str]:
    """Yield the texts to print. `checking` is asked for last: what it needs may be what is broken.

    Raises HeadraceError when nothing can run on this machine, sampling is not reproducible, or its check takes longer
    than `limit_s` from then on.
    """
    with waiting("looking at this machine") as tell:
        facts = machine.machine_facts(tell=lambda name: tell(f"importing {name}"))
    yield f"headrace      {__version__}\n{machine.format_machine(facts)}\n"
    gpus = [gpu["name"] for gpu in facts["gpus"]]
    placement = choose_placement(device="auto", dtype="auto", gpus=gpus, mps=bool(facts["torch"].get("mps")))
    yield f"headrace would use\n{chosen_text(placement)}\n"
    broken = [name for name in ("torch", "transformers") if not facts["packages"][name]["ok"]]
    if broken:
        raise HeadraceError(f"{' and '.join(broken)} cannot be imported, so nothing can run: run  pip install headrace")
    covered = {kind: note if kind in ON_CUDA else f"{note} (on a CPU only)" for kind, note in SUPPORTED.items()}
    yield f"model types\n{support_table(covered, REFUSED)}\n"
    with waiting("sampling alone, in a crowd and preempted"), boundary(HeadraceError, "sampling cannot be checked"):
        try:
            ok, detail, in_graphs = checking.result(limit_s)
        except TimeoutError:
            raise HeadraceError(
                f"the check of sampling has not ended after {limit_s:g} s, so a run would hang here too: look at what "
                "the driver of the GPU says (nvidia-smi, dmesg), and whether sampling works on the CPU: "
                "CUDA_VISIBLE_DEVICES= headrace doctor"
            ) from None
    yield f"decoded in CUDA graphs: {', '.join(in_graphs)}; other types step by step\n"
    yield f"reward sandbox: {sandbox_text()}"
    yield f"reproducible sampling: {'yes' if ok else 'NO'}, {detail}"
    if not ok:
        raise HeadraceError("sampled tokens depend on what else is in the batch on this machine; see the line above")


@contextmanager
def checking_aside(check: Callable[[], SamplingCheck]) -> Iterator["Future[SamplingCheck]"]:
    """Yield the future of a check in a process of its own, which is killed at the end if it still runs."""
    before = {child.pid for child in multiprocessing.active_children()}
    pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
    checking = pool.submit(check)
    own = [child for child in multiprocessing.active_children() if child.pid not in before]
    try:
        yield checking
    finally:
        if not checking.done():
            for child in own:
                child.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def check_sampling() -> SamplingCheck:
    """Check that sampling is reproducible, and list the model types that CUDA decodes in graphs; loads torch."""
    from headrace.infer.cuda.layer_weights import TYPES
    from headrace.infer.determinism_check import check_bit_equality

    result = check_bit_equality()
    return result.ok, result.detail, TYPES
