"""Small pictures, and a template that shows them."""

import io

from PIL import Image

from headrace.pictures import Picture

PICTURE_TEMPLATE = (  # parts of a content as templates of vision models have them
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ '<image>' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def png(colour: str, size: tuple[int, int] = (8, 8)) -> bytes:
    """Return a PNG file of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, format="PNG")
    return file.getvalue()


def jpeg(colour: str, size: tuple[int, int] = (64, 64)) -> bytes:
    """Return a JPEG file of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, format="JPEG")
    return file.getvalue()


def counted(tokens: int, name: str = "") -> Picture:
    """Return a picture of which `FakePictureReader` makes this many tokens: bytes after a PNG's end do not count."""
    assert 2 <= tokens <= 5
    return Picture(data=png("red") + bytes([tokens - 2]), name=name)
