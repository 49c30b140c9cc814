"""Choose the episodes of a report and turn them into conversations with badges, by pure functions.

If the same tasks were played before and after training, they are sorted by what changed and one of each kind is shown,
so that a reader sees losses as well as gains.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.observe.report.svg import number
from headrace.observe.rollouts.picture_files import shown_content
from headrace.observe.rollouts.records import EpisodeRecord, MessageRecord, NoteRecord
from headrace.printable import single_line

MAX_TURNS = 40
MAX_CHARACTERS = 4000
MAX_NOTE_CHARACTERS = 200  # of what a reward function said
MAX_PICTURES = 8  # of a message
PER_FILE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationTurn:
    """A message, with the outcome of an assistant's turn."""

    role: str
    text: str
    badges: tuple[tuple[str, str], ...] = ()  # (CSS class, text)
    images: tuple[str, ...] = ()  # names of picture files


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """An episode as it is shown."""

    when: str  # which policy played it, such as "Before training"
    task: str
    badges: tuple[tuple[str, str], ...]
    turns: tuple[ConversationTurn, ...]
    left_out: int  # number of messages beyond MAX_TURNS


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """Conversations side by side under one heading."""

    heading: str
    conversations: tuple[Conversation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeComparison:
    """Episodes before and after training."""

    rows: tuple[ComparisonRow, ...]
    tally: tuple[tuple[str, int], ...]  # (kind of change, number of tasks), if the same tasks were played twice


KINDS: dict[tuple[bool, bool], str] = {
    (False, True): "Newly solved",
    (True, True): "Solved both times",
    (False, False): "Not solved either time",
    (True, False): "No longer solved",
}
REWARD_KINDS: dict[int, str] = {1: "Higher reward", 0: "Equal reward", -1: "Lower reward"}  # if nothing says success


def compare(
    before_label: str, before: Sequence[EpisodeRecord], after_label: str, after: Sequence[EpisodeRecord]
) -> EpisodeComparison:
    """Pair the first episodes of each task that both files have; show the first pair of each kind of change.

    The kinds are those of success; if no episode was judged by success, those of reward.
    """
    firsts = [{line.task.id: line for line in reversed(lines)} for lines in (before, after)]
    tasks = [task for task in dict.fromkeys(line.task.id for line in before) if task in firsts[1]]
    pairs = {task: (firsts[0][task], firsts[1][task]) for task in tasks}
    judged = any(line.verdict is not None for pair in pairs.values() for line in pair)
    headings = KINDS.values() if judged else REWARD_KINDS.values()
    kinds = {task: _success_change(*pair) if judged else _reward_change(*pair) for task, pair in pairs.items()}
    rows, tally = [], []
    for heading in headings:
        of_kind = [task for task in tasks if kinds[task] == heading]
        tally.append((heading, len(of_kind)))
        if of_kind:
            pair = ((before_label, firsts[0][of_kind[0]]), (after_label, firsts[1][of_kind[0]]))
            rows.append(
                ComparisonRow(heading=heading, conversations=tuple(conversation(when, line) for when, line in pair))
            )
    if not tasks:
        return EpisodeComparison(rows=(sample_file(before_label, before), sample_file(after_label, after)), tally=())
    return EpisodeComparison(rows=tuple(rows), tally=tuple(tally))


def _success_change(before: EpisodeRecord, after: EpisodeRecord) -> str:
    return KINDS[bool(before.verdict), bool(after.verdict)]


def _reward_change(before: EpisodeRecord, after: EpisodeRecord) -> str:
    first, last = before.reward.total, after.reward.total
    return REWARD_KINDS[(last > first) - (last < first)]


def sample_file(label: str, lines: Sequence[EpisodeRecord]) -> ComparisonRow:
    """Show the best, a middle and the worst episode by reward: the spread rather than the luckiest."""
    ranked = sorted(lines, key=lambda line: -line.reward.total)
    chosen = {0, len(ranked) // 2, len(ranked) - 1} if ranked else set()
    return ComparisonRow(
        heading=label, conversations=tuple(conversation(label, ranked[index]) for index in sorted(chosen))
    )


def conversation(when: str, line: EpisodeRecord) -> Conversation:
    """Convert an episode for display."""
    messages = line.messages[:MAX_TURNS]
    assistants = [index for index, message in enumerate(line.messages) if message.role == "assistant"]
    steps = assistants[-len(line.steps) :] if line.steps else []  # a task may bring assistant turns of its own
    badges = [_verdict(line.verdict), ("plain", f"reward {number(line.reward.total)}")]
    if line.truncated:
        badges.append(("warn", "cut off by a limit"))
    badges += [("plain", _note(note)) for note in line.reward.notes_of(None)]
    turns = tuple(
        ConversationTurn(
            role=message.role,
            text=_text(message),
            badges=_step_badges(line, steps.index(index)) if index in steps and len(steps) == len(line.steps) else (),
            images=message.images[:MAX_PICTURES],
        )
        for index, message in enumerate(messages)
    )
    return Conversation(
        when=when, task=line.task.id, badges=tuple(badges), turns=turns, left_out=len(line.messages) - len(messages)
    )


def _verdict(success: bool | None) -> tuple[str, str]:
    return {True: ("good", "solved"), False: ("bad", "not solved"), None: ("plain", "no verdict")}[success]


def _step_badges(line: EpisodeRecord, index: int) -> tuple[tuple[str, str], ...]:
    step = line.steps[index]
    badges = []
    if not step.valid:
        badges.append(("warn", "invalid action"))
    if step.reward:
        badges.append(("plain", f"reward {number(step.reward)}"))
    if line.advantages is not None and line.advantages[index]:
        advantage = line.advantages[index]
        badges.append(("good" if advantage > 0 else "bad", f"advantage {advantage:+.2f}"))
    badges += [("plain", _note(note)) for note in line.reward.notes_of(index)]
    return tuple(badges)


def _note(note: NoteRecord) -> str:
    """Say in few words what a reward function said."""
    text = f"{note.term}: {note.text}" if note.term else note.text
    text = single_line(text, MAX_NOTE_CHARACTERS)
    return text if len(text) <= MAX_NOTE_CHARACTERS else f"{text[: MAX_NOTE_CHARACTERS - 1]}…"


def _text(message: MessageRecord) -> str:
    calls = "".join(f"\n{call.name}({call.arguments})" for call in message.tool_calls)
    text = (shown_content(message) + calls).strip("\n")
    left = len(text) - MAX_CHARACTERS
    return text if left <= 0 else f"{text[:MAX_CHARACTERS]} … ({left} more characters)"
