"""The contract on mu, checked before training: engine and trainer give the same tokens the same log-probabilities.

Pure numbers in, a verdict out; it serves every engine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.rl.errors import RolloutError

Rows = Sequence[Sequence[float]]  # nat; one sequence for each response, one number for each of its tokens

# Largest mean abs(log pi - log mu), in nat, that a precision explains between two right implementations.
#   float32: sums in another order. 2e-7 to 3e-6 measured within transformers, 2e-5 against inference servers.
#   bf16:    8 bits of mantissa. 0.01 measured for small models (dense and experts, random and trained weights), 0.04
#            for a pretrained one of 30 layers, 0.03 to 0.06 for large random weights on two implementations.
#   fp8:     e4m3 with one scale a tensor, 4 bits of mantissa. 0.02 to 0.08 measured for small models, 0.16 for the
#            pretrained one, with single tokens above 1.
# A wrong setting gives 0.05 to several nat, so the wide bounds alone would let some pass: see refuse_mismatch.
TOLERANCE = {"float32": 1e-4, "bf16": 0.1, "fp8": 0.4}

# An alternative reading of the numbers is believed if it leaves less than this share of the difference. Rounding is
# in every reading and a wrong one adds to it, so where the settings are right no alternative leaves less.
_EXPLAINS = 0.75
# Truncation raises the log-probability of every token that survives it. Measured in float32 and bf16: the signed mean
# is 0.99 to 1 of the absolute one, and at most 0.02 of the tokens are lower (fp8: 0.65 to 1 and 0.18, so that rounding
# can hide it). With every other fault and with rounding alone it is below 0.6, and more of the tokens are lower.
_ONE_SIDED, _FEW, _ENOUGH_TOKENS = 0.8, 0.15, 30


@dataclass(frozen=True)
class MismatchReport:
    """How far engine and trainer are apart on the same sampled tokens. Differences are log pi - log mu, in nat."""

    tokens: int
    mean_difference: float  # absolute
    median_difference: float  # absolute
    p99_difference: float  # absolute
    max_difference: float  # absolute
    mean_excess: float  # of log mu - log pi, signed: positive where the engine finds its tokens more probable
    share_below: float  # of tokens that the engine finds less probable than the trainer
    mean_tv: float  # of abs(pi - mu)
    max_tv: float
    precision: str

    def __str__(self) -> str:
        return (
            f"mean abs(log pi - log mu) {self.mean_difference:.2e} nat (99% below {self.p99_difference:.2e}, largest "
            f"{self.max_difference:.2e}), mean abs(pi - mu) {self.mean_tv:.2e} (largest {self.max_tv:.2e}) on "
            f"{self.tokens} tokens, {self.precision}"
        )


def compare(engine: Rows, trainer: Rows, precision: str) -> MismatchReport:
    """Compares log-probabilities of the same tokens, in the same order on both sides.

    Args:
        engine: log mu, as the engine gave it.
        trainer: log pi, at the sampling temperature.
        precision: the coarsest of the two sides, a key of :data:`TOLERANCE`.

    Raises:
        RolloutError: a number is not finite, the responses' lengths differ, or there is no token.
    """
    excesses, shifts = [], []
    for row, (mus, pis) in enumerate(zip(engine, trainer, strict=True)):
        if len(mus) != len(pis):
            raise RolloutError(f"response {row} of the check has {len(mus)} tokens at the engine, {len(pis)} here")
        for position, (mu, pi) in enumerate(zip(mus, pis, strict=True)):
            if not (math.isfinite(mu) and math.isfinite(pi)):
                raise RolloutError(
                    f"response {row} of the check, position {position}: log-probability {mu} at the engine, {pi} at "
                    f"the trainer; both must be finite"
                )
            excesses.append(mu - pi)
            shifts.append(abs(math.exp(pi) - math.exp(mu)))
    if not excesses:
        raise RolloutError("the check of the engine against the trainer was given no token")
    count, differences = len(excesses), sorted(map(abs, excesses))
    return MismatchReport(
        tokens=count,
        mean_difference=math.fsum(differences) / count,
        median_difference=differences[count // 2],
        p99_difference=differences[math.ceil(0.99 * count) - 1],
        max_difference=differences[-1],
        mean_excess=math.fsum(excesses) / count,
        share_below=sum(excess < 0 for excess in excesses) / count,
        mean_tv=math.fsum(shifts) / count,
        max_tv=max(shifts),
        precision=precision,
    )


def refuse_mismatch(report: MismatchReport, engine: Rows, trainer: Rows, alternatives: Mapping[str, Rows]) -> None:
    """Refuses an engine that does not sample from the trainer's policy, and names the likely cause.

    Numbers that agree to float32 pass. Others are first held against the known faults: each of ``alternatives``, a
    shift by one token, truncated sampling. Only then may the precision excuse them, since a wrong setting can hide
    within the tolerance of bf16 and fp8.

    Args:
        report: of ``engine`` against ``trainer``.
        engine: as given to :func:`compare`.
        trainer: as given to :func:`compare`.
        alternatives: the trainer's log-probabilities under another setting, by the sentence that blames this setting
            and says how to mend it. The one that agrees best is named if it agrees markedly better.

    Raises:
        RolloutError: one line with the cause and the measured figures.
    """
    if report.mean_difference <= TOLERANCE["float32"]:
        return
    tolerance = TOLERANCE[report.precision]
    cause = _better_reading(report, engine, trainer, alternatives) or _truncation(report)
    if cause is None:
        if report.mean_difference <= tolerance:
            return
        cause = "no single setting explains it: compare the engine's weights, tokenizer and dtype with --hf-model"
    raise RolloutError(
        f"the rollout engine does not sample from the trainer's policy: {cause}; mean abs(log pi - log mu) is "
        f"{report.mean_difference:.2e} nat (largest {report.max_difference:.2e}) on {report.tokens} tokens, where "
        f"{report.precision} explains {tolerance:.0e}"
    )


def _better_reading(
    report: MismatchReport, engine: Rows, trainer: Rows, alternatives: Mapping[str, Rows]
) -> str | None:
    """The cause whose reading of the numbers leaves the least difference, if that is markedly less."""
    readings = {cause: (engine, numbers) for cause, numbers in alternatives.items()}
    longer = [(mus, pis) for mus, pis in zip(engine, trainer, strict=True) if len(mus) > 1]
    if sum(len(mus) - 1 for mus, _ in longer) >= report.tokens / 2:  # else too little is left to judge by
        readings["its log-probabilities belong to the token before; its answer is read shifted by one"] = (
            [mus[1:] for mus, _ in longer],
            [pis[:-1] for _, pis in longer],
        )
        readings["its log-probabilities belong to the token after; its answer is read shifted by one"] = (
            [mus[:-1] for mus, _ in longer],
            [pis[1:] for _, pis in longer],
        )
    left = {cause: compare(mus, pis, report.precision).mean_difference for cause, (mus, pis) in readings.items()}
    best = min(left, key=lambda cause: left[cause], default=None)
    if best is None or left[best] > _EXPLAINS * report.mean_difference:
        return None
    return f"{best} (otherwise {left[best]:.2e} nat)"


def _truncation(report: MismatchReport) -> str | None:
    if (
        report.tokens < _ENOUGH_TOKENS
        or report.mean_excess < _ONE_SIDED * report.mean_difference
        or report.share_below > _FEW
    ):
        return None
    return (
        f"it cuts unlikely tokens off ({1 - report.share_below:.0%} of the tokens are not less probable there); sample "
        f"with --rl-default-top-p 1 --rl-default-top-k 0, and without top-p, top-k or min-p of the engine's own"
    )
