"""Our own client of the training service: futures that are awaited twice, groups of them, and the two protocols.

    service = ServiceClient("http://127.0.0.1:8765", api_key="tml-...")
    model = service.create_training(rank=8).result()      # or await it
    accepted = await model.forward_backward(data, CROSS_ENTROPY)  # it is in the server's journal
    out = await accepted                                  # it is done

Nothing here knows the server's side but the layout of the wire.
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
