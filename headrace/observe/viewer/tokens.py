"""Turn tokens of an episode into texts with their figures, and choose the colour of a figure.

Text comes from a tokenizer.json beside the run's checkpoints; without one, tokens are shown as their ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tokenizers import Tokenizer

from headrace.errors import ConfigError, RunFolderError, boundary
from headrace.observe.rollouts.records import EpisodeRecord, StepRecord, TokensRecord
from headrace.observe.viewer.graph import advantage_tone
from headrace.observe.viewer.safe_text import figure

Pieces = Callable[[Sequence[int]], list[str]]  # ids -> one text each


class ColorBy(StrEnum):
    """The figure that tokens are coloured by."""

    LOGPROB = "logprob"
    ADVANTAGE = "advantage"
    MASK = "mask"
    VERSION = "version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token and its figures."""

    text: str
    logprob: float | None = None  # None if the policy did not sample the token, as the two below
    advantage: float | None = None
    version: int | None = None

    @property
    def sampled(self) -> bool:
        return self.version is not None

    def figure(self, by: ColorBy) -> str:
        """Format the figure that stands in brackets where there is no colour; empty for a token without it."""
        match by:
            case ColorBy.MASK:
                return "1" if self.sampled else "0"
            case ColorBy.LOGPROB:
                return "" if self.logprob is None else f"{self.logprob:.2f}".replace("-0.00", "0.00")
            case ColorBy.ADVANTAGE:
                return "" if self.advantage is None else figure(self.advantage, sign=True)
            case ColorBy.VERSION:
                return "" if self.version is None else str(self.version)


LOGPROB_BOUNDS = (-0.1, -0.5, -1.5, -3.0)
LEGEND: dict[ColorBy, tuple[tuple[str, str], ...]] = {  # (tone, words), from one end to the other
    ColorBy.LOGPROB: (
        ("l0", "above -0.1"),
        ("l1", "to -0.5"),
        ("l2", "to -1.5"),
        ("l3", "to -3"),
        ("l4", "below -3: a surprise"),
    ),
    ColorBy.ADVANTAGE: (
        ("a-3", "to -1.5"),
        ("a-2", "to -0.5"),
        ("a-1", "below 0"),
        ("a0", "0"),
        ("a1", "above 0"),
        ("a2", "from 0.5"),
        ("a3", "from 1.5"),
    ),
    ColorBy.MASK: (("m1", "sampled by the policy, trained"), ("m0", "prompt, not trained")),
    ColorBy.VERSION: tuple((f"v{k}", f"version {k} mod 6") for k in range(6)),
}


def tone(token: Token, by: ColorBy) -> str:
    """Return the name of a token's colour; empty if it has none."""
    match by:
        case ColorBy.MASK:
            return "m1" if token.sampled else "m0"
        case ColorBy.LOGPROB:
            logprob = token.logprob
            return "" if logprob is None else f"l{sum(logprob < bound for bound in LOGPROB_BOUNDS)}"
        case ColorBy.ADVANTAGE:
            return "" if token.advantage is None else f"a{advantage_tone(token.advantage)}"
        case ColorBy.VERSION:
            return "" if token.version is None else f"v{token.version % 6}"


def tokens_of(line: EpisodeRecord, pieces: Pieces) -> tuple[tuple[Token, ...], ...]:
    """Return the new prompt tokens and the sampled tokens of each step. Raises RunFolderError for a lean episode."""
    return tuple(_of_step(line, step, pieces) for step in line.steps)


def _of_step(line: EpisodeRecord, step: StepRecord, pieces: Pieces) -> tuple[Token, ...]:
    if step.tokens is None:
        raise RunFolderError(
            f"episode {line.id} was saved lean, without its tokens: set rl.save.lean = false to look at them"
        )
    tokens = step.tokens
    texts = pieces([*tokens.prompt_rest, *tokens.sampled])
    versions = _versions(tokens)
    if not len(tokens.sampled) == len(tokens.sampler_logprobs) == len(versions):
        raise RunFolderError(f"episode {line.id} has token arrays that do not fit together")
    advantage = None if step.credit is None else step.credit.A
    before = len(tokens.prompt_rest)
    return (
        *(Token(text=text) for text in texts[:before]),
        *(
            Token(text=text, logprob=logprob, advantage=advantage, version=version)
            for text, logprob, version in zip(texts[before:], tokens.sampler_logprobs, versions, strict=True)
        ),
    )


def _versions(tokens: TokensRecord) -> list[int]:
    return [version for version, count in tokens.versions for _ in range(min(count, len(tokens.sampled) + 1))]


# --- text of tokens --------------------------------------------------------------------------------------------------


def find_tokenizer(rollouts: Path, source: Path | None = None) -> Path | None:
    """Find the tokenizer.json of `source` (a file or a folder), else of the run folder that contains a rollout file.

    Returns None if the run has none. Raises ConfigError if `source` has none.
    """
    if source is not None:
        file = source / "tokenizer.json" if source.is_dir() else source
        if not file.is_file():
            raise ConfigError(f"there is no tokenizer.json in {source}: give a checkpoint or a Hugging Face folder")
        return file
    run = rollouts.absolute().parent.parent
    files = [*sorted(run.glob("checkpoints/*/step_*/tokenizer.json")), *run.glob("start/tokenizer.json")]
    return files[0] if files else None


def token_pieces(file: Path | None) -> Pieces:
    """Return a function from ids to texts by that tokenizer; without one, and for unknown ids, the text is "<id>"."""
    if file is None:
        return lambda ids: [f"<{id}>" for id in ids]
    with boundary(RunFolderError, f"{file} is not a tokenizer"):
        tokenizer = Tokenizer.from_file(str(file))
    size = tokenizer.get_vocab_size(with_added_tokens=True)

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def pieces(ids: Sequence[int]) -> list[str]:
        texts = []
        for place, id in enumerate(ids):
            if not 0 <= id < size:
                texts.append(f"<{id}>")
                continue
            before = ids[place - 1 : place] if place and 0 <= ids[place - 1] < size else []
            alone, joined = (
                decode(before),
                decode([*before, id]),
            )  # whether there is a space may depend on the token before
            texts.append(
                joined[len(alone) :] if joined.startswith(alone) and len(joined) > len(alone) else decode([id])
            )
        return texts

    return pieces
