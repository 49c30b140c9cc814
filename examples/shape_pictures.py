"""Pictures of one shape, drawn with Pillow when asked for: tasks to name it, and demonstrations of an answer's form."""

import io
import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "cross")
QUESTION = "which shape ?"
SIDE = 48  # pixels


def draw(shape: str, rng: random.Random) -> bytes:
    """Draw a shape of random colour, size and place, and return a PNG file."""
    dark = rng.random() < 0.5
    back = tuple(rng.randrange(0, 80) if dark else rng.randrange(176, 256) for _ in range(3))
    front = tuple(rng.randrange(176, 256) if dark else rng.randrange(0, 80) for _ in range(3))
    image = Image.new("RGB", (SIDE, SIDE), back)
    pen = ImageDraw.Draw(image)
    size = rng.randrange(28, 37)
    left, top = (rng.randrange(2, SIDE - size - 1) for _ in range(2))
    right, bottom, third = left + size, top + size, size // 3
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=front)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=front)
    elif shape == "triangle":
        pen.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], fill=front)
    else:
        pen.rectangle((left + third, top, right - third, bottom), fill=front)
        pen.rectangle((left, top + third, right, bottom - third), fill=front)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def questions(size: int, seed: int, shuffled: bool = False) -> Iterator[dict[str, Any]]:
    """Yield tasks: a question, one picture, the right answer. `shuffled`: each has the picture of another task, so that
    nothing can be learned from it."""
    rng = random.Random(seed)
    rows = [(shape := rng.choice(SHAPES), draw(shape, rng)) for _ in range(size)]
    pictures = [picture for _, picture in rows]
    if shuffled:
        rng.shuffle(pictures)
    for (shape, _), picture in zip(rows, pictures, strict=True):
        yield {"prompt": QUESTION, "images": [picture], "answer": shape}


def demonstrations(size: int, seed: int, right: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield answered questions that show the form of an answer. A share `right` of them is right; the others name any
    shape."""
    rng = random.Random(seed)
    for row in questions(size, seed):
        yield row if rng.random() < right else {**row, "answer": rng.choice(SHAPES)}
