"""Word problems in the form of GSM8K, made on the spot: a question, and a worked answer that ends in "#### NUMBER".

Words and numbers are separated by spaces, because the tokenizer of the tiny model has one token for each. With another
model, the same run takes GSM8K itself: `type = "hub"`, `path = "openai/gsm8k"`, `subset = "main"`.
"""

import random

NAMES = ("Ann", "Ben", "Eve", "Tom")
THINGS = ("apples", "books", "coins", "eggs")


def rows(split="train", size=400, seed=0, mistakes=0.0):
    """Yield problems of one or two steps; no problem is in both splits.

    `mistakes` is the share of worked answers that are those of a careless pupil: the work is right, and behind #### is
    a number of the question.
    """
    rng, made = random.Random(f"{seed} {split}"), 0
    while made < size:
        first, second, third = rng.randint(1, 6), rng.randint(1, 6), rng.randint(0, 3)
        held_out = (first * 7 + second * 3 + third) % 5 == 0
        if held_out == (split == "train") or third > first + second:
            continue
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        question = f"{name} has {first} {thing} and buys {second} more ."
        work, answer = f"{first} + {second} = {first + second}", first + second
        if third:
            question += f" {name} gives {third} away ."
            work, answer = f"{work} , {answer} - {third} = {answer - third}", answer - third
        if rng.random() < mistakes:
            answer = rng.choice((first, second))
        yield {
            "id": f"{split}-{made}",
            "question": f"{question} How many {thing} are left ?",
            "answer": f"{work} #### {answer}",
        }
        made += 1
