"""What is let through, what is refused, and what help says."""

import argparse
import contextlib

import pytest

from megatron.rl.errors import ConfigError
from megatron.rl.flags import Kind, given_flags, refuse_unsupported, row_of, with_honest_help
from tests.unit_tests.rl.flags.parser import flags_of, whole_parser


@pytest.fixture(scope="module")
def parser():
    return whole_parser()


def _words(action: argparse.Action) -> list[str]:
    """The flag, with a value that its parser takes and that is not one of those let through."""
    name, row = action.option_strings[0], row_of(action)
    assert row is not None
    if action.nargs == 0:
        return [name]
    candidates = [getattr(choice, "name", str(choice)) for choice in action.choices or ()] or ["7", "attn", "x"]
    for text in candidates:
        with contextlib.suppress(ValueError, KeyError):
            value = action.type(text) if callable(action.type) else text
            if value and value not in (*(row.values or ()), "none"):
                return [name, *[text] * (action.nargs if isinstance(action.nargs, int) else 1)]
    raise AssertionError(f"no value found for {name}")


def test_every_refused_flag_is_refused_in_one_line_that_names_it(parser):
    refused = [action for action in flags_of(parser) if row_of(action).kind is Kind.REFUSED]
    assert len(refused) > 500
    for action in refused:
        words = _words(action)
        with pytest.raises(ConfigError) as caught:
            refuse_unsupported(given_flags(parser, words))
        message = str(caught.value)
        assert action.option_strings[0] in message and row_of(action).why in message, message
        assert "cannot be used here" in message and "\n" not in message and len(message) < 400, message


LET_THROUGH = [
    "--rl-generation-lag 0",
    "--no-rl-partial-rollouts",
    "--rl-submission-granularity B",
    "--grpo-kl-beta 0",
    "--rl-default-top-p 1 --rl-default-top-k -1",
    "--optimizer adam",
    "--ckpt-format torch_dist",
    "--log-interval 1",
    "--main-grads-dtype fp32",
    "--cuda-graph-impl none",
    "--lr-warmup-samples 0",
    "--error-injection-rate 0",
    "--use-mcore-models --no-one-logger --no-position-embedding --use-rotary-position-embeddings",
    "--rerun-mode disabled",
    "--dist-ckpt-workers 1",
    "--fp8-recipe tensorwise",
    "--exit-signal SIGUSR1",
]


@pytest.mark.parametrize("words", LET_THROUGH)
def test_what_is_done_in_any_case_may_be_asked_for(parser, words):
    refuse_unsupported(given_flags(parser, words.split()))


VALUES = {
    "--optimizer sgd": "--optimizer sgd cannot be used here, only adam",
    "--exit-signal SIGKILL": "only SIGTERM or SIGINT",
    "--attention-backend local": "only auto or flash or fused or unfused",
    "--moe-router-load-balancing-type aux_loss sinkhorn": "depend on how a mini-batch is cut",
    "--transformer-impl inference_optimized": "only local or transformer_engine",
    "--rl-consumption-granularity G": "only B",
    "--dist-ckpt-strictness ignore_all": "only assume_ok_unexpected",
    "--fp8-recipe custom": "only tensorwise",
    "--log-interval 10": "only 1",
}


@pytest.mark.parametrize("words", VALUES)
def test_a_value_that_would_be_ignored_is_refused(parser, words):
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(given_flags(parser, words.split()))
    assert VALUES[words] in str(caught.value)


def test_a_flag_that_the_tables_do_not_know_is_refused():
    parser = argparse.ArgumentParser()
    parser.add_argument("--of-a-later-megatron", action="store_true")
    with pytest.raises(ConfigError, match="--of-a-later-megatron: nothing is known of it here"):
        refuse_unsupported(given_flags(parser, ["--of-a-later-megatron"]))


def test_flags_are_found_under_any_of_their_names_and_with_an_equals_sign(parser):
    argv = ["--persistent-save-interval=4", "--seed", "3", "--disable-fp8-wgrad", "--lr=-1"]
    found = {flag.word: (flag.destination, flag.value) for flag in given_flags(parser, argv)}
    assert found == {
        "--persistent-save-interval": ("save_interval", 4),
        "--seed": ("seed", 3),
        "--disable-fp8-wgrad": ("fp8_wgrad", False),
        "--lr": ("lr", -1.0),
    }


def test_help_promises_nothing_that_is_not_so():
    parser = whole_parser()
    with_honest_help(parser)
    helps = {name: action.help for action in flags_of(parser) for name in action.option_strings}
    assert helps["--calculate-per-token-loss"] == "(not used here: use --loss-normalization token-mean)"
    assert helps["--optimizer"].startswith("(not used here: only adam; ")
    assert helps["--use-mcore-models"] == "(so without it: the model is Megatron-Core's)"
    assert helps["--num-layers"].endswith("(comes from --hf-model, which it must not contradict)")
    assert helps["--weight-decay"] == "Weight decay coefficient for L2 regularization."
