"""serve.toml to a service: model, host, journal, keys and application."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from headrace.errors import ConfigError, boundary
from headrace.infer.engine import default_kv_tokens
from headrace.model.load import LanguageModel, choose_device, choose_dtype, load_model
from headrace.model.tiny import save_tiny
from headrace.render import Renderer
from headrace.rollout.worlds import WORLDS
from headrace.service.access import Access, HashedKey, hash_key, new_key
from headrace.service.alone import only_server
from headrace.service.app import make_app
from headrace.service.figures import prometheus_text
from headrace.service.hosting.host import AdapterHost
from headrace.service.journal import Journal, put
from headrace.service.server import check_reach
from headrace.service.service import ModelCard, Service
from headrace.service.settings import ServeConfig, ServedModel
from headrace.service.telemetry import Telemetry
from headrace.wiring.metrics import Outlets, model_sink
from headrace.wiring.models import fuse
from headrace.wiring.references import make_rewards, open_references

KEY_KIND, FIRST_OWNER = "key", "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """`new_key` is told once, here; only its hash is kept."""

    app: FastAPI
    card: ModelCard
    new_key: str | None


@contextlib.contextmanager
def open_service(config: ServeConfig, *, make_key: bool = False) -> Iterator[Opened]:
    """Everything but the socket. Without [[keys]] the first start makes a key, and `make_key` another."""
    check_reach(config.serve.host, has_keys=bool(config.keys))
    folder = Path(config.serve.folder).absolute()
    with boundary(ConfigError, f"the folder {folder} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    _raise_file_limit()
    journal = Journal(config.serve.journal or str(folder / "journal.sqlite"))
    with contextlib.closing(journal), only_server(folder), contextlib.ExitStack() as stack:
        keys, made = _keys(config, journal, make_key=make_key)
        lm, tokenizer = _load(config.model, folder)
        engine = config.engine
        host = AdapterHost(
            lm,
            max_rows=engine.max_rows,
            kv_tokens=engine.kv_tokens or default_kv_tokens(engine.max_rows, lm.context),
            micro_batch_tokens=engine.micro_batch_tokens,
            recompute=engine.recompute,
        )
        card = ModelCard(
            name=config.model.name or f"headrace/{Path(config.model.path).name}",
            context=lm.context,
            vocabulary=lm.vocabulary,
            aliases=config.model.aliases,
            tokenizer_id=config.model.tokenizer or tokenizer,
            full=config.model.full,
        )
        tempered = config.serve.sampled_logprobs == "tempered"
        telemetry = Telemetry(lambda source: model_sink(outlets, folder, source))
        named = stack.enter_context(open_references(config, vocabulary=lm.vocabulary))
        rewards = make_rewards(config, lm)
        service = Service(
            host,
            card,
            journal,
            folder,
            limits=config.limits,
            tempered=tempered,
            telemetry=telemetry,
            references=named,
            rewards=rewards,
        )
        access = Access(keys)
        outlets = Outlets(config.metrics, text=lambda: prometheus_text(service, access))
        with contextlib.closing(host), contextlib.closing(outlets), contextlib.closing(telemetry):
            renderer = Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens)
            app = make_app(service, access, flags=dict(config.flags), renderer=renderer)
            yield Opened(app=app, card=card, new_key=made)


def _load(c: ServedModel, folder: Path) -> tuple[LanguageModel, str]:
    """The base model, and the folder of its tokenizer."""
    path = c.path
    if path == "tiny":
        path = str(folder / "tiny")
        if not (folder / "tiny" / "config.json").is_file():
            words = WORLDS["key_door"].vocabulary()
            save_tiny(Path(path), words=words, width=96, layers=3, heads=4, kv_heads=2, context=512, seed=c.seed)
    device = choose_device(c.device)
    lm = load_model(path, device=device, dtype=choose_dtype(c.dtype, device))
    fuse(lm)
    if Path(path).is_dir():
        return lm, str(Path(path).absolute())
    tokenizer = folder / "tokenizer"
    lm.tokenizer.save_pretrained(tokenizer)
    return lm, str(tokenizer)


def _keys(config: ServeConfig, journal: Journal, *, make_key: bool) -> tuple[list[HashedKey], str | None]:
    if config.keys:
        return list(config.keys), None
    known = [HashedKey(owner=owner, sha256=hashed) for hashed, owner in journal.records(KEY_KIND).items()]
    if known and not make_key:
        return known, None
    key = new_key()
    journal.write([put(KEY_KIND, hash_key(key), FIRST_OWNER)]).result()
    return [*known, HashedKey(owner=FIRST_OWNER, sha256=hash_key(key))], key


def _raise_file_limit() -> None:
    """Every open poll is a file descriptor; where the limit cannot be raised, it stays."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
