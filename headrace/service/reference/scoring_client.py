"""A frozen model in another process (`headrace serve --reference`), scored over HTTP from any thread."""

import time
from collections.abc import Callable, Sequence

import httpx

from headrace.algo.packing import consecutive_batches
from headrace.errors import ModelError, RequestError
from headrace.retry import Backoff, GaveUp, TryAgain, check_transient, doubling, reply_words, retry
from headrace.service.client.codec import read_forward, write_forward
from headrace.service.wire.messages import PROTOBUF
from headrace.types import CROSS_ENTROPY, Datum, FloatArray

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
REFERENCE_KEY = "HEADRACE_REFERENCE_KEY"  # the environment variable that holds its key, unless another is named


class RemoteReference:
    """`url`: http://HOST:PORT/NAME. A server that does not answer, or is busy, is asked again for `retry_s`;
    `timeout_s` is of one answer. Data are sent `batch_tokens` at a time. `transport` and `sleep` are for
    tests."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        retry_s: float = 120.0,
        timeout_s: float = 600.0,
        batch_tokens: int = 65536,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        server, _, self.name = url.rstrip("/").rpartition("/")
        self._url, self._retry_s, self._batch_tokens, self._sleep = server, retry_s, batch_tokens, sleep
        self._http = httpx.Client(
            base_url=server, headers={} if key is None else {"X-API-Key": key}, timeout=timeout_s, transport=transport
        )

    def score(self, data: Sequence[Datum]) -> tuple[FloatArray, ...]:
        """Return log-probs of the targets where weights are not 0. Raises ModelError, and RequestError for data that
        the server's model cannot read."""
        logprobs: list[FloatArray] = []
        for indices in consecutive_batches([datum.num_tokens for datum in data], budget=self._batch_tokens):
            batch = [data[index] for index in indices]
            body = bytes(write_forward(batch, CROSS_ENTROPY, backward=False).SerializeToString())
            logprobs += read_forward(self._ask(body)).logprobs
        return tuple(logprobs)

    def close(self) -> None:
        self._http.close()

    def _ask(self, body: bytes) -> bytes:
        where = f"the reference server at {self._url}"

        def attempt() -> bytes:
            try:
                reply = self._http.post(
                    f"/references/{self.name}/score", content=body, headers={"Content-Type": PROTOBUF}
                )
            except httpx.RequestError as exc:
                raise TryAgain(f"{type(exc).__name__}: {exc}") from exc
            status, content = reply.status_code, reply.content
            if status == 200:
                return content
            check_transient(status, reply.headers, content)
            error = RequestError if status == 400 else ModelError
            raise error(f"{where} refused: {reply_words(status, content)}")

        try:
            return retry(attempt, Backoff(doubling(FIRST_WAIT_S, LONGEST_WAIT_S), self._retry_s), self._sleep)
        except GaveUp as exc:
            raise ModelError(f"{where} did not answer for {self._retry_s:g} s: {exc}") from exc
