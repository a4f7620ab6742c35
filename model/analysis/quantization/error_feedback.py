"""Round the weights of a layer so that its outputs change least: error feedback, as in GPTQ.

Rounding to nearest minimizes the error of the weights. The error of the outputs also depends on the inputs x, through
their second moments E[x^T x]. So the inputs are rounded one after the other, the most important ones first, and the
weights of the inputs that are still exact make up for each error as far as they can (Frantar et al. 2022,
arXiv:2210.17323). The scale and the minimum of a group of 32 inputs are fitted when its turn comes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.analysis.quantization.group_fit import fit_group, row_factors
from model.ops.weight_formats import GROUP, GroupedWeight, WeightFormat

DAMPING = 0.01  # of the mean second moment, added to each: a few texts do not determine all directions
SMALLEST_MEAN = 1e-12  # of second moments, so that their inverse is finite


@dataclass(frozen=True)
class InputMoments:
    """The order and the relations of a layer's inputs, whose number K is a multiple of 32.

    `importance` (K) are the second moments of single inputs, and `order` (K) is that of rounding. Row i of `shares`
    (K, K), in this order, says how much of the error of its input each later input makes up for.
    """

    importance: Tensor
    order: Tensor
    shares: Tensor

    @classmethod
    def prepare(cls, moments: Tensor) -> "InputMoments":
        """From second moments in float32, of any number of inputs: some that are always 0 are added."""
        padding = -len(moments) % GROUP
        moments = F.pad(moments, (0, padding, 0, padding))
        importance = moments.diagonal()
        importance += DAMPING * importance.mean().clamp(min=SMALLEST_MEAN)
        by_group = importance.view(-1, GROUP)
        groups = by_group.sum(1).argsort(descending=True)  # a group stays together, as it has one scale
        order = (groups[:, None] * GROUP + by_group.argsort(1, descending=True)[groups]).flatten()
        last_first = order.flip(0)
        factor = torch.linalg.cholesky(moments[last_first[:, None], last_first]).flip(0, 1)  # an upper triangle
        inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)), upper=True)
        return cls(importance, order, inverse / inverse.diagonal()[:, None])


def quantize_for_inputs(weight: Tensor, inputs: InputMoments, format: WeightFormat) -> GroupedWeight:
    """Quantize a weight (N, K) in float32. The factors of a row are NaN if one of its numbers is not finite."""
    padding, largest = -weight.shape[1] % GROUP, format.largest
    exact = F.pad(weight, (0, padding)).T[inputs.order].contiguous()  # (K, N), so that an input is contiguous
    is_finite = exact.isfinite().all(0)
    exact[:, ~is_finite] = 0
    factors = row_factors(exact, largest)
    integers = torch.empty(exact.shape, dtype=torch.uint8)
    scales = torch.empty(len(exact) // GROUP, 2, exact.shape[1], dtype=torch.uint8)
    for start in range(0, len(exact), GROUP):
        stop = start + GROUP
        order, shares, group = inputs.order[start:stop], inputs.shares[start:stop], exact[start:stop]
        fit = fit_group(group, inputs.importance[order], factors, largest)
        scales[order[0] // GROUP] = torch.stack((fit.step / factors.step, fit.minimum / factors.minimum)).round()
        errors = torch.empty_like(group)
        for i in range(GROUP):
            integer = fit.round(group[i], largest)
            integers[order[i]] = integer.to(torch.uint8)
            errors[i] = group[i] - fit.number(integer)
            group[i + 1 :].addr_(shares[i, start + i + 1 : stop], errors[i], alpha=-1)
        exact[stop:].addmm_(shares[:, stop:].T, errors, alpha=-1)
    stored = torch.where(is_finite, torch.stack(factors), torch.nan).half().T[:, None]  # (N, 1, 2)
    scales = scales.permute(2, 0, 1)  # (N, K / 32, 2)
    return GroupedWeight(format, integers.T.contiguous(), scales.contiguous(), stored.contiguous(), padding)
