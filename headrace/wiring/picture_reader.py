"""Read pictures with the processor of a run's model, which is loaded when the first picture is met."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from headrace.config import Config, ModelConfig
from headrace.config.checks.vision import picture_problems
from headrace.data.conversations import messages_of
from headrace.errors import ConfigError
from headrace.pictures import ModelImage, Picture, PictureReader
from headrace.types import Message
from headrace.wiring.inputs import RunInputs


class OnDemandReader:
    """The processor of a model folder. Text alone never loads it; where there is none, the first picture raises
    ModelError, which says why."""

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
        self._path, self._trust_remote_code = path, trust_remote_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _reader, (self._path, self._trust_remote_code)

    @cached_property
    def loaded(self) -> PictureReader:
        """Load the processor. Raises ModelError if the model takes no pictures, or its processor is missing."""
        from headrace.model.vision.reader import load_reader  # transformers' processors

        return load_reader(self._path, trust_remote_code=self._trust_remote_code)

    @property
    def template_mark(self) -> str:
        return self.loaded.template_mark

    @property
    def image_token(self) -> int:
        return self.loaded.image_token

    def read(self, picture: Picture) -> ModelImage:
        return self.loaded.read(picture)

    def text(self, image: ModelImage) -> str:
        return self.loaded.text(image)

    def template_content(self, content: str, num_pictures: int) -> Any:
        return self.loaded.template_content(content, num_pictures)


def _reader(path: str, trust_remote_code: bool) -> OnDemandReader:
    return OnDemandReader(path, trust_remote_code=trust_remote_code)


def reader_of(c: ModelConfig, path: str) -> OnDemandReader:
    """Return what reads pictures for the model in `path`."""
    return OnDemandReader(path, trust_remote_code=c.trust_remote_code)


def first_with_pictures(conversations: Iterable[tuple[Message, ...]]) -> tuple[Message, ...] | None:
    """Find the first conversation that has a picture."""
    return next((talk for talk in conversations if any(message.images for message in talk)), None)


def picture_conversation(inputs: RunInputs) -> tuple[Message, ...] | None:
    """Find the first conversation with a picture in what the stages of a run train on or are tested with."""
    talks = [task.messages for tasks in (inputs.rl.tasks if inputs.rl else ()) for task in tasks]
    talks += [task.messages for task in inputs.held_out_tasks]
    if inputs.distill is not None:
        talks += [taught.task.messages for tasks, _ in inputs.distill.sources for taught in tasks]
    if inputs.sft is not None:
        loaded = [talk for conversations, _ in inputs.sft.sources for talk in conversations]
        talks += [messages_of(talk) for talk in (*loaded, *inputs.sft.held_out)]
    return first_with_pictures(talks)


def with_vision(config: Config, *, has_pictures: bool) -> Config:
    """Set `model.vision` to "frozen" if the data have pictures and the file does not say. Raises ConfigError for what
    cannot work with pictures."""
    if not has_pictures:
        return config
    for problem in picture_problems(config):
        raise ConfigError(f"the data have pictures: {problem}")
    if config.model.vision is not None:
        return config
    return replace(config, model=replace(config.model, vision="frozen"))
