"""Every metric that a run records: its name, unit and meaning. ``docs/metrics.md`` is made from this table."""

from typing import NamedTuple


class Metric(NamedTuple):
    """What one number of a record is."""

    unit: str
    meaning: str


# In the order of phases within a step. "logprob" is a pass without gradients, as in the check before training.
PHASES = ("rollout", "reward", "logprob", "train", "sync", "eval", "save")

METRICS: dict[str, Metric] = {
    "step": Metric("count", "rollout batches finished; 0 is the state before training"),
    "iteration": Metric("count", "optimizer steps finished"),
    "wall_time": Metric("s since 1970", "when the record was written"),
    "reward/mean": Metric("score", "mean score of the step's responses"),
    "reward/std": Metric("score", "standard deviation of the scores over all responses"),
    "reward/unreadable": Metric(
        "count", "responses whose final answer is missing, cut off or unreadable; they score 0"
    ),
    "reward/timeouts": Metric("count", "responses whose scoring ran out of time"),
    "reward/errors": Metric("count", "responses whose scoring failed"),
    "reward/flat_groups": Metric("share", "groups whose responses all scored the same: no advantage, no gradient"),
    "reward/incomplete_groups": Metric("share", "groups with a response whose scoring ran out of time or failed"),
    "response/length": Metric("tokens", "mean length of the step's responses"),
    "response/length_max": Metric("tokens", "longest response"),
    "response/truncated": Metric("share", "responses that ended at the length limit"),
    "response/aborted": Metric("count", "responses that the rollout engine gave up"),
    "train/loss": Metric("objective", "the loss, mean over the step's optimizer steps"),
    "train/grad_norm": Metric(
        "objective", "L2 norm of the whole gradient before clipping, mean over the optimizer steps that were applied"
    ),
    "train/learning_rate": Metric("1", "learning rate of the step's last optimizer step"),
    "train/skipped_updates": Metric("count", "optimizer steps that were not applied because a gradient was not finite"),
    "train/micro_batches": Metric("count", "forward passes of each data-parallel rank in the step"),
    "train/padding": Metric("share", "positions of the step's micro-batches, over all ranks, that hold no token"),
    "policy/tokens": Metric("count", "sampled tokens that the per-token statistics are taken of"),
    "policy/entropy": Metric("nat", "mean entropy of the policy over the vocabulary"),
    "policy/nonfinite": Metric("count", "tokens with a value other than the ratio that is not finite; left out of it"),
    "tv/mean": Metric("probability", "mean of abs(pi - mu) of the sampled tokens"),
    "tv/p50": Metric("probability", "median of abs(pi - mu)"),
    "tv/p90": Metric("probability", "90th percentile of abs(pi - mu)"),
    "tv/p99": Metric("probability", "99th percentile of abs(pi - mu)"),
    "tv/max": Metric("probability", "largest abs(pi - mu)"),
    "ratio/mean": Metric("1", "mean of r = pi / mu"),
    "ratio/min": Metric("1", "smallest r"),
    "ratio/max": Metric("1", "largest r"),
    "ratio/nonfinite": Metric("count", "tokens whose r is not finite in float32; left out of ratio/*"),
    "weight/mean": Metric("1", "mean of the gradient weight w, from dJ/dlogp = w r A"),
    "weight/min": Metric("1", "smallest w"),
    "weight/max": Metric("1", "largest w"),
    "weight/negative_share": Metric("share", "tokens with w < 0: the gradient is reversed, back to mu"),
    "mismatch/logprob": Metric("nat", "mean of abs(log pi - log mu), engine against trainer, before any update"),
    "mismatch/tv": Metric("probability", "mean of abs(pi - mu), engine against trainer, before any update"),
    "mismatch/k3": Metric("nat", "mean of r - 1 - log r, before any update; estimates KL(mu, pi)"),
    "mismatch/after_sync": Metric("nat", "mean of abs(log pi - log mu) on a few prompts, after a sync"),
    "eval/reward": Metric("score", "mean score over all responses to the held-out problems"),
    "eval/pass_at_k": Metric("share", "held-out problems with at least one right response"),
    "eval/response_length": Metric("tokens", "mean length of the responses in evaluation"),
    "eval/unreadable": Metric("count", "responses in evaluation whose final answer is missing, cut off or unreadable"),
    "eval/timeouts": Metric("count", "responses in evaluation whose scoring ran out of time"),
    "eval/errors": Metric("count", "responses in evaluation whose scoring failed"),
    "speed/tokens_per_second": Metric("tokens/s", "sampled tokens of the step, over all ranks, by time/step"),
    "time/step": Metric("s", "wall-clock time of the step on rank 0, without evaluation"),
    **{f"time/{phase}": Metric("s", f"wall-clock time of the phase {phase} on rank 0") for phase in PHASES},
}


def metrics_page() -> str:
    """The text of ``docs/metrics.md``: how a run folder keeps its numbers, and the table of all of them."""
    rows = "\n".join(f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in METRICS.items())
    return f"{_INTRODUCTION}\n| name | unit | meaning |\n|---|---|---|\n{rows}\n"


_INTRODUCTION = """\
# What a run records

A run folder (`--run-dir`) holds the run's numbers in three places:

- `metrics.jsonl`: one JSON object a line. A step writes one line, an evaluation another with the same `step`; a reader
  merges lines of equal `step`, and later values win. The line of step 0 is the evaluation before training. Numbers that
  are not finite are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, since JSON has no such numbers.
  `megatron.rl.run_log.read_metrics(folder)` reads it all back.
- `tensorboard/` (or `--tensorboard-dir`): the same numbers under the same names, by `step`.
- `tokens.npz`: a sample of single tokens, with the arrays `step` (int32), `logmu` and `logp` (float32, nat): at which
  step it was sampled, its log-probability by the rollout engine, and by the trainer before the step's first update. The
  sample is drawn uniformly from the tokens of one data-parallel rank; its size is capped, by dropping every second
  step that was kept whenever it is full. `megatron.rl.run_log.read_tokens(folder)` reads it, with `mu`, `pi` and `tv`.

`tools/plot_run.py FOLDER` draws them all.

A folder holds one run; `run.json` says which. A new run in a used folder first moves the earlier run's files to a
folder beside it, named after the time when that run began. A run that goes on from the checkpoints of its own folder
drops the lines after the step that it resumes from and goes on behind them.

## Metrics

pi is the policy's probability of a sampled token, mu the rollout engine's, r = pi / mu, A the advantage
(arXiv 2606.09821, eq. 7 and 10). Statistics of tokens are over all tokens of the step on all ranks; quantiles are
exact. A metric that does not apply to a line is absent from it.
"""
