"""The requests of one model: which of them wait, which have run, and which may run next."""

from dataclasses import dataclass, field

from headrace.service.requests.request_table import PendingRequest
from headrace.service.training.operations import ForwardOp, LoadOp, SaveOp


@dataclass(slots=True, eq=False)
class ModelQueue:
    """Order the requests of one model strictly by sequence number."""

    model: str
    next_seq: int = 0  # the number that runs next
    resident: bool = False  # the host has the model
    restoring: bool = False  # the host is getting it
    num_running: int = 0
    last_used: float = 0.0
    waiting: dict[int, PendingRequest] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)  # numbers beyond the saved state that have an outcome
    unsaved: set[int] = field(default_factory=set)  # numbers of updates that no saved state has
    unrecorded: set[int] = field(default_factory=set)  # numbers of states that the journal lacks yet
    num_unjournalled: int = 0  # requests that have started, and whose outcome is not in the journal yet
    restore_error: str = ""  # why a request could not be run again after a restart: the weights are not as they were

    @property
    def depth(self) -> int:
        """Count the requests that wait or run."""
        return len(self.waiting) + self.num_running

    @property
    def is_idle(self) -> bool:
        return self.resident and not self.waiting and not self.num_running and not self.num_unjournalled

    @property
    def is_behind(self) -> bool:
        """Say whether the saved state that the journal has may lack updates that were made."""
        return bool(self.unsaved or self.unrecorded) or (not self.resident and bool(self.finished))

    def position(self, seq: int) -> int:
        """Count the requests before this one."""
        return self.num_running + sum(number < seq for number in self.waiting)

    def missing_seq(self) -> int | None:
        """Return the number that has to come before anything can run, if it has not come."""
        return None if self.next_seq in self.waiting or self.num_running else self.next_seq

    def can_run(self) -> bool:
        """Say whether the next request is here and may be handed to the host."""
        while self.next_seq in self.finished and self.next_seq not in self.waiting:
            self.next_seq += 1  # it failed while it waited
        pending = self.waiting.get(self.next_seq)
        if pending is None or lacks_reference(pending):
            return False
        # a checkpoint can be loaded, or is in the way of another, once the request that saved it is in the journal
        return not (self.num_unjournalled and isinstance(pending.operation, LoadOp | SaveOp))

    def take_next(self, now: float) -> PendingRequest:
        """Remove the next request from those that wait and count it as running."""
        pending = self.waiting.pop(self.next_seq)
        self.next_seq += 1
        self.num_running += 1
        self.num_unjournalled += not pending.replay
        self.last_used = now
        return pending

    def take_unreachable(self) -> list[PendingRequest]:
        """Remove the requests that wait for numbers that have not come, and count them as finished."""
        seq = self.next_seq
        while seq in self.waiting:
            seq += 1
        return self._take([number for number in self.waiting if number > seq])

    def take_all(self) -> list[PendingRequest]:
        """Remove all requests that wait, and count them as finished."""
        return self._take(sorted(self.waiting))

    def _take(self, numbers: list[int]) -> list[PendingRequest]:
        self.finished |= set(numbers)
        return [self.waiting.pop(number) for number in numbers]

    def set_restored(self, saved_seq: int) -> None:
        """Go on behind the saved state, which the host has now."""
        self.next_seq, self.resident, self.restoring = saved_seq + 1, True, False
        self.unsaved, self.restore_error = set(), ""


def lacks_reference(pending: PendingRequest) -> bool:
    """Say whether the log-probs of a reference model are still to be computed for this request."""
    return isinstance(pending.operation, ForwardOp) and pending.operation.reference is not None
