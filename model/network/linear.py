"""How a network gets its linear layers: whoever builds the network says how each of them is made."""

from collections.abc import Callable

from torch import nn

LinearFactory = Callable[[str, int, int, bool], nn.Module]
"""(name, number of inputs, number of outputs, has a bias) -> a linear layer. Names are those of `named_modules`."""


def trainable_linear(name: str, num_inputs: int, num_outputs: int, has_bias: bool) -> nn.Module:
    return nn.Linear(num_inputs, num_outputs, bias=has_bias)
