"""The training backend of several ranks: deals the data of a request, and merges what the ranks return."""

import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from headrace.errors import BackendError, ConfigError, HeadraceError, RanksLostError, boundary
from headrace.model.compute_thread import ComputeThread
from headrace.model.load import LanguageModel
from headrace.model.value_head import has_scalar_head
from headrace.train.batch import bind_loss, check_data, check_head
from headrace.train.fsdp.dealing import Share, deal
from headrace.train.fsdp.rank_backend import OWN_LOSS, BackendOptions, Model, RankBackend, merge_parts
from headrace.train.fsdp.ranks import Ranks
from headrace.train.fsdp.saving import LostTouchError
from headrace.train.state_writer import pass_on
from headrace.train.torch_backend import dummy_datum, dummy_loss
from headrace.types import (
    Adam,
    Datum,
    DiscardGradient,
    ForwardOut,
    LossSpec,
    ScaleUpdate,
    SharedWeights,
    UpdateOut,
    WeightsHandle,
)
from headrace.user_code import USER_MODULES

WITHOUT_STATE = ("offload", "reload", "export", "save", "close")  # commands that need no moments
R = TypeVar("R")
_numbers = itertools.count()


class FsdpBackend:
    """Trains one model on all ranks. Several backends may share the ranks.

    `build` makes the whole model on every rank, so it must be a function that other processes can import (or a
    `functools.partial` of one). `copy` is a whole model on this rank that `export_weights` keeps up to date.
    """

    def __init__(
        self,
        ranks: Ranks,
        build: Callable[[], Model],
        options: BackendOptions,
        *,
        copy: LanguageModel | None = None,
        worker: ComputeThread | None = None,  # shared with others; None: a thread of its own
    ) -> None:
        self._ranks, self._options, self._copy = ranks, options, copy
        self._number = next(_numbers)
        self._num_updates = 0
        self._written: Future[None] | None = None  # the state that was saved last
        self._offloaded = False  # the optimiser's state is in host memory; belongs to the compute thread
        self.worker = worker or ComputeThread()
        self._owns_worker = worker is None
        self._open(build).result()

    def _open(self, build: Callable[[], Model]) -> "Future[None]":
        def run() -> None:
            def make() -> RankBackend:
                model = build()
                self._vocabulary, self._context = model.lm.vocabulary, model.lm.context
                self._has_policy = not has_scalar_head(model.lm)
                self._has_scalar = model.value_head is not None or not self._has_policy
                self._dummies, self._dummy_loss = _dummies(model.lm, self._options), dummy_loss(model.lm)
                group = self._ranks.group
                return RankBackend(
                    model, self._options, group.mesh, group.saving, progress=self._ranks.progress, copy=self._copy
                )

            self._ranks.execute(self._number, "open", lambda rank: (build, self._options), what="loading", own=make)

        return self._submit("loading the model", run)

    @property
    def num_updates(self) -> int:
        """The number of updates so far; queued requests may add to it."""
        return self._num_updates

    # --- verbs: queue and return ---

    def forward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        return self._submit("forward", lambda: self._compute("forward", data, loss, want_gradient=False))

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        def run() -> ForwardOut:
            try:
                return self._compute("forward_backward", data, loss, want_gradient=True)
            except RanksLostError:
                raise
            except BaseException:  # also KeyboardInterrupt: half a gradient is worse than none
                self._call("discard", what="discarding a gradient")
                raise

        return self._submit("forward_backward", run)

    def optim_step(self, update: Adam | DiscardGradient | ScaleUpdate) -> "Future[UpdateOut]":
        def run() -> UpdateOut:
            out: UpdateOut = self._call("step", update, what="optim_step")[0]
            self._num_updates = out.num_updates
            return out

        return self._submit("optim_step", run)

    def save_state(self, folder: Path) -> "Future[None]":
        """Copy the shards in their turn, and write them beside what comes after."""
        written: Future[None] = Future()
        written.set_running_or_notify_cancel()
        forget = self._ranks.on_loss(lambda lost: _fail(written, lost))
        written.add_done_callback(lambda done: forget())
        self._written = written

        def run() -> "Future[None]":
            saving: Future[None] = self._call("save", folder.absolute(), what="save_state")[0]
            return saving

        def write(copied: "Future[Future[None]]") -> None:
            if (error := copied.exception()) is not None:
                _fail(written, error)
            else:
                copied.result().add_done_callback(pass_on_cause)

        def pass_on_cause(ended: "Future[None]") -> None:
            if isinstance(ended.exception(), LostTouchError) and (lost := self._ranks.find_loss()) is not None:
                _fail(written, lost)
            pass_on(ended, written)

        try:
            self._submit("save_state", run).add_done_callback(write)
        except BaseException:
            forget()
            raise
        return written

    def load_state(self, folder: Path) -> "Future[None]":
        saving = self._written

        def run() -> None:
            if saving is not None:  # it may be the state that is loaded
                wait([saving])
            self._num_updates = self._call("load", folder.absolute(), what="load_state")[0]

        return self._submit("load_state", run)

    def export_weights(self) -> "Future[WeightsHandle]":
        return self._submit(
            "export_weights", lambda: SharedWeights(fingerprint=self._call("export", what="export_weights")[0])
        )

    def gradients(self) -> "Future[dict[str, Tensor]]":
        """Gather the accumulated gradient, by parameter, for checks of a training loop."""
        return self._submit("gradients", lambda: self._call("gradients", what="gradients")[0])

    def offload(self) -> "Future[None]":
        """Move the optimiser's state of every rank to host memory, as `TorchBackend` does with its own.

        The float32 masters of a rank are the weights that it stores, and stay.
        """

        def run() -> None:
            self._call("offload", what="offload")
            self._offloaded = True

        return self._submit("offload", run)

    def reload(self) -> "Future[None]":
        """Bring the optimiser's state back to the devices; does nothing if it is there."""
        return self._submit("reload", self._reload)

    def check_memory(self, longest: int) -> "Future[None]":
        """Compute the largest micro-batches there can be on every rank and discard them.

        `longest`: tokens of the longest sequence.
        """

        def run() -> None:
            data = self._dummies(longest)
            half = len(data) // 2  # two of them, so that gradients have to add up
            batches = (tuple(range(half)), tuple(range(half, len(data))))
            share = Share(indices=tuple(range(len(data))), data=tuple(data), micro_batches=batches, num_micro_batches=2)
            what = "the largest micro-batch (lower 'micro_batch_tokens', or write 'model.recompute = true')"
            self._call("compute", share, self._dummy_loss, True, what=what)
            self._call("discard", what="discarding a gradient")

        return self._submit("the largest micro-batch", run)

    def close(self) -> None:
        """Drop the model on all ranks, and end the compute thread if it is the backend's own."""

        def run() -> None:
            self._call("close", what="closing")

        with suppress(HeadraceError):  # a rank is lost, or the thread is closed: nothing is left to drop
            self._submit("closing", run).result()
        if self._owns_worker:
            self.worker.close()

    # --- on the compute thread ---

    def _submit(self, what: str, run: Callable[[], R]) -> "Future[R]":
        """Queue a request. Its future fails at once when a rank is lost, though the thread may hang in a collective."""
        outer: Future[R] = Future()
        outer.set_running_or_notify_cancel()

        def guarded() -> R:
            with boundary(BackendError, f"{what} failed"):
                try:
                    return run()
                except ConfigError as exc:  # a loss that does not fit the data is this request's failure
                    raise BackendError(str(exc)) from exc

        forget = self._ranks.on_loss(lambda lost: _fail(outer, lost))

        def copy(inner: "Future[R]") -> None:
            forget()
            error = inner.exception()
            if error is not None:
                _fail(outer, error)
            elif not outer.done():
                outer.set_result(inner.result())

        try:
            self.worker.submit(guarded, what=f"the trainer: {what}").add_done_callback(copy)
        except BaseException:
            forget()
            raise
        return outer

    def _reload(self) -> None:
        if self._offloaded:
            self._offloaded = False
            self._call("reload", what="reload")

    def _call(self, verb: str, *arguments: Any, what: str) -> list[Any]:
        if verb not in WITHOUT_STATE:
            self._reload()
        return self._ranks.execute(self._number, verb, lambda rank: arguments, what=what)

    def _compute(self, what: str, data: Sequence[Datum], spec: LossSpec, *, want_gradient: bool) -> ForwardOut:
        loss = bind_loss(spec)
        check_head(loss, policy=self._has_policy, scalar=self._has_scalar)
        check_data(data, loss, vocabulary=self._vocabulary, context=self._context)
        shares = deal(data, self._ranks.num_ranks, budget=self._options.micro_batch_tokens)
        sent = self._sent(spec)
        if want_gradient:
            self._reload()
        parts = self._ranks.execute(
            self._number, "compute", lambda rank: (shares[rank], spec if rank == 0 else sent, want_gradient), what=what
        )
        return merge_parts(parts, shares, data)

    def _sent(self, spec: LossSpec) -> LossSpec:
        """Return the loss as other ranks can read it."""
        if isinstance(spec.fn, str) or self._ranks.num_ranks == 1 or is_importable(spec.fn):
            return spec
        if self._options.make_loss is not None:
            return replace(spec, fn=OWN_LOSS)
        raise BackendError(
            f"the loss {spec.name} cannot be sent to other ranks: give a name, or a function of a module"
        )


def is_importable(function: Callable[..., Any]) -> bool:
    """Tell whether other processes can import a function by its module and name."""
    module, name = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "")
    if module == "__main__" or module.startswith(USER_MODULES):
        return False
    return getattr(sys.modules.get(module), name, None) is function


def _fail(future: "Future[Any]", error: BaseException) -> None:
    with suppress(InvalidStateError):  # it has an outcome
        future.set_exception(error)


def _dummies(lm: LanguageModel, options: BackendOptions) -> Callable[[int], list[Datum]]:
    def make(longest: int) -> list[Datum]:
        count, rest = divmod(max(options.micro_batch_tokens, longest), longest)
        lengths = [longest] * count + ([rest] if rest else [])
        return [dummy_datum(length, first, lm) for first, length in enumerate(lengths + lengths)]

    return make
