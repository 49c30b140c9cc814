"""Fetch models and datasets of the Hugging Face hub, always as of one commit.

`huggingface_hub` and `datasets` do the work and are imported when they are needed, so their cache, their resumed
downloads and their variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) hold. Failures become one sentence.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError, DataError, HeadraceError, ModelError, boundary

logger = logging.getLogger(__name__)

Kind = Literal["model", "dataset"]
DEFAULT_REVISION = "main"
SAID_ABOVE_BYTES = 50 << 20  # smaller downloads are not announced
_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*(?:/[A-Za-z0-9_][\w.-]*)?)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# without weights; the tokenizer's own formats have many names
_SMALL = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_WEIGHTS = (
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)
_ELSEWHERE = ("*/*",)  # other formats of the same weights are in folders of the repository


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository of the hub, and the revision that is asked for."""

    repo: str
    revision: str = DEFAULT_REVISION  # a branch, a tag or a commit

    @property
    def is_pinned(self) -> bool:
        """Tell whether the revision is a commit."""
        return _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCommit:
    """A repository, the revision that was asked for, and the commit that it was."""

    repo: str
    revision: str
    commit: str

    @property
    def pinned(self) -> str:
        """Return the name that always means this commit: "owner/name@commit"."""
        return f"{self.repo}@{self.commit}"


def hub_name(path: str, kind: Kind = "model") -> HubName | None:
    """Parse "owner/name" or "owner/name@revision"; a dataset's owner may be left out. None if it is neither.

    >>> hub_name("Qwen/Qwen3-0.6B@main"), hub_name("./model")
    (HubName(repo='Qwen/Qwen3-0.6B', revision='main'), None)
    """
    match = _NAME.fullmatch(path)
    if match is None or (kind == "model" and "/" not in match[1]):
        return None
    return HubName(repo=match[1], revision=match[2] or DEFAULT_REVISION)


def find_commit(name: HubName, kind: Kind) -> HubCommit:
    """Ask the hub for the commit of a revision; without a network, the one in the cache.

    Raises ModelError or DataError.
    """
    commit = name.revision
    if not name.is_pinned:
        small = ["README.md", "*.yaml"] if kind == "dataset" else ["config.json", "adapter_config.json"]
        commit = _fetch(name, kind, small, shown=False).name
    return HubCommit(repo=name.repo, revision=name.revision, commit=commit)


def model_files(name: HubName, *, weights: bool = True, code: bool = False) -> Path:
    """Return the folder of a model in the cache, after what is missing has been fetched.

    `code`: also the Python files. Raises ModelError.
    """
    patterns = [*_SMALL, *(_WEIGHTS if weights else ()), *(("*.py",) if code else ())]
    if weights and (missing := missing_bytes(name)) is not None and missing > SAID_ABOVE_BYTES:
        logger.info("downloading %s: %.2f GB into %s", name.repo, missing / 1e9, cache_folder())
    folder = _fetch(name, "model", patterns, shown=weights)
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name.repo} at {endpoint()} has no safetensors, and other weights are not read: choose another model, "
            "or convert it"
        )
    return folder


def model_description(name: HubName) -> Path:
    """Return a folder of the cache that has the model's config.json (or adapter_config.json), and perhaps no more."""
    described = ("config.json", "adapter_config.json")
    folder = _fetch(name, "model", described, shown=False)
    if not any((folder / file).is_file() for file in described):
        raise ModelError(
            f"{name.repo} at {endpoint()} has no config.json: it is no model of transformers; choose another"
        )
    return folder


def missing_bytes(name: HubName) -> int | None:
    """Return how much of a model is not in the cache yet; None if the hub cannot be asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        with _failures(name, "model"), _progress_bars(shown=False):
            files: Any = snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=[*_SMALL, *_WEIGHTS],
                ignore_patterns=list(_ELSEWHERE),
                dry_run=True,
            )
    except ModelError as exc:
        if isinstance(exc.__cause__, DryRunError):
            return None
        raise
    return sum(int(file.file_size) for file in files if file.will_download)


def load_hub_dataset(name: HubName, *, subset: str | None, split: str | None) -> Any:
    """Load a split of a dataset by `datasets`, as of the commit that `name` pins, if it does. Raises DataError."""
    try:
        import datasets
    except ImportError as exc:
        raise ConfigError("this source needs the package datasets: pip install 'headrace[datasets]'") from exc
    with _failures(name, "dataset"), _progress_bars(shown=True):
        builder = datasets.load_dataset_builder(name.repo, subset, revision=name.revision)
        if name.is_pinned and _COMMIT.fullmatch(builder.hash or "") and builder.hash != name.revision:
            raise DataError(
                f"the cache has {name.repo} at commit {builder.hash[:12]}, and this run needs {name.revision[:12]}: "
                "connect to the network once"
            )
        loaded = datasets.load_dataset(name.repo, subset, revision=name.revision)
    splits = ", ".join(loaded)
    if split is None and len(loaded) > 1:
        raise ConfigError(f'the dataset {name.repo} has the splits {splits}: say which, with split = "..."')
    chosen = next(iter(loaded)) if split is None else split
    if chosen not in loaded:
        raise ConfigError(f"the dataset {name.repo} has no split {chosen}; it has {splits}")
    return loaded[chosen]


def is_weights_file(name: str) -> bool:
    """Tell whether a file of a model's folder holds weights, or lists the files that do."""
    return any(fnmatch(name, pattern) for pattern in _WEIGHTS)


def is_model_file(name: str) -> bool:
    """Tell whether a file of a folder belongs to a model as transformers reads it."""
    return is_weights_file(name) or any(fnmatch(name, pattern) for pattern in _SMALL)


def upload_model(folder: Path, repo: str) -> str:
    """Upload a folder as the model `repo` of the hub, which is made (private) if it is not there; return its address.

    Raises ModelError.
    """
    from huggingface_hub import HfApi

    name = hub_name(repo)
    if name is None or name.revision != DEFAULT_REVISION:
        raise ConfigError(f'{repo} cannot be the name of a model on the hub: write "owner/name"')
    try:
        with boundary(ModelError, f"{folder} cannot be uploaded as {repo}"), _progress_bars(shown=True):
            HfApi().create_repo(repo, private=True, exist_ok=True)
            HfApi().upload_folder(repo_id=repo, folder_path=folder)
    except ModelError as exc:
        if exc.__cause__ is not None and _is_unreachable(exc.__cause__):
            raise ModelError(
                f"{folder} cannot be uploaded as {repo}, because the hub at {endpoint()} cannot be reached: connect to "
                "the network, and unset HF_HUB_OFFLINE"
            ) from exc.__cause__
        if exc.__cause__ is None or not _is_forbidden(exc.__cause__):
            raise
        raise ModelError(
            f"{folder} cannot be uploaded as {repo}, which {endpoint()} does not let you write: log in with  hf auth "
            "login  (or set HF_TOKEN to a token that may write), or take a name of your own"
        ) from exc.__cause__
    return f"{endpoint()}/{repo}"


def endpoint() -> str:
    """Return the address of the hub (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def cache_folder() -> str:
    """Return the folder that models are cached in (HF_HOME, HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _fetch(name: HubName, kind: Kind, patterns: Sequence[str], *, shown: bool) -> Path:
    """Fetch the files at the top of a repository that match a pattern; return the folder in the cache."""
    from huggingface_hub import snapshot_download

    with _failures(name, kind), _progress_bars(shown=shown):
        folder = snapshot_download(
            name.repo,
            repo_type=kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_ELSEWHERE),
        )
    return Path(folder)


@contextmanager
def _progress_bars(*, shown: bool) -> Iterator[None]:
    """Show the hub's bars for a download, or hide them; restore the setting afterwards."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    disabled = are_progress_bars_disabled()
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or disabled == (not shown):  # the user's word, or as it is
        yield
        return
    (enable_progress_bars if shown else disable_progress_bars)()
    try:
        yield
    finally:
        (disable_progress_bars if disabled else enable_progress_bars)()


@contextmanager
def _failures(name: HubName, kind: Kind) -> Iterator[None]:
    """Turn every failure to fetch a repository into one sentence that says what to do."""
    error = ModelError if kind == "model" else DataError
    try:
        with boundary(error, f"the {kind} {name.repo} cannot be fetched"):
            yield
    except HeadraceError as exc:
        sentence = None if exc.__cause__ is None else _sentence(exc.__cause__, name, kind)
        if sentence is None:
            raise
        raise error(sentence) from exc.__cause__


def _is_forbidden(cause: BaseException) -> bool:
    """Tell whether the hub knows who asks, or that nobody has logged in, and refuses."""
    answers = [getattr(link, "response", None) for link in _chain(cause)]
    refused = any(getattr(answer, "status_code", None) in (401, 403) for answer in answers)
    return refused or _has(_chain(cause), "LocalTokenNotFoundError")


def _sentence(cause: BaseException, name: HubName, kind: Kind) -> str | None:
    """Say in one sentence why the hub did not give a repository; None for a reason that is not known."""
    chain = _chain(cause)
    page = f"{endpoint()}/{'datasets/' if kind == 'dataset' else ''}{name.repo}"
    text = " ".join(str(link) for link in chain)
    if _has(chain, "GatedRepoError") or "gated dataset" in text:
        return (
            f"the {kind} {name.repo} is gated: accept its terms at {page}, then log in with  hf auth login  "
            "(or set HF_TOKEN)"
        )
    if _has(chain, "RevisionNotFoundError"):
        return f"the {kind} {name.repo} has no revision {name.revision}: see {page}/commits, or leave @... out"
    if _has(chain, "OfflineModeIsEnabled") or ("HF_HUB_OFFLINE" in text and _has(chain, "LocalEntryNotFoundError")):
        option = " --repo-type dataset" if kind == "dataset" else ""
        return (
            f"the {kind} {name.repo} (revision {name.revision}) is not whole in the cache, and HF_HUB_OFFLINE is set: "
            f"unset it, or fetch it where there is a network, with  hf download {name.repo}{option}"
        )
    if _is_unreachable(cause):
        return (
            f"the {kind} {name.repo} is not whole in the cache, and the hub at {endpoint()} cannot be reached: connect "
            "to the network, set HF_ENDPOINT to a mirror, or give a local folder"
        )
    if _has(chain, "RepositoryNotFoundError", "DatasetNotFoundError"):
        return (
            f"there is no {kind} {name.repo} at {endpoint()}: correct the name; a private one needs a token "
            "(hf auth login, or HF_TOKEN)"
        )
    if kind == "dataset" and (match := re.search(r"BuilderConfig '?(.*?)'? not found.*?(\[.*?\])", text, re.DOTALL)):
        return f"the dataset {name.repo} has no subset {match[1]}; it has {_listed(match[2])}"
    if kind == "dataset" and (
        match := re.search(r"Couldn't find cache .*? config '(.*?)'.*?(\[.*?\])", text, re.DOTALL)
    ):
        return (
            f"the dataset {name.repo} has no subset {match[1]} in the cache, only {_listed(match[2])}, and the hub is "
            "not reached: connect to the network, or unset HF_HUB_OFFLINE"
        )
    if kind == "dataset" and (match := re.search(r"Config name is missing.*?(\[.*?\])", text, re.DOTALL)):
        return f'the dataset {name.repo} has the subsets {_listed(match[1])}: say which, with subset = "..."'
    return None


def _listed(text: str) -> str:
    """Turn "['main', 'socratic']" into "main, socratic"."""
    return ", ".join(re.findall(r"'([^']*)'", text))


def _is_unreachable(cause: BaseException | None) -> bool:
    chain = _chain(cause)
    return _has(chain, "ConnectError", "ConnectTimeout", "ReadTimeout", "ConnectionError", "OfflineModeIsEnabled") or (
        _has(chain, "LocalEntryNotFoundError") and not _has(chain, "RepositoryNotFoundError", "DatasetNotFoundError")
    )


def _chain(cause: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _has(chain: list[BaseException], *names: str) -> bool:
    return any(cls.__name__ in names for link in chain for cls in type(link).__mro__)
