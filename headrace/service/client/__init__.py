"""Client of the training service, with futures for threads and event loops, and adapters to the package's protocols.

    service = ServiceClient("http://127.0.0.1:8765", api_key="tml-...")
    model = service.create_training(rank=8).result()      # or await it
    accepted = await model.forward_backward(data, CROSS_ENTROPY)  # it is in the server's journal
    out = await accepted                                  # it is done

Of the server, nothing here knows more than the layout of the wire.

- `session`: `ServiceClient`, the session that training and sampling clients share.
- `training`: `TrainingClient`, one model at the service.
- `sampling`: `SamplingClient`, which samples from fixed weights.
- `futures`: futures of requests, and groups of them.
- `transport`: HTTP with retries, on a thread with an event loop of its own.
- `codec`: values of the package to bytes of the wire, and back.
- `backend`: `ServiceBackend` and `ServiceSampler`, which satisfy `TrainBackend` and `Sampler`.
"""

from headrace.service.client.backend import ServiceBackend, ServiceSampler
from headrace.service.client.futures import Accepted, FutureGroup, RequestFuture, RequestStatus, SyncAsyncFuture
from headrace.service.client.sampling import SamplingClient
from headrace.service.client.session import ServiceClient
from headrace.service.client.training import QueueStats, TrainingClient
from headrace.service.http.evaluation_schemas import Compare, Comparison, Evaluate, Evaluation, EvaluationPrompt, Given
from headrace.service.wire.server_inputs import GaeSettings, ServerInputs

__all__ = [
    "Accepted",
    "Compare",
    "Comparison",
    "Evaluate",
    "Evaluation",
    "EvaluationPrompt",
    "FutureGroup",
    "GaeSettings",
    "Given",
    "QueueStats",
    "RequestFuture",
    "RequestStatus",
    "SamplingClient",
    "ServerInputs",
    "ServiceBackend",
    "ServiceClient",
    "ServiceSampler",
    "SyncAsyncFuture",
    "TrainingClient",
]
