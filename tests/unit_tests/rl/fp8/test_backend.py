"""Whole models in emulated FP8: what is converted, and that the parallel layout does not matter."""

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # noqa: E402

from megatron.rl.fp8 import EmulatedLinears, Fp8Config, count_emulated_linears, describe_emulation  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl.fp8 import tiny  # noqa: E402

E4M3 = Fp8Config("e4m3", "tensorwise")
HYBRID = Fp8Config("hybrid", "tensorwise")
DENSE = {"num_layers": 1, "num_moe_experts": None, "moe_ffn_hidden_size": None}
LAYOUTS = (
    tiny.Layout(tp=2, etp=2),
    tiny.Layout(tp=2, ep=2),
    tiny.Layout(ep=2),
    tiny.Layout(),  # two data-parallel replicas, also of the experts
)


@pytest.fixture(scope="module")
def alone():
    with tiny.alone() as groups:
        yield groups


def _tokens(rows=4, length=16, seed=0):
    return torch.randint(0, tiny.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def _gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_linears_are_converted_and_head_router_and_embedding_are_not(alone):
    model = tiny.build(alone, tiny.transformer_config(), E4M3)
    assert count_emulated_linears([model]) == EmulatedLinears(dense=4, experts=16)
    assert count_emulated_linears([model, model]) == EmulatedLinears(dense=8, experts=32)
    assert type(model.output_layer) is ColumnParallelLinear
    assert count_emulated_linears([model.embedding, model.output_layer, model.decoder.layers[0].mlp.router]) == (0, 0)


def test_a_shared_expert_counts_as_dense(alone):
    model = tiny.build(alone, tiny.transformer_config(moe_shared_expert_intermediate_size=16), E4M3)
    assert count_emulated_linears([model]) == EmulatedLinears(dense=8, experts=16)


def test_the_parameters_are_those_of_the_plain_model(alone):
    config = tiny.transformer_config()
    plain, emulated = tiny.build(alone, config, None), tiny.build(alone, config, E4M3)
    assert count_emulated_linears([plain]) == (0, 0)
    assert list(plain.state_dict()) == list(emulated.state_dict())


def test_the_log_line_says_what_is_emulated():
    line = describe_emulation(HYBRID, EmulatedLinears(4, 16))
    for part in (
        "FP8 is emulated",
        "--fp8-format hybrid",
        "gradients e5m2",
        "--fp8-recipe tensorwise",
        "4 dense",
        "16",
    ):
        assert part in line
    assert "gradients e4m3" in describe_emulation(E4M3, EmulatedLinears(4, 16))


@pytest.mark.parametrize("changes", [DENSE, {}], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_differs_from_the_plain_one_by_rounding(alone, changes, dtype):
    config = tiny.transformer_config(params_dtype=dtype, **changes)
    results = {}
    for fp8 in (None, E4M3):
        model = tiny.build(alone, config, fp8)
        logprobs, total = tiny.log_probs(model, _tokens(), alone)
        total.backward()
        results[fp8] = logprobs, _gradients(model)
    difference = (results[E4M3][0] - results[None][0]).abs()
    assert 1e-3 < difference.mean() < 0.3
    gradients = [torch.cat([g.flatten().float() for g in results[fp8][1].values()]) for fp8 in (None, E4M3)]
    assert gradients[1].isfinite().all()
    assert torch.cosine_similarity(*gradients, dim=0) > 0.9


def test_formats_differ_in_the_backward_pass_only(alone):
    config = tiny.transformer_config()
    models = [tiny.build(alone, config, fp8) for fp8 in (E4M3, HYBRID)]
    logprobs = []
    for model in models:
        values, total = tiny.log_probs(model, _tokens(), alone)
        total.backward()
        logprobs.append(values)
    assert torch.equal(*logprobs)
    first, second = (_gradients(model) for model in models)
    assert torch.equal(first["output_layer.weight"], second["output_layer.weight"])
    name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"
    assert not torch.equal(first[name], second[name])


def test_experts_without_tokens_get_zero_gradients(alone):
    model = tiny.build(alone, tiny.transformer_config(moe_router_topk=1, moe_router_pre_softmax=True), E4M3)
    _, total = tiny.log_probs(model, _tokens(rows=1, length=2), alone)
    total.backward()
    empty = [
        not any(parameter.grad.any() for parameter in expert.parameters())
        for layer in model.decoder.layers
        for expert in layer.mlp.experts.local_experts
    ]
    assert 4 <= sum(empty) < 8  # two tokens reach at most two of the four experts of each layer
    assert all(gradient.isfinite().all() for gradient in _gradients(model).values())


def test_recomputed_activations_are_rounded_alike(alone):
    gradients = []
    for recompute in ({}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}):
        model = tiny.build(alone, tiny.transformer_config(**recompute), HYBRID).train()
        _, total = tiny.log_probs(model, _tokens(), alone)
        total.backward()
        gradients.append(_gradients(model))
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected), name


def _two_ranks(rank, world_size):
    return [_in_layout(layout) for layout in LAYOUTS]


def _in_layout(layout):
    """This rank's log-probabilities and its shards' gradients, summed over the ranks with other tokens."""
    groups = layout.start()
    config = tiny.transformer_config(layout)
    model = tiny.build(groups, config, E4M3)
    tokens = _tokens().chunk(groups.dp.size())[groups.dp.rank()]
    logprobs, total = tiny.log_probs(model, tokens, groups)
    total.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if "linear" in name:
            dist.all_reduce(parameter.grad, group=groups.expt_dp if ".experts." in name else groups.dp)
            gradients[tiny.global_name(name, config, groups)] = parameter.grad.numpy()
    return logprobs.numpy(), gradients


def test_two_ranks_give_the_results_of_one(alone):
    """Log-probabilities agree to float32 in every layout; gradients too without tensor parallelism.

    With it, the head's gradient is a float32 sum over ranks, and its last bit can move a number of the backward pass
    to the neighbouring FP8 number.
    """
    model = tiny.build(alone, tiny.transformer_config(), E4M3)
    whole_logprobs, total = tiny.log_probs(model, _tokens(), alone)
    total.backward()
    whole = _gradients(model)
    ranks = run_ranks(2, _two_ranks)
    for index, layout in enumerate(LAYOUTS):
        for rank in range(2):
            logprobs, gradients = (ranks[rank][index][0], ranks[rank][index][1])
            rows = whole_logprobs.chunk(1 if layout.tp > 1 else 2)[0 if layout.tp > 1 else rank]
            torch.testing.assert_close(torch.from_numpy(logprobs), rows, rtol=0, atol=2e-6)
            for name, gradient in gradients.items():
                _assert_gradient(name, torch.from_numpy(gradient), whole[name], layout, rank)


def _assert_gradient(name, actual, whole, layout, rank):
    size = layout.etp if ".experts." in name else layout.tp
    expected = tiny.cut(whole, name, size, rank if size > 1 else 0)
    error = (actual - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < (0.15 if layout.tp > 1 else 1e-5), f"{name} in {layout}"
