"""What is being waited for, in words: a report of the groups that have not ended."""

from collections.abc import Callable, Sequence

from headrace.rollout.ledger import Ticket

SHOWN = 8


def pending(tickets: Sequence[Ticket], num_sampled: Callable[[int], int]) -> str:
    """
    >>> pending([Ticket(id=3, task_id="t", started_version=1)], lambda id: 12)
    'group 3 of task t (since version 1, 12 tokens sampled)'
    """
    shown = ", ".join(
        f"group {ticket.id} of task {ticket.task_id} (since version {ticket.started_version}, "
        f"{num_sampled(ticket.id)} tokens sampled)"
        for ticket in tickets[:SHOWN]
    )
    more = f" and {len(tickets) - SHOWN} more" if len(tickets) > SHOWN else ""
    return f"{shown}{more}" if shown else "nothing"
