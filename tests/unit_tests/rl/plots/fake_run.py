"""A run folder as training leaves it, without training."""

import numpy as np
import torch

from megatron.rl.metrics import STATISTICS
from megatron.rl.run_log import RunLog, TokenSampleWriter


def step_record(step, random):
    """All that a step records."""
    tv = 0.01 + 0.01 * random.random()
    return {
        **dict.fromkeys(STATISTICS, 0.0),
        "step": step,
        "iteration": 2 * step,
        "reward/mean": 0.3 + 0.1 * random.random(),
        "response/length": 9.0,
        "train/loss": random.normal(),
        "train/grad_norm": 0.3,
        "policy/entropy": 0.8,
        "tv/mean": tv,
        "tv/p90": 2 * tv,
        "tv/p99": 3 * tv,
        "tv/max": 9 * tv,
        "ratio/mean": 1.0,
        "ratio/min": 0.2,
        "ratio/max": 4.0,
        "weight/mean": 1.0,
        "weight/min": -0.1,
        "weight/max": 1.1,
        "mismatch/logprob": 1e-3,
        "mismatch/tv": 1e-4,
        "speed/tokens_per_second": 900.0,
        "time/rollout": 2.0,
        "time/train": 1.0,
        "time/step": 3.1,
    }


def eval_record(step):
    """All that an evaluation records."""
    return {
        "step": step,
        "eval/reward": 0.3 + 0.01 * step,
        "eval/pass_at_k": 0.6,
        "eval/response_length": 9.0,
        "time/eval": 4,
    }


def write_run(folder, steps):
    """Writes ``steps`` steps with an evaluation before and after them."""
    random = np.random.default_rng(0)
    sample = TokenSampleWriter(folder, seed=0)
    with RunLog(folder, rank=0) as log:
        log.write(eval_record(0))
        for step in range(1, steps + 1):
            log.write(step_record(step, random))
            logmu = torch.log(torch.rand(50, generator=torch.Generator().manual_seed(step)))
            sample.add(step, logmu * 1.01, logmu)
        log.write(eval_record(steps))
    return folder
