"""Megatron started as the program starts it, one policy after another in a process, and samples to train on."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron.rl import setup  # noqa: E402
from megatron.rl.arguments import ParsedArguments, parse_arguments  # noqa: E402
from megatron.rl.config import LossNormalizationConfig  # noqa: E402
from megatron.rl.data import MicroBatcher, TokenBatch, loss_weights  # noqa: E402
from megatron.rl.objectives import get_objective  # noqa: E402
from megatron.rl.policy.learner import HeadSettings, Learner, UpdateResult  # noqa: E402
from megatron.rl.types import Completion, Prompt, RewardResult, Sample  # noqa: E402
from megatron.rl.weights import export_hf_weights, load_hf_weights  # noqa: E402


@dataclass(frozen=True)
class Started:
    """A policy with what it was built from."""

    parsed: ParsedArguments
    policy: setup.Policy

    def learner(self, **changes: Any) -> Learner:
        """A learner as the program makes it; ``changes`` to its head's settings."""
        run, policy = self.parsed.run, self.policy
        settings: dict[str, Any] = {
            "vocab_size": policy.vocab_size,
            "temperature": run.sampling.temperature,
            "objective": get_objective(run.objective.name, delta=run.objective.delta),
        }
        head = HeadSettings(**{**settings, **changes})
        return Learner(policy.chunks, policy.optimizer, policy.scheduler, policy.config, policy.groups, head)

    def export(self) -> dict[str, torch.Tensor]:
        """The whole weights by their Hugging Face names. Collective."""
        return dict(
            export_hf_weights(self.policy.chunks, hf_config=self.parsed.hf_config, pg_collection=self.policy.groups)
        )

    def batches(self, samples: Sequence[Sample], micro_batch_size: int | None = None) -> list[TokenBatch]:
        """This rank's micro-batches, as the program cuts them, or with another ``micro_batch_size``."""
        config, groups = self.parsed.run.batching, self.policy.groups
        if micro_batch_size is not None:
            config = replace(config, micro_batch_size=micro_batch_size)
        dp, cp = groups.dp, groups.cp
        batcher = MicroBatcher(
            config, dp_rank=dp.rank(), dp_size=dp.size(), cp_rank=cp.rank(), cp_size=cp.size(), pad_id=0
        )
        return batcher(samples)

    def update(
        self,
        learner: Learner,
        samples: Sequence[Sample],
        micro_batch_size: int | None = None,
        normalization: LossNormalizationConfig | None = None,
    ) -> UpdateResult:
        """One optimizer step on ``samples``, as the loop takes it."""
        batches = self.batches(samples, micro_batch_size)
        normalization = normalization or self.parsed.run.normalization
        return learner.update(batches, loss_weights(batches, normalization, self.policy.groups.dp_cp), len(samples))


Values = dict[int, dict[int, float]]  # of each sampled token, by its response's place and its position


def by_place(batches: Sequence[TokenBatch], values: Sequence[torch.Tensor]) -> Values:
    """A per-token value ([rows, positions] for each batch) of this rank's sampled tokens."""
    found: Values = {}
    for batch, value in zip(batches, values, strict=True):
        numbers, positions = batch.sequence_ids[batch.mask].tolist(), batch.position_ids[batch.mask].tolist()
        for number, position, x in zip(numbers, positions, value[batch.mask].tolist(), strict=True):
            found.setdefault(batch.places[number], {})[position] = x
    return found


@contextlib.contextmanager
def started(flags: Sequence[str], *, load: bool = True) -> Iterator[Started]:
    """The policy of a command line, in this process's world; Megatron's globals are taken down at the end.

    The process group must be initialised, as ``run_ranks`` does. ``load``: the weights of ``--hf-model``.
    """
    parsed = parse_arguments(list(flags))
    try:
        setup.initialize(parsed.megatron)
        policy = setup.build_policy(parsed.megatron, parsed.run)
        here = Started(parsed, policy)
        if load:
            load_hf_weights(policy.chunks, parsed.run.hf_model, hf_config=parsed.hf_config, pg_collection=policy.groups)
            policy.optimizer.reload_model_params()
        yield here
    finally:
        take_down()


def take_down() -> None:
    """Megatron's global state of a run is gone; torch.distributed stays."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars

    dist.barrier()
    parallel_state.destroy_model_parallel()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    global_vars.unset_global_variables()


def make_samples(count: int, vocab_size: int, seed: int = 0) -> list[Sample]:
    """Random samples of 1 to 6 prompt and 1 to 7 response tokens, the last of them without a response.

    Their log mu is between -4 and 0; advantages have both signs and one is zero. Token 0 is left out: it pads, and
    ``transformers`` never trains the embedding of the padding token.
    """
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        response = 0 if index == count - 1 and count > 1 else rng.randint(1, 7)
        prompt_ids, token_ids = (
            tuple(rng.randrange(1, vocab_size) for _ in range(length)) for length in (rng.randint(1, 6), response)
        )
        completion = Completion(
            f"sample{index}",
            prompt_ids,
            token_ids,
            tuple(-rng.uniform(0, 4) for _ in token_ids),
            "stop" if response else "abort",
            (0,) * response,
        )
        advantage = 0.0 if index == 1 else rng.uniform(-1, 1)
        samples.append(Sample(Prompt(index, "", prompt_ids, ""), completion, RewardResult(0.0), advantage))
    return samples


def hf_logprobs(folder: Path, samples: Sequence[Sample], temperature: float = 1.0) -> list[list[float]]:
    """Log-probability of every response token by ``transformers``, one sample at a time, without padding or cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [response_logprobs(model, sample, temperature)[0].tolist() for sample in samples]


def response_logprobs(model: Any, sample: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [response tokens] and entropies [response tokens], float64, from the full log-softmax."""
    prompt, response = sample.completion.prompt_ids, sample.completion.token_ids
    logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].double() / temperature
    predicting = slice(len(prompt) - 1, len(prompt) - 1 + len(response))
    log_probs = logits[predicting].log_softmax(-1)
    chosen = log_probs.gather(1, torch.tensor(response, dtype=torch.int64)[:, None])[:, 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)
