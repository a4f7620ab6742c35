"""The network that a POST /forward runs on: the served checkpoint or a worked example, and how it reads prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from model.checkpoints.load import Checkpoint
from model.network.joint_passes import AdaptedNetwork, Network
from model.network.transformer import Transformer
from model.tracing.stages import Stage, sizes_of
from model.worked_examples import WORKED_EXAMPLES, WorkedExample, worked_example
from service.answers.call import ModelCall, RouteCall
from service.answers.prompts import Prompt, check_ids, longest_token_bytes, prompt_ids
from service.http.errors import invalid
from service.state import State, check_model, find_adapter, served_checkpoint

MAX_EXAMPLE_TEXT = 10_000  # characters; the longest prompt that a worked example accepts is a few words


@dataclass(frozen=True)
class Subject:
    """A network with everything that an answer says about it. One of `checkpoint` and `example` is set."""

    name: str
    network: Network
    stages: Sequence[Stage]
    sizes: Callable[[int], Mapping[str, int]]
    text_of: Callable[[int], str | None]
    longest_token_bytes: int
    dtype: torch.dtype
    device: torch.device
    checkpoint: Checkpoint | None = None
    adapter: str | None = None
    example: WorkedExample | None = None

    def model_call(self, call: RouteCall) -> ModelCall | None:
        """The request to the served checkpoint; None if this is a worked example."""
        return None if self.checkpoint is None else call.on(self.checkpoint, self.adapter)

    async def read_prompt(self, call: RouteCall, prompt: Prompt, param: str) -> list[int]:
        """The token ids of a prompt. Raises 400 for one that this network cannot take."""
        if (model_call := self.model_call(call)) is not None:
            return await prompt_ids(model_call, prompt, param)
        assert self.example is not None
        return example_ids(self.example, prompt, param)


def find_subject(state: State, name: str | None, adapter: str | None) -> Subject:
    """The network that a request names, with its adapter. Raises 404 for an unknown name."""
    if name is not None and name in WORKED_EXAMPLES:
        if adapter is not None:
            raise invalid("adapter", f"changes the served model, but not the worked example {name!r}; leave it out")
        return example_subject(worked_example(name))
    checkpoint = served_checkpoint(state)
    check_model(checkpoint, name, others=WORKED_EXAMPLES)
    return checkpoint_subject(checkpoint, find_adapter(checkpoint, name, adapter))


def adapted_network(checkpoint: Checkpoint, adapter: str | None) -> AdaptedNetwork | Transformer:
    """The network of a checkpoint with one of its adapters, or with none."""
    if not checkpoint.adapters:
        return checkpoint.model
    return AdaptedNetwork(checkpoint.model, None if adapter is None else checkpoint.adapters[adapter])


def checkpoint_subject(checkpoint: Checkpoint, adapter: str | None) -> Subject:
    config, weight = checkpoint.model.config, checkpoint.model.embed.weight
    return Subject(
        name=adapter or checkpoint.name,
        network=adapted_network(checkpoint, adapter),
        stages=checkpoint.stages,
        sizes=lambda num_tokens: sizes_of(config, num_tokens),
        text_of=checkpoint.text_of,
        longest_token_bytes=longest_token_bytes(checkpoint),
        dtype=weight.dtype,
        device=weight.device,
        checkpoint=checkpoint,
        adapter=adapter,
    )


def example_subject(example: WorkedExample) -> Subject:
    return Subject(
        name=example.name,
        network=example,
        stages=example.stages,
        sizes=example.sizes,
        text_of=lambda token_id: example.vocabulary[token_id],
        longest_token_bytes=max(len(word.encode()) for word in example.vocabulary),
        dtype=torch.float64,
        device=torch.device("cpu"),
        example=example,
    )


def example_ids(example: WorkedExample, prompt: Prompt, param: str) -> list[int]:
    if isinstance(prompt, list):
        check_ids(prompt, len(example.vocabulary), param)
        ids = prompt
    else:
        if len(prompt) > MAX_EXAMPLE_TEXT:
            raise invalid(param, f"is longer than {MAX_EXAMPLE_TEXT} characters", "context_length_exceeded")
        try:
            ids = example.encode(prompt)
        except ValueError as error:
            raise invalid(param, str(error), "unknown_word") from None
    if not ids:
        raise invalid(param, "is empty; send at least one token", "empty")
    if len(ids) > example.max_positions:
        reason = f"has {len(ids)} tokens, but {example.name} takes at most {example.max_positions}"
        raise invalid(param, reason, "context_length_exceeded")
    return ids
