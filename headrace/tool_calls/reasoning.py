"""Find the block in which a model thinks before it answers: <think>...</think>, or Mistral's [THINK]...[/THINK]."""

from dataclasses import dataclass

BLOCKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBlock:
    """The reasoning of a reply, and where its answer begins."""

    text: str
    end: int
    opened: bool = True  # False if the reply has only the closing mark


def find_reasoning(text: str) -> ReasoningBlock:
    """Find the reasoning at the beginning of a reply; a block that is not closed reaches to the end of the text.

    Templates may write the opening mark into the prompt, so a closing mark alone ends a block too.

    >>> find_reasoning("<think>hm</think>4")
    ReasoningBlock(text='hm', end=17, opened=True)
    """
    for opening, closing in BLOCKS:
        opened = text.lstrip().startswith(opening)
        end = text.find(closing)
        if end < 0 and not opened:
            continue
        inside = text[: end if end >= 0 else len(text)]
        inside = inside.lstrip().removeprefix(opening) if opened else inside
        return ReasoningBlock(text=inside.strip(), end=len(text) if end < 0 else end + len(closing), opened=opened)
    return ReasoningBlock(text="", end=0)
