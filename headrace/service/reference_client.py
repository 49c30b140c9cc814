"""A frozen model in another process (`headrace serve --reference`), scored over HTTP from whichever thread asks."""

import time
from collections.abc import Sequence

import httpx

from headrace.algo.packing import consecutive_batches
from headrace.errors import ModelError, RequestError
from headrace.service.client.codec import read_forward, write_forward
from headrace.service.wire import PROTOBUF
from headrace.types import CROSS_ENTROPY, Datum, FloatArray

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
REFERENCE_KEY = "HEADRACE_REFERENCE_KEY"  # the environment variable that holds its key, unless another is named


class RemoteReference:
    """`url`: http://HOST:PORT/NAME. A server that does not answer, or is busy, is asked again for `retry_s`;
    `timeout_s` is of one answer. Data are sent `batch_tokens` at a time."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        retry_s: float = 120.0,
        timeout_s: float = 600.0,
        batch_tokens: int = 65536,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        server, _, self.name = url.rstrip("/").rpartition("/")
        self._url, self._retry_s, self._batch_tokens = server, retry_s, batch_tokens
        self._http = httpx.Client(
            base_url=server, headers={} if key is None else {"X-API-Key": key}, timeout=timeout_s, transport=transport
        )

    def score(self, data: Sequence[Datum]) -> tuple[FloatArray, ...]:
        """Log-probs of the targets where weights are not 0. Raises ModelError, and RequestError for data that the
        server's model cannot read."""
        found: list[FloatArray] = []
        for indices in consecutive_batches([datum.num_tokens for datum in data], budget=self._batch_tokens):
            batch = [data[index] for index in indices]
            body = bytes(write_forward(batch, CROSS_ENTROPY, backward=False).SerializeToString())
            found += read_forward(self._ask(body)).logprobs
        return tuple(found)

    def close(self) -> None:
        self._http.close()

    def _ask(self, body: bytes) -> bytes:
        began, wait_s = time.monotonic(), FIRST_WAIT_S
        while True:
            try:
                reply = self._http.post(
                    f"/references/{self.name}/score", content=body, headers={"Content-Type": PROTOBUF}
                )
            except httpx.RequestError as exc:
                why = f"{type(exc).__name__} {exc}".strip()
            else:
                if reply.status_code == 200:
                    return reply.content
                why = _sentence(reply)
                if reply.status_code != 429 and reply.status_code < 500:
                    wrong = RequestError if reply.status_code == 400 else ModelError
                    raise wrong(f"the reference server at {self._url} refused: {why}")
            if time.monotonic() + wait_s - began > self._retry_s:
                raise ModelError(f"the reference server at {self._url} did not answer for {self._retry_s:g} s: {why}")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _sentence(reply: httpx.Response) -> str:
    told = reply.json() if reply.headers.get("content-type", "").startswith("application/json") else {}
    return str(told.get("detail", reply.text[:200])) if isinstance(told, dict) else reply.text[:200]
