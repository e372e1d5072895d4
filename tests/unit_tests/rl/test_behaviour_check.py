"""The embedded engine against the learner, and planted faults, over data-parallel and pipeline ranks."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402

from megatron.rl.behaviour_check import check_behaviour_policy  # noqa: E402
from megatron.rl.collector import Collector  # noqa: E402
from megatron.rl.data import load_prompts  # noqa: E402
from megatron.rl.errors import RolloutError  # noqa: E402
from megatron.rl.rewards.scorer import ExactScorer  # noqa: E402
from megatron.rl.rollout.hf import HFEngine  # noqa: E402
from megatron.rl.runner import load_tokenizer  # noqa: E402
from megatron.rl.types import Sample  # noqa: E402
from megatron.rl.weights import load_into_hf_model  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402

LAYOUTS: dict[str, tuple[str, ...]] = {"data 2": (), "pipeline 2": ("--pipeline-model-parallel-size", "2")}
PROMPTS = 13


class _Bench:
    """Engine and learner of one layout, and the check between them."""

    def __init__(self, here: started.Started) -> None:
        run = here.parsed.run
        self.here, self.run, self.learner = here, run, here.learner()
        tokenizer = load_tokenizer(run.hf_model)
        self.engine = HFEngine(run.hf_model, load_tensors=load_into_hf_model, eos_token_ids=[1], pad_token_id=0)
        group = torch.distributed.group.WORLD
        self.collector = Collector(self.engine, ExactScorer(), tokenizer, seed=1, group=group)
        self.prompts = load_prompts(
            run.data.train_prompts,
            tokenizer,
            vocab_size=here.policy.vocab_size,
            max_prompt_tokens=16,
            limit=PROMPTS,
        )

    def samples(self, temperature: float) -> list[Sample]:
        """What the engine samples at a temperature, equal on all ranks."""
        sampling = replace(self.run.sampling, temperature=temperature)
        scored = self.collector.scored(self.collector.sample(self.prompts, 2, sampling, "check"))
        return [Sample(*triple, 0.0) for triple in scored]

    def check(self, samples: list[Sample]) -> Any:
        """The report on these samples, or the refusal's words."""
        batches = self.here.batches(samples, 4)
        try:
            return check_behaviour_policy(self.learner, batches, self.run, self.here.policy.groups)
        except RolloutError as error:
            return str(error)

    def hand_over(self, factor: float) -> None:
        """Gives the engine the learner's weights, the head's times ``factor``."""
        tensors = self.here.export()
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * factor
        self.engine.update_weights(iter(tensors.items()), version=1)


def _shifted(sample: Sample) -> Sample:
    completion = sample.completion
    logprobs = (*completion.logprobs[1:], completion.logprobs[0])
    return replace(sample, completion=replace(completion, logprobs=logprobs))


def _findings(layout: tuple[str, ...]) -> dict[str, Any]:
    with started.started([*layout, "--rl-default-temperature", "0.6"]) as here:
        bench = _Bench(here)
        right = bench.samples(0.6)
        found = {
            "tokens": sum(len(sample.completion.token_ids) for sample in right),
            "right": bench.check(right),
            "raw": bench.check(bench.samples(1.0)),
            "shifted": bench.check([_shifted(sample) for sample in right]),
        }
        bench.hand_over(1.2)
        found["other weights"] = bench.check(bench.samples(0.6))
        bench.hand_over(1.0)
        found["right again"] = bench.check(bench.samples(0.6))
        return found


def _on_rank(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {name: _findings(layout) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def findings() -> list[dict[str, dict[str, Any]]]:
    """Of each rank, by layout."""
    return run_ranks(2, _on_rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_embedded_engine_agrees_with_the_learner(findings, layout):
    found = findings[0][layout]
    for name in ("right", "right again"):
        assert found[name].mean_difference < 1e-5 and found[name].max_difference < 1e-4, found[name]
        assert found[name].precision == "float32"
    assert found["right"].tokens == found["tokens"] > 2 * PROMPTS  # those of all ranks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planted_faults_are_refused_and_named(findings, layout):
    found = findings[0][layout]
    assert "log-probabilities ignore --rl-default-temperature 0.6" in found["raw"]
    assert "belong to the token after; its answer is read shifted by one" in found["shifted"]
    assert "compare the engine's weights" in found["other weights"]
    assert all("\n" not in found[name] for name in ("raw", "shifted", "other weights"))


def test_all_ranks_come_to_the_same_verdict(findings):
    assert findings[0] == findings[1]
