"""The CPU kernels other than linear layers and sampling, each compared with PyTorch in float64."""

import pytest
import torch

from model.config import Activation
from model.ops.interface import NormRule
from model.ops.torch_attention import CausalMask, ScoreRule
from model.ops.torch_ops import TORCH
from tests.ops.cpu.common import DTYPES, ROUNDING, cpu_backend
from tests.tiny import quick

pytestmark = pytest.mark.usefixtures("instructions")
RULES = [NormRule(1e-5, "rms"), NormRule(1e-3, "layer"), NormRule(1e-5, "rms", offset=True)]


@pytest.mark.parametrize("dtype", DTYPES)
class TestOperations:
    """Each result agrees with PyTorch in float64 to the rounding of the dtype."""

    def check(self, found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
        assert found.dtype == dtype
        tolerance = 8 * 2**-23 + ROUNDING[dtype]
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("size", [1, 15, 16, 33, 768])
    @pytest.mark.parametrize("has_bias", [True, False])
    @pytest.mark.parametrize("rule", RULES)
    def test_norms_agree(self, dtype: torch.dtype, size: int, has_bias: bool, rule: NormRule) -> None:
        ops = cpu_backend(dtype).ops
        torch.manual_seed(0)
        weight = torch.randn(size).to(dtype)
        bias = torch.randn(size).to(dtype) if has_bias else None
        wide = torch.randn(2, 5, 7, size + 3).to(dtype)
        for x in (wide[0, 0, :, :size], wide[..., :size], wide[:, :, 2:4, :size], wide[0, 0, 0, :size]):
            exact = TORCH.ops.norm(x.double(), weight.double(), None if bias is None else bias.double(), rule)
            self.check(ops.norm(x, weight, bias, rule), exact, dtype)

    def test_norms_with_a_weight_for_each_head_agree(self, dtype: torch.dtype) -> None:
        ops, generator = cpu_backend(dtype).ops, torch.Generator().manual_seed(0)
        weight = torch.randn(3, 20, generator=generator).to(dtype)
        heads = torch.randn(2, 5, 7, 20, generator=generator).to(dtype)
        for rule in RULES:
            for x in (heads[:, :, 2:5], heads[0, 0, :3]):
                exact = TORCH.ops.norm(x.double(), weight.double(), None, rule)
                self.check(ops.norm(x, weight, None, rule), exact, dtype)
                self.check(
                    exact.to(dtype),
                    torch.stack(
                        [
                            TORCH.ops.norm(x[..., head, :].double(), weight[head].double(), None, rule)
                            for head in range(3)
                        ],
                        dim=-2,
                    ),
                    dtype,
                )

    def test_scales_and_softcaps_agree(self, dtype: torch.dtype) -> None:
        ops = cpu_backend(dtype).ops
        x = torch.cat((torch.linspace(-200, 200, 3001), torch.linspace(-1, 1, 1001))).to(dtype)
        self.check(ops.scale(x, 0.22), 0.22 * x.double(), dtype)
        for cap in (1.0, 30.0):
            self.check(ops.softcap(x, cap), cap * (x.double() / cap).tanh(), dtype)
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=dtype)
        assert str(ops.softcap(special, 30.0).tolist()) == "[nan, 30.0, -30.0, -0.0]"

    @pytest.mark.parametrize("d_head", [2, 16, 64, 72])
    def test_rotations_agree(self, dtype: torch.dtype, d_head: int) -> None:
        ops = cpu_backend(dtype).ops
        torch.manual_seed(0)
        positions = torch.tensor([0, 1, 17, 4000])
        frequencies = 1 / 10000 ** (torch.arange(0, d_head, 2) / d_head)
        qkv = torch.randn(2, 4, 6, d_head).to(dtype)
        for x in (qkv[:, :, :3], qkv[:, :, 5:]):
            angles = (positions[:, None] * frequencies).double()  # the product is rounded to float32 first
            ones = torch.ones_like(angles)
            cos, sin = (torch.cat((half, half), -1)[:, None] for half in (angles.cos(), angles.sin()))
            exact = TORCH.ops.rotate(x.double(), (1.25 * cos, 1.25 * sin))
            self.check(ops.rotate(x, ops.rotation(positions, frequencies, 1.25, dtype)), exact, dtype)
            by_position = frequencies * ones.float()  # (T, D/2): frequencies for each position
            self.check(ops.rotate(x, ops.rotation(positions, by_position, 1.25, dtype)), exact, dtype)

    @pytest.mark.parametrize("rotary_dim", [2, 20, 32, 62])
    def test_a_rotation_of_some_dims_leaves_the_others_as_they_are(self, dtype: torch.dtype, rotary_dim: int) -> None:
        ops = cpu_backend(dtype).ops
        positions = torch.tensor([0, 3, 900])
        frequencies = 1 / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
        x = torch.randn(1, 3, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        found = ops.rotate(x, ops.rotation(positions, frequencies, 1.0, dtype))
        alone = ops.rotate(x[..., :rotary_dim].contiguous(), ops.rotation(positions, frequencies, 1.0, dtype))
        assert torch.equal(found, torch.cat((alone, x[..., rotary_dim:]), dim=-1))
        exact = TORCH.ops.rotation(positions, frequencies, 1.0, torch.float32)
        self.check(found, TORCH.ops.rotate(x.float(), exact).double(), dtype)

    def test_queries_and_keys_rotate_together_as_they_do_alone(self, dtype: torch.dtype) -> None:
        ops = cpu_backend(dtype).ops
        rotation = ops.rotation(torch.tensor([0, 3, 900]), 1 / 100 ** (torch.arange(0, 12, 2) / 12), 1.0, dtype)
        qkv = torch.randn(2, 3, 7, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        neighbours = qkv[:, :, :4], qkv[:, :, 4:6]
        for q, k in (neighbours, (qkv[:, :, :4], qkv[:, :, 5:]), (neighbours[0].clone(), neighbours[1])):
            found = ops.rotate_both(q, k, rotation)
            assert all(map(torch.equal, found, (ops.rotate(q, rotation), ops.rotate(k, rotation))))

    def test_each_token_gets_the_rotation_for_the_length_of_its_sequence(self, dtype: torch.dtype) -> None:
        short, long = ((cos, sin) for cos, sin in (torch.randn(2, 4, 3).unbind() for _ in range(2)))
        lengths = torch.tensor([10, 11, 1, 5000])
        found = cpu_backend(dtype).ops.select_rotation(short, long, lengths, 10)
        for mine, own_short, own_long in zip(found, short, long, strict=True):
            assert torch.equal(mine, torch.stack((own_short[0], own_long[1], own_short[2], own_long[3])))

    @pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
    def test_activations_agree(self, dtype: torch.dtype, activation: Activation) -> None:
        ops = cpu_backend(dtype).ops
        both = torch.cat((torch.linspace(-120, 120, 401), torch.linspace(-5, 5, 401))).repeat(3, 1).to(dtype)
        pre, linear = both[:, :401], both[:, 401:]
        self.check(ops.activate(activation, pre), TORCH.ops.activate(activation, pre.double()), dtype)
        gated = TORCH.ops.activate(activation, pre.double(), linear.double())
        self.check(ops.activate(activation, pre, linear), gated, dtype)

    def test_addition_and_embedding_are_exact_and_check_the_ids(self, dtype: torch.dtype) -> None:
        ops = cpu_backend(dtype).ops
        a, b = (torch.randn(3, 4001).to(dtype) for _ in range(2))
        assert torch.equal(ops.add(a, b), a + b)
        assert torch.equal(ops.add(a.T, b.T), (a + b).T)
        index = torch.tensor([[2, 0], [2, 1]])
        assert torch.equal(ops.embed(a, index), a[index])
        for wrong in (-1, 3):
            with pytest.raises(IndexError, match=f"index {wrong} is out of range; there are 3 rows"):
                ops.embed(a, torch.tensor([0, wrong]))

    def test_argmax_is_the_first_of_equal_maxima_and_nan_wins(self, dtype: torch.dtype) -> None:
        ops = cpu_backend(dtype).sampling
        x = torch.randn(6, 5003).to(dtype)
        x[0, [77, 4, 5002]] = 9.0
        x[1, 5002] = 9.0
        x[2, 1] = torch.nan
        x[3] = -torch.inf
        x[4, 3] = torch.inf
        values, indices = ops.argmax(x)
        other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16  # like logits that a penalty changed
        assert ops.argmax(x[4:5].to(other))[1].tolist() == [3]
        assert indices[[0, 1, 3, 4, 5]].tolist() == [4, 5002, 0, 3, x[5].argmax()]
        assert values.isnan().tolist() == [False, False, True, False, False, False]
        assert values[[0, 1, 3, 4]].tolist() == [9, 9, -torch.inf, torch.inf]

    @pytest.mark.parametrize("has_bias", [True, False])
    @pytest.mark.parametrize("rule", RULES)
    def test_norm_stages_agree_and_the_result_is_bitwise_equal(
        self, dtype: torch.dtype, has_bias: bool, rule: NormRule
    ) -> None:
        ops = cpu_backend(dtype).ops
        generator = torch.Generator().manual_seed(0)
        x = 3 + torch.randn(2, 5, 33, generator=generator).to(dtype)
        weight, bias = torch.randn(2, 33, generator=generator).to(dtype)
        parameters = (weight, bias if has_bias else None)
        exact_bias = bias.double() if has_bias else None
        exact = TORCH.ops.norm_stages(x.double(), weight.double(), exact_bias, rule)
        scale, normalized, out = ops.norm_stages(x, *parameters, rule)
        torch.testing.assert_close(scale.double(), exact[0], atol=0, rtol=2**-21)
        self.check(normalized, exact[1], dtype)
        assert torch.equal(out, ops.norm(x, *parameters, rule))

    @pytest.mark.parametrize("wanted", [True, False])
    def test_distributions_agree(self, dtype: torch.dtype, wanted: bool) -> None:
        ops = cpu_backend(dtype).summaries
        logits = 9 * torch.randn(1, 4, 5003, generator=torch.Generator().manual_seed(0)).to(dtype)
        logits[0, 1, 7] = -torch.inf
        logits[0, 2, 5002] = torch.nan
        probabilities, log_totals = ops.distribution(logits, wants_probabilities=wanted)
        exact, exact_totals = TORCH.summaries.distribution(logits.double(), wants_probabilities=True)
        assert log_totals[0, 2].isnan()
        torch.testing.assert_close(log_totals.double(), exact_totals, atol=2e-6, rtol=2e-6, equal_nan=True)
        assert (probabilities is not None) == wanted
        if probabilities is not None and exact is not None:
            assert probabilities[0, 2].isnan().all()
            torch.testing.assert_close(probabilities.double(), exact, atol=1e-12, rtol=1e-5, equal_nan=True)

    @pytest.mark.parametrize("size", [3, 16, 257, 5003])
    @pytest.mark.parametrize("count", [1, 3, 64])
    def test_the_largest_logits_agree_and_equal_ones_are_in_order(
        self, dtype: torch.dtype, size: int, count: int
    ) -> None:
        ops, count = cpu_backend(dtype).summaries, min(count, size)
        logits = torch.randn(6, size, generator=torch.Generator().manual_seed(0)).to(dtype)
        logits[1] = -torch.inf
        logits[2] = logits[2].round()  # many equal numbers
        logits[3, size // 2 :] = -torch.inf
        logits[4, [0, size - 1]] = torch.nan
        logits[5, 0], logits[5, size - 1] = torch.inf, torch.nan
        values, indices = ops.top(logits, count)
        expected = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]  # NaN comes first
        assert torch.equal(indices, expected)
        assert torch.equal(values.nan_to_num(7), logits.gather(-1, expected).float().nan_to_num(7))
        assert torch.equal(TORCH.summaries.top(logits, count).indices, expected)
        assert TORCH.summaries.top(logits, 0).indices.shape == (6, 0)
        for row in range(6):
            assert torch.equal(ops.top(logits[row : row + 1], count).indices[0], indices[row])

    @pytest.mark.parametrize("count", [-1, 4, 65])
    def test_more_largest_logits_than_there_are_are_refused(self, dtype: torch.dtype, count: int) -> None:
        with pytest.raises(ValueError, match=f"count is {count}; a row has 3 numbers"):
            cpu_backend(dtype).summaries.top(torch.zeros(1, 3, dtype=dtype), count)

    def test_summaries_agree(self, dtype: torch.dtype) -> None:
        ops, generator = cpu_backend(dtype).summaries, torch.Generator().manual_seed(0)
        large = torch.randn(100_003, generator=generator)
        views = torch.randn(2, 9, 6, 70, generator=generator)
        masked = views.masked_fill(views > 0.5, -torch.inf)
        shifted = 3000 + torch.randn(40_000, generator=generator)
        for x in (large[:1], large, masked, views[:, :, 2:4], views[..., :33], views.transpose(1, 3), shifted):
            x = x.to(dtype)
            (found,), (exact,) = ops.summarize([x]), TORCH.summaries.summarize([x.double()])
            assert (found.min, found.max, found.non_finite) == (exact.min, exact.max, exact.non_finite)
            assert found.mean == pytest.approx(exact.mean, abs=1e-6, rel=1e-6)
            assert found.std == pytest.approx(exact.std, abs=1e-6, rel=1e-5)
            assert found.l2 == pytest.approx(exact.l2, rel=1e-6)
        nothing = torch.tensor([torch.nan, torch.inf], dtype=dtype)
        assert ops.summarize([nothing]) == TORCH.summaries.summarize([nothing])

    def test_a_summary_does_not_depend_on_the_other_tensors(self, dtype: torch.dtype) -> None:
        ops, generator = cpu_backend(dtype).summaries, torch.Generator().manual_seed(0)
        sizes = (1, 5, 16_384, 16_385, 70_001, 3, 4 * 16_384)
        dtypes = (dtype, torch.float32, torch.float64, dtype)
        tensors = [torch.randn(size, generator=generator).to(each) for size in sizes for each in dtypes]
        assert ops.summarize(tensors) == [ops.summarize([x])[0] for x in tensors]
        assert ops.summarize([]) == []

    @pytest.mark.parametrize("rule", [ScoreRule(0.3), ScoreRule(0.3, 0.7)])
    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("num_new", quick(3, [1, 5, 40, 400]))  # 400: tiles of one thread share keys
    def test_scores_and_pattern_agree(
        self, dtype: torch.dtype, num_new: int, window: int | None, rule: ScoreRule
    ) -> None:
        ops, S = cpu_backend(dtype).ops, num_new + 4
        heads = torch.randn(2, S, 24, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        q, k, v = heads[:, 4:, :12], heads[:, :, 12:18], heads[:, :, 18:]
        mask = CausalMask(4, num_new, window, q.device)
        found = ops.attention_scores(q, k, mask, rule)
        exact = TORCH.ops.attention_scores(q.double(), k.double(), mask, rule)
        for ours, theirs in zip(found, exact, strict=True):
            tolerance = 2**-18 + 2 * ROUNDING[dtype]
            torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
        z = ops.fused_attention(q, k, v, mask, rule)
        expected = found[2].double() @ v.double().transpose(1, 2).repeat_interleave(2, dim=1)
        torch.testing.assert_close(z.double(), expected.transpose(1, 2), atol=0.02, rtol=4 * ROUNDING[dtype])

    @pytest.mark.parametrize("window", [None, 3])
    def test_attention_over_rows_of_equal_length_agrees(self, dtype: torch.dtype, window: int | None) -> None:
        ops = cpu_backend(dtype).ops
        torch.manual_seed(0)
        qkv = torch.randn(3, 9, 8, 16).to(dtype)
        q, k, v = qkv[:, 4:, :4], qkv[:, :, 4:6], qkv[:, :, 6:]
        mask = CausalMask(4, 5, window, q.device)
        exact = TORCH.ops.fused_attention(q.double(), k.double(), v.double(), mask, ScoreRule(0.3))
        self.check(ops.fused_attention(q, k, v, mask, ScoreRule(0.3)), exact, dtype)
