"""Decide whether the server takes one more request now, or asks its client to come again later."""

from headrace.service.http.auth import ApiUser, RateLimited
from headrace.service.requests.request_table import RequestTable

RETRY_S = 1.0


class Admission:
    """Refuse requests beyond the limits of a key, and of the whole server. Lives on one event loop.

    While the server has `open_requests` or more, a key is refused if it has its share of them, which is the same for
    all keys with open requests; so no key can keep the others out.
    """

    def __init__(self, requests: RequestTable, *, open_requests: int) -> None:
        self._requests, self._open_requests = requests, open_requests

    def check(self, user: ApiUser) -> None:
        """Raise RateLimited when the user has to wait."""
        self._requests.check_quota(user)
        if self._requests.num_open < self._open_requests:
            return
        others = self._requests.open_by_owner()
        of_user = others.pop(user.name, 0)
        if of_user >= max(1, self._open_requests // (1 + len(others))):
            raise RateLimited(
                f"the server has {self._requests.num_open} requests waiting, {of_user} of them of this key: come again "
                "when some are done",
                retry_s=RETRY_S,
            )
