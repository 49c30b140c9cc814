"""A service over a tiny model, served on this machine until the tests have ended, and our own clients of it."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.model.load import LanguageModel
from headrace.service.client import ServiceClient, TrainingClient
from headrace.service.core import Service
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.http.app import make_app
from headrace.service.http.auth import Access
from headrace.service.http.server import serving
from headrace.service.settings import Limits
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal

_open: list[tuple[str, contextlib.ExitStack]] = []


def tiny_service(make: Callable[[], LanguageModel]) -> str:
    """The URL of the one service of this process, which is started by whoever asks first."""
    if not _open:
        with contextlib.ExitStack() as stack:
            url = stack.enter_context(serve_model(make()))
            _open.append((url, stack.pop_all()))
    return _open[0][0]


def close_service() -> None:
    while _open:
        _open.pop()[1].close()


@contextlib.contextmanager
def serve_model(lm: LanguageModel) -> Iterator[str]:
    """The URL of a service of its own over this model, without keys."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context, vocabulary = lm.model.config.max_position_embeddings, lm.model.config.vocab_size
        host = AdapterHost(lm, max_num_seqs=8, kv_tokens=8 * context, micro_batch_tokens=64)
        journal = Journal(str(folder / "journal.sqlite"))
        card = ModelCard(name="tiny", context=context, vocabulary=vocabulary)
        service = Service(host, card, journal, folder, limits=Limits(poll_s=5.0))
        with serving(make_app(service, Access([]))) as url:
            yield url
        host.close()
        journal.close()


@contextlib.contextmanager
def remote_service(make: Callable[[], LanguageModel]) -> Iterator[ServiceClient]:
    with ServiceClient(tiny_service(make), retry_s=10.0) as service:
        yield service


@contextlib.contextmanager
def remote_model(make: Callable[[], LanguageModel]) -> Iterator[TrainingClient]:
    with remote_service(make) as service:
        yield service.create_training(rank=2, seed=0).result(100)
