"""Estimates of B's properties from its values: the theta of rotary positions, and the order of joined heads.

Dims: T tokens, C width, H heads, D head size, R rotated dims.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from model.analysis.compare.hint import Hint
from model.config import ModelConfig
from model.network.float_copy import linear_bias
from model.network.transformer import Transformer
from model.tracing.stages import Stage

MAX_NUMBERS = 1 << 25  # of the contributions of every head through every part of the output matrix
MAX_SOLVED = 1 << 22  # of these numbers, those that least squares use, so that they take a fraction of a second


def estimate_theta(config: ModelConfig, name: str, given: Mapping[str, Tensor]) -> float | None:
    """The theta that turns B's queries (or keys) at position 1 into its rotated ones; None if B has not given both.

    The angle of pair i at position 1 is theta^(-2i/R). It is below pi, so it is unambiguous.
    """
    before = name.replace("rot_", "")
    inner = before.replace(".q", ".q_norm.out").replace(".k", ".k_norm.out")
    source = given.get(inner, given.get(before))
    if ".rot_" not in name or source is None or source.shape[1] < 2 or config.rotary_dim < 4:
        return None
    if source.dim() == 3:  # one norm over all heads
        source = source.reshape(*source.shape[:2], -1, config.d_head)
    plain, rotated = (x[0, 1, :, : config.rotary_dim].double() for x in (source, given[name]))  # (H, R)
    halves = [torch.complex(*x.chunk(2, dim=-1)) for x in (plain, rotated)]
    angles = (halves[1] * halves[0].conj()).sum(0).angle()  # (R/2,)
    exponents = torch.arange(len(angles)) * 2 / config.rotary_dim
    usable = (exponents > 0) & (angles > 0)
    if not usable.any():
        return None
    thetas = (-angles[usable].log() / exponents[usable]).exp()
    theta = float(thetas.median())
    return theta if math.isfinite(theta) and theta > 1.1 else None


def joined_heads(network: Transformer, stage: Stage, given: Mapping[str, Tensor]) -> Iterator[tuple[Hint, Tensor]]:
    """The output of attention, if B joins its heads in another order before the output matrix.

    The contribution of every head through every part of the matrix is known. Least squares find those that B adds.
    """
    place, _, part = stage.name.rpartition(".")
    z = given.get(f"{place}.attn.z")
    if part != "attn_out" or z is None or network.config.norm_placement not in ("pre", "post"):
        return
    layer = network.get_submodule(f"{place}.attn.out")
    weight, bias = layer.weight, linear_bias(layer)
    assert isinstance(weight, Tensor), "the layers of this network keep or read their weights"
    (_, num_tokens, num_heads, d_head), d_model = z.shape, network.config.d_model
    num_rows = min(num_tokens * d_model, 2 * num_heads**2, MAX_SOLVED // num_heads**2)
    if num_heads**2 > num_rows or num_heads**2 * num_tokens * d_model > MAX_NUMBERS:
        return
    matrices = weight.double().view(d_model, num_heads, d_head)
    contributions = torch.einsum("tad,cbd->abtc", z[0].double(), matrices) * network.config.residual_scale
    base = torch.zeros(d_model) if bias is None else bias.double() * network.config.residual_scale
    target = (given[stage.name][0].double() - base).flatten()
    rows = contributions.flatten(2).flatten(0, 1)[:, -num_rows:]  # (H * H, num_rows)
    solved, failed = torch.linalg.solve_ex(rows @ rows.T, rows @ target[-num_rows:])  # the normal equations
    if failed:
        return
    order = solved.view(num_heads, num_heads).argmax(0)  # of part b of the matrix: the head that B multiplies with it
    if len(set(order.tolist())) < num_heads or order.tolist() == list(range(num_heads)):
        return
    joined = contributions[order, torch.arange(num_heads)].sum(0) + base
    listed = ", ".join(map(str, order.tolist()[:16])) + (", ..." if num_heads > 16 else "")
    yield Hint("permuted_heads", f"B joins its heads in the order {listed} before the output matrix"), joined[None]
