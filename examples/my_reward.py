"""Reward functions of one's own, named in `rl_custom_reward.toml` as "my_reward.py:function".

A reward function takes an Episode (see `headrace/types.py`) and returns a number, a bool (which is also the verdict
on success), or a dict with "score" and further numbers that get curves of their own. When it cannot tell, it raises:
the episode is then left out and counted, which is not the same as reward 0.
"""

from headrace.types import Episode


def close_enough(episode: Episode) -> dict[str, float | bool]:
    """1 for the right sum, less the further off it is, 0 for no number at all; async functions work as well."""
    wanted = int(str(episode.task.data["answer"]).replace(" ", ""))
    said = episode.messages[-1].content.replace(" ", "")
    if not said.isdigit():
        return {"score": 0.0, "success": False, "is_number": 0.0}
    distance = abs(int(said) - wanted)
    return {"score": 1.0 / (1.0 + distance), "success": distance == 0, "is_number": 1.0}


def short(episode: Episode) -> float:
    """Minus one for every sampled token beyond what the answer needs; `weight` in the file makes it a mild hint."""
    needed = len(str(episode.task.data["answer"]).split()) + 1  # its digits and the end of the turn
    return -float(max(0, episode.num_sampled - needed))
