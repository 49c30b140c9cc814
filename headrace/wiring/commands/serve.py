"""Build a service from serve.toml: model, host, journal, keys and application."""

import contextlib
import gc
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from fastapi import FastAPI

from headrace.envs import ENVIRONMENTS
from headrace.errors import ConfigError, FolderLockedError, StorageError, boundary
from headrace.infer.slot_cache import default_kv_tokens
from headrace.model.device import choose_device, choose_dtype
from headrace.model.load import LanguageModel, has_tokenizer, load_model, no_progress_bars
from headrace.model.memory import ModelDims, kv_bytes_per_token, model_dims, num_parameters
from headrace.model.tiny import save_tiny
from headrace.names import min_kv_tokens
from headrace.observe.machine import FROZEN_BY_PYTHON
from headrace.process.watchdog import watching_start
from headrace.render import Renderer
from headrace.service.core import Service
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import FULL_COPIES
from headrace.service.http.app import make_app
from headrace.service.http.auth import Access, HashedKey, hash_key, new_key
from headrace.service.http.prometheus_metrics import ServiceCollector
from headrace.service.http.server import check_reach
from headrace.service.settings import ServeConfig, ServedModel
from headrace.service.store.cleanup import CHECKPOINTS, SNAPSHOTS, STATES
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal, put, sqlite_file
from headrace.service.store.ownership import MARKER, SET_ASIDE, claim
from headrace.service.telemetry import Telemetry
from headrace.service.wire.image_chunks import ImageChunks
from headrace.storage import atomic_files
from headrace.storage.folder_lock import LOCK, hold_folder
from headrace.storage.hub import hub_name
from headrace.wiring.build.models import fuse_cuda_layers
from headrace.wiring.build.sinks import MetricOutputs, model_sink
from headrace.wiring.commands.serve_references import make_rewards, open_references
from headrace.wiring.picture_reader import OnDemandReader

logger = logging.getLogger(__name__)

KEY_KIND, FIRST_OWNER = "key", "local"
JOURNAL, TINY, TOKENIZER = "journal.sqlite", "tiny", "tokenizer"
OWNED = frozenset(
    {STATES, CHECKPOINTS, SNAPSHOTS, SET_ASIDE, LOCK, TINY, TOKENIZER, "metrics", "tensorboard", "wandb"}
)  # in the server's folder
JOURNAL_FILES = ("", "-wal", "-shm", ".lock")  # of SQLite


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHandle:
    """A service that is ready to listen."""

    app: FastAPI
    card: ModelCard
    new_key: str | None  # shown once; only its hash is kept


@contextlib.contextmanager
def open_service(config: ServeConfig, *, make_key: bool = False, adopt: bool = False) -> Iterator[ServiceHandle]:
    """Open everything but the socket. Without [[keys]] the first start makes a key, and `make_key` another.

    `adopt`: the folder and the journal are taken as they are, also where they do not fit.
    """
    check_reach(config.serve.host, has_keys=bool(config.keys))
    folder = Path(config.serve.folder).absolute()
    _raise_file_limit()
    with contextlib.ExitStack() as ending, contextlib.ExitStack() as stack, contextlib.ExitStack() as starting:
        starting.enter_context(watching_start("the start of the server"))
        stack.enter_context(private_files(folder, config.serve.journal))
        journal = stack.enter_context(contextlib.closing(_open_journal(config, folder)))
        stack.enter_context(_folder_lock(folder))
        claim(folder, journal, adopt=adopt)
        stack.enter_context(no_progress_bars())
        keys, fresh_key = _keys(config, journal, make_key=make_key)
        lm, tokenizer = _load(config.model, folder)
        engine = config.engine
        host = AdapterHost(
            lm,
            max_num_seqs=engine.max_num_seqs,
            kv_tokens=engine.kv_tokens or _kv_tokens(lm, engine.max_num_seqs, full=config.model.full),
            micro_batch_tokens=engine.micro_batch_tokens,
            recompute=engine.recompute,
        )
        card = ModelCard(
            name=config.model.name or _default_name(config.model.path),
            context=lm.context,
            vocabulary=lm.vocabulary,
            aliases=config.model.aliases,
            tokenizer_id=config.model.tokenizer or tokenizer,
            full=config.model.full,
        )
        tempered = config.serve.sampled_logprobs == "tempered"
        telemetry = Telemetry(lambda source: model_sink(outputs, folder, source))
        named = stack.enter_context(open_references(config, vocabulary=lm.vocabulary))
        if config.reward_models:
            raise ConfigError("[[reward_models]] are for  headrace serve --reference: leave them out, or serve that")
        rewards = make_rewards(config, lm)
        pictures = None if lm.vision is None else OnDemandReader(lm.source)
        renderer = Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens, pictures=pictures)
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
            images=ImageChunks(None if pictures is None else renderer),
        )
        access = Access(keys)
        outputs = MetricOutputs(config.metrics, collector=ServiceCollector(service, access))
        with contextlib.closing(host), contextlib.closing(outputs), contextlib.closing(telemetry):
            app = make_app(
                service, access, flags=dict(config.flags), renderer=renderer, public_url=config.serve.public_url
            )
            with prompt_collections():
                starting.close()  # the running server has a watchdog of its own
                try:
                    yield ServiceHandle(app=app, card=card, new_key=fresh_key)
                finally:
                    ending.enter_context(watching_start("the end of the server"))


@contextlib.contextmanager
def prompt_collections() -> Iterator[None]:
    """Keep models and libraries out of garbage collections. Python collects old garbage once it may be a quarter of all
    objects: with the half million of the libraries a server would keep the garbage of hours.

    A program that has frozen objects of its own is left alone: unfreezing ours would unfreeze them too.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.collect()  # only a collection counts what is left
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Hold the server's folder: two servers on one would run the same requests. Raises ConfigError if one runs there.

    A server that lost its folder to another one ends at once, before it writes anything more.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_folder(folder, on_lost=lambda: os._exit(1)))
        except FolderLockedError as exc:
            raise ConfigError(f"another server is running: {exc}; or give 'serve.folder' another") from exc
        yield


def _open_journal(config: ServeConfig, folder: Path) -> Journal:
    return Journal(config.serve.journal or str(folder / JOURNAL))


@contextlib.contextmanager
def private_files(folder: Path, journal: str = "") -> Iterator[None]:
    """Make the server's folder, and keep what the server has in it, and a journal elsewhere, to its user.

    Files that are made inside the block are 0600, folders 0700, and earlier ones of the server that others could read
    are tightened. The folder itself is, unless it holds anything else.
    """
    before = os.umask(0o077)
    try:
        with boundary(ConfigError, f"the folder {folder} cannot be made"):
            atomic_files.make_folder(folder)
        entries = list(folder.iterdir())
        owned = [entry for entry in entries if _is_servers(entry.name)]
        inside = [path for entry in owned if not entry.is_symlink() for path in entry.rglob("*")]
        file = sqlite_file(journal) if journal else None
        beside = [] if file is None else [file.with_name(file.name + end) for end in JOURNAL_FILES]
        tightened = sum(map(_tighten, (*([folder] if owned == entries else []), *owned, *inside, *beside)))
        if tightened:
            logger.warning("%d files and folders of %s could be read by other users: not any more", tightened, folder)
        yield
    finally:
        os.umask(before)


def _is_servers(name: str) -> bool:
    """Say whether a server gives this name to a file or folder."""
    own = name.removeprefix(".writing-").removeprefix(".replaced-")
    return own in OWNED or own.startswith((JOURNAL, MARKER))


def _tighten(path: Path) -> bool:
    """Take the rights of other users away; links and what belongs to another user stay. True if there were any."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) or not mode & 0o077:
            return False
        path.chmod(stat.S_IMODE(mode) & 0o700)
    except OSError as exc:
        if not isinstance(exc, FileNotFoundError):
            logger.warning("%s can be read by other users, and that cannot be changed: %s", path, exc)
        return False
    return True


def _load(c: ServedModel, folder: Path) -> tuple[LanguageModel, str]:
    """Load the base model; return it with the folder of its tokenizer, or the name on the hub."""
    path = c.path
    if path == "tiny":
        path = str(folder / TINY)
        if not (folder / TINY / "config.json").is_file():
            _write_tiny(folder / TINY, seed=c.seed)
    device = choose_device(c.device)
    lm = load_model(path, device=device, dtype=choose_dtype(c.dtype, device), vision=c.vision)
    fuse_cuda_layers(lm)
    if Path(path).is_dir() and has_tokenizer(Path(path)):
        return lm, str(Path(path).absolute())
    if not Path(path).is_dir() and (name := hub_name(path)) is not None:
        return lm, name.repo
    tokenizer = folder / TOKENIZER
    lm.tokenizer.save_pretrained(tokenizer)
    return lm, str(tokenizer)


def _default_name(path: str) -> str:
    """Return what clients call the model: its name on the hub, or ours and that of its folder."""
    name = None if Path(path).exists() else hub_name(path)
    return f"headrace/{Path(path).name}" if name is None else name.repo


def _write_tiny(target: Path, *, seed: int) -> None:
    """Write the model "tiny", whole or not at all, also if the power fails. Raises StorageError."""
    words = ENVIRONMENTS["key_door"].vocabulary()
    writing = target.with_name(f".writing-{target.name}")
    shutil.rmtree(writing, ignore_errors=True)  # of a server that was killed while writing
    with boundary(StorageError, f"the model cannot be written to {target}"):
        save_tiny(writing, words=words, width=96, layers=3, heads=4, kv_heads=2, context=512, seed=seed)
        atomic_files.fsync_tree(writing)
        atomic_files.replace_folder(writing, target, aside=target.with_name(f".replaced-{target.name}"))


def _kv_tokens(lm: LanguageModel, max_num_seqs: int, *, full: bool) -> int:
    """Return the size of the cache: for contexts as long as the model's, on a GPU within its free memory."""
    default = default_kv_tokens(max_num_seqs, lm.context)
    if lm.device.type != "cuda":
        return default
    free_bytes = torch.cuda.mem_get_info(lm.device)[0]
    shape, size = model_dims(lm.model.config.to_dict()), next(lm.model.parameters()).element_size()
    room = kv_room(shape, size, free_bytes=free_bytes, full=full)
    return min(default, max(room, min_kv_tokens(lm.context)))


def kv_room(shape: ModelDims, size: int, *, free_bytes: int, full: bool) -> int:
    """Return the cached positions that each engine may have: half of the memory is for training. A full model needs,
    beside its weights, 16 bytes per parameter for gradient, master and moments; its copies have their own engines.
    Each engine's graphs read a copy of the weights."""
    copies, parameters = FULL_COPIES if full else 0, num_parameters(shape)
    training = parameters * (size * (1 + copies) + 16) if full else 0
    decoding = parameters * size * (1 + copies)
    return max(0, free_bytes - training - decoding) // 2 // (kv_bytes_per_token(shape, size) * (1 + copies))


def _keys(config: ServeConfig, journal: Journal, *, make_key: bool) -> tuple[list[HashedKey], str | None]:
    if config.keys:
        return list(config.keys), None
    stored = [HashedKey(owner=owner, sha256=hashed) for hashed, owner in journal.records(KEY_KIND).items()]
    if stored and not make_key:
        return stored, None
    key = new_key()
    journal.write_now([put(KEY_KIND, hash_key(key), FIRST_OWNER)])
    return [*stored, HashedKey(owner=FIRST_OWNER, sha256=hash_key(key))], key


def _raise_file_limit() -> None:
    """Raise the limit of open files, if possible: every open poll is a file descriptor."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
