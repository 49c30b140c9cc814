"""Say what this machine has and what would run on it, ending with a check of reproducible sampling."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager

from headrace import __version__
from headrace.errors import HeadraceError, boundary
from headrace.model.memory import choose_placement
from headrace.model.supported import ON_CUDA, REFUSED, SUPPORTED
from headrace.observe import machine
from headrace.observe.explain_text import chosen_text, support_table
from headrace.reward.user_term import sandbox_text

SamplingCheck = tuple[bool, str, tuple[str, ...]]  # reproducible?, in what respect, model types decoded in graphs
Waiting = Callable[[str], AbstractContextManager[Callable[[str], None]]]  # shows what is being waited for


def describe_machine(checking: "Future[SamplingCheck]", waiting: Waiting) -> Iterator[str]:
    """Yield the texts to print. `checking` is asked for last: what it needs may be what is broken.

    Raises HeadraceError when nothing can run on this machine, or sampling is not reproducible.
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
        ok, detail, in_graphs = checking.result()
    yield f"decoded in CUDA graphs: {', '.join(in_graphs)}; other types step by step\n"
    yield f"reward sandbox: {sandbox_text()}"
    yield f"reproducible sampling: {'yes' if ok else 'NO'}, {detail}"
    if not ok:
        raise HeadraceError("sampled tokens depend on what else is in the batch on this machine; see the line above")


def check_sampling() -> SamplingCheck:
    """Check that sampling is reproducible, and list the model types that CUDA decodes in graphs; loads torch."""
    from headrace.infer.cuda.layer_weights import TYPES
    from headrace.infer.determinism_check import check_bit_equality

    result = check_bit_equality()
    return result.ok, result.detail, TYPES
