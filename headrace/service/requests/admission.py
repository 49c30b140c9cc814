"""Decide whether the server takes one more request now, or asks its client to come again later."""

import time
from collections.abc import Callable

from headrace.service.http.auth import ApiUser, RateLimited
from headrace.service.requests.request_table import RequestTable

WINDOW_S, IDLE_S = 1.0, 5.0  # requests are counted over so long; after a longer pause the count says nothing
UNKNOWN_S, SHORTEST_S, LONGEST_S = 1.0, 0.1, 30.0  # times to come again after


class RequestAdmission:
    """Refuse requests beyond the limits of a key, and of the whole server. Lives on one event loop.

    While the server has `open_requests` or more, a key is refused if it has its share of them, which is the same for
    all keys with open requests; so no key can keep the others out. It may come again when, at the rate of the last
    seconds, the requests that wait now are done.
    """

    def __init__(
        self, requests: RequestTable, *, open_requests: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests, self._open_requests, self._clock = requests, open_requests, clock
        self._since, self._finished_before = clock(), requests.num_finished
        self._rate = 0.0  # requests that end per second; 0: not known

    def check(self, user: ApiUser) -> None:
        """Raise RateLimited when the user has to wait."""
        self._measure()
        self._requests.check_quota(user)
        if self._requests.num_open < self._open_requests:
            return
        others = self._requests.open_by_owner()
        of_user = others.pop(user.name, 0)
        if of_user >= max(1, self._open_requests // (1 + len(others))):
            raise RateLimited(
                f"the server has {self._requests.num_open} requests waiting, {of_user} of them of this key: come again "
                "when some are done",
                retry_s=self._retry_s(),
            )

    def _measure(self) -> None:
        passed_s = self._clock() - self._since
        if passed_s < WINDOW_S:
            return
        if passed_s < IDLE_S:
            self._rate = (self._requests.num_finished - self._finished_before) / passed_s
        self._since, self._finished_before = self._clock(), self._requests.num_finished

    def _retry_s(self) -> float:
        if not self._rate:
            return UNKNOWN_S
        return min(max(self._requests.num_open / self._rate, SHORTEST_S), LONGEST_S)
