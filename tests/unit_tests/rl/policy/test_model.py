"""The GPTModel's stages: which layers, which embeddings, which sizes."""

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
from megatron.rl.policy.local_layers import LocalCoreAttention, LocalLayersProvider, LocalRMSNorm  # noqa: E402
from megatron.rl.policy.model import ModelShape, build_gpt_model  # noqa: E402
from tests.unit_tests.rl.fp8.tiny import alone, transformer_config  # noqa: E402

SHAPE = ModelShape(
    padded_vocab_size=64, max_sequence_length=32, tied_embeddings=False, rotary_base=5000.0, rotary_percent=1.0
)


@pytest.fixture(scope="module")
def groups():
    with alone() as collection:
        yield collection


def _build(groups, shape=SHAPE, **changes):
    return build_gpt_model(
        transformer_config(), shape, local_layers=LocalLayersProvider(), pg_collection=groups, **changes
    )


def test_a_whole_model_has_local_layers_and_both_embeddings(groups):
    model = _build(groups)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(LocalCoreAttention) == 2
    assert kinds.count(LocalRMSNorm) == 2 * 4 + 1  # input, pre-MLP, q and k of each layer, and the final one
    assert model.embedding.word_embeddings.weight.shape == model.output_layer.weight.shape == (64, 32)
    inverse_frequencies = model.rotary_pos_emb.inv_freq
    assert inverse_frequencies[1].item() == pytest.approx(5000 ** (-2 / 8))


def test_tied_embeddings_have_no_weight_of_their_own_in_the_head(groups):
    shape = ModelShape(64, 32, tied_embeddings=True, rotary_base=1e4, rotary_percent=1.0)
    model = _build(groups, shape)
    assert model.output_layer.weight is None
    assert model.shared_embedding_or_output_weight() is model.embedding.word_embeddings.weight


def test_a_middle_stage_has_layers_only(groups):
    model = _build(groups, pre_process=False, post_process=False)
    assert not hasattr(model, "embedding") and not hasattr(model, "output_layer")
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"decoder"}


def test_llama_3_rope_scaling_reaches_the_model(groups):
    shapes = [ModelShape(64, 32, False, 5e5, 1.0, rope_scaling=on, rope_scaling_factor=4.0) for on in (False, True)]
    plain, scaled = (_build(groups, shape).rotary_pos_emb.inv_freq for shape in shapes)
    assert scaled[0] == plain[0]  # high frequencies stay
    assert scaled[-1].item() == pytest.approx(plain[-1].item() / 4)  # low ones are divided
