"""Per-token statistics of a step over all data-parallel ranks, and the time that each phase of it took."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

OUTPUTS = ("logprobs", "behavior_logprobs", "entropy", "tv", "ratio", "weight")
_PERCENTILES = (50, 90, 99)
_MEANS = {
    "entropy": "policy/entropy",
    "tv": "tv/mean",
    "ratio": "ratio/mean",
    "weight": "weight/mean",
    "difference": "mismatch/logprob",
    "k3": "mismatch/k3",
}
_EXTREMES = ("tv", "ratio", "weight")
STATISTICS = (
    "policy/tokens",
    *_MEANS.values(),
    *(f"tv/p{percent}" for percent in _PERCENTILES),
    *("tv/max", "ratio/min", "ratio/max", "ratio/nonfinite", "policy/nonfinite"),
    *("weight/min", "weight/max", "weight/negative_share", "mismatch/tv"),
)


class TokenStatistics:
    """Adds up per-token values over micro-batches, and reduces them to numbers of all ranks together.

    Sums are float64. Quantiles are exact order statistics (the smallest value that at least the given share of all
    tokens does not exceed), found by a radix search over float32's bit patterns: three all-reduces of a few
    thousand counts, however many tokens there are, and no values are gathered. This rank keeps one float32 for each
    of its own tokens.

    Every statistic is over the finite values of its quantity; those that are not finite are counted. One without
    any finite value is NaN.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """``device``: of the values that will be added, and one that the process group can reduce on."""
        self._device = torch.device(device)
        self._sums = torch.zeros(len(_MEANS), 2, dtype=torch.float64, device=self._device)  # sum, finite values
        self._counts = torch.zeros(4, dtype=torch.int64, device=self._device)  # tokens, bad ratio, bad other, w < 0
        self._least = torch.full((2, len(_EXTREMES)), torch.inf, dtype=torch.float32, device=self._device)  # x, -x
        self._tv: list[torch.Tensor] = []

    def add(self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Adds one micro-batch.

        Args:
            outputs: the float32 tensors named in :data:`OUTPUTS`, each of ``mask``'s shape: log pi and log mu of the
                sampled tokens and the policy's entropy in nats, abs(pi - mu), pi / mu, and the gradient weight w
                (arXiv 2606.09821 eq. 7, 10). Others are ignored.
            mask: bool; the sampled tokens. Whatever lies outside it, NaN included, enters nothing.

        Raises ValueError for a mask that is not bool, a missing tensor, or one of another shape.
        """
        values = _select(outputs, mask)
        log_ratio = values["logprobs"].double() - values["behavior_logprobs"].double()
        values["difference"] = log_ratio.abs()
        values["k3"] = torch.expm1(log_ratio) - log_ratio
        finite = {name: torch.isfinite(value) for name, value in values.items()}
        for place, name in enumerate(_MEANS):
            kept = values[name][finite[name]]
            self._sums[place, 0] += kept.double().sum()
            self._sums[place, 1] += kept.numel()
        for place, name in enumerate(_EXTREMES):
            kept = values[name][finite[name]]
            if kept.numel():
                ends = torch.stack([kept.min(), -kept.max()])
                self._least[:, place] = torch.minimum(self._least[:, place], ends)
        others = torch.stack([finite[name] for name in OUTPUTS if name != "ratio"]).all(dim=0)
        self._counts[0] += int(mask.sum())
        self._counts[1] += (~finite["ratio"]).sum()
        self._counts[2] += (~others).sum()
        self._counts[3] += (values["weight"][finite["weight"]] < 0).sum()
        self._tv.append(values["tv"][finite["tv"]].abs())

    def reduce(self, group: ProcessGroup | None = None, pipeline_group: ProcessGroup | None = None) -> dict[str, float]:
        """The statistics of everything added so far on all ranks, named as in :data:`STATISTICS`; equal on all ranks.

        Nothing is forgotten: after the first mini-batch of a step the call gives that mini-batch's numbers, after the
        last one the whole step's. ``mismatch/*`` is engine against trainer only while no update has been taken since
        the rollout; later it measures the updates too.

        Args:
            group: the ranks whose tokens are added up, as a rule data parallel with context parallel; None for one.
                A rank without tokens takes part.
            pipeline_group: given where there are several pipeline stages. Only the last stage's ranks reduce; they
                hand the numbers to the others, whose own accumulators stay unused.

        Collective over both groups. Raises RuntimeError on all ranks alike where no rank has a token.
        """
        numbers = torch.zeros(len(STATISTICS), dtype=torch.float64, device=self._device)
        last = pipeline_group.size() - 1 if pipeline_group is not None else 0
        if pipeline_group is None or pipeline_group.rank() == last:
            found = self._reduce(group)
            numbers = torch.tensor([found[name] for name in STATISTICS], dtype=torch.float64, device=self._device)
        if pipeline_group is not None and last > 0:
            dist.broadcast(numbers, group_src=last, group=pipeline_group)
        result = dict(zip(STATISTICS, numbers.tolist(), strict=True))
        if result["policy/tokens"] == 0:
            raise RuntimeError("no rank has a sampled token to take statistics of")
        return result

    def _reduce(self, group: ProcessGroup | None) -> dict[str, float]:
        sums = _all_reduced(self._sums, dist.ReduceOp.SUM, group)
        counts = _all_reduced(self._counts, dist.ReduceOp.SUM, group)
        least = _all_reduced(self._least, dist.ReduceOp.MIN, group)
        tokens, bad_ratios, bad_others, negative = counts.tolist()
        result = {label: _divide(*sums[place].tolist()) for place, label in enumerate(_MEANS.values())}
        ends = {name: (least[0, place].item(), -least[1, place].item()) for place, name in enumerate(_EXTREMES)}
        ends = {name: pair if pair[0] <= pair[1] else (torch.nan, torch.nan) for name, pair in ends.items()}
        result |= {"tv/max": ends["tv"][1]}
        for name in ("ratio", "weight"):
            result |= {f"{name}/min": ends[name][0], f"{name}/max": ends[name][1]}
        tv = torch.cat(self._tv) if self._tv else torch.empty(0, device=self._device)
        quantiles = global_percentiles(tv, _PERCENTILES, group)
        result |= {f"tv/p{percent}": value for percent, value in zip(_PERCENTILES, quantiles, strict=True)}
        weights = sums[list(_MEANS).index("weight"), 1].item()
        return result | {
            "policy/tokens": tokens,
            "ratio/nonfinite": bad_ratios,
            "policy/nonfinite": bad_others,
            "weight/negative_share": _divide(negative, weights),
            "mismatch/tv": result["tv/mean"],
        }


def token_statistics(
    outputs: Mapping[str, torch.Tensor], mask: torch.Tensor, group: ProcessGroup | None = None
) -> dict[str, float]:
    """:class:`TokenStatistics` of a single batch: arguments as in ``add``, result as of ``reduce``. Collective."""
    statistics = TokenStatistics(mask.device)
    statistics.add(outputs, mask)
    return statistics.reduce(group)


def global_percentiles(
    values: torch.Tensor, percentiles: tuple[int, ...], group: ProcessGroup | None = None
) -> list[float]:
    """Exact percentiles of the values of all ranks together; NaN where there are none. Collective over ``group``.

    ``values`` [n], float32, finite and not negative; n differs between ranks and may be 0. The p-th percentile is
    the smallest value that at least p % of all values do not exceed.

    Non-negative float32 numbers are ordered as their bit patterns are as integers. So the first 11 bits of each
    percentile come from global counts of the values' first 11 bits, the next 11 from counts among the values that
    share these, the last 9 in the same way.
    """
    bits = (values.float() + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 makes -0.0 positive
    total = int(_all_reduced(torch.tensor(bits.numel(), device=bits.device), dist.ReduceOp.SUM, group))
    if total == 0:
        return [torch.nan] * len(percentiles)
    ranks = [-(-percent * total // 100) for percent in percentiles]  # 1 for the smallest value; whole numbers only
    ranks = [max(rank, 1) for rank in ranks]
    prefixes = [0] * len(percentiles)
    for shift, width in ((20, 11), (9, 11), (0, 9)):
        counts = torch.stack(
            [
                torch.bincount((bits[bits >> (shift + width) == prefix] >> shift) & (2**width - 1), minlength=2**width)
                for prefix in prefixes
            ]
        )
        running = _all_reduced(counts, dist.ReduceOp.SUM, group).cumsum(dim=1).cpu()
        for place, rank in enumerate(ranks):
            digit = int(torch.searchsorted(running[place], rank))
            ranks[place] = rank - (int(running[place, digit - 1]) if digit else 0)
            prefixes[place] = prefixes[place] << width | digit
    return torch.tensor(prefixes, dtype=torch.int32).view(torch.float32).tolist()


def _select(outputs: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The masked-in values of each output, [tokens of this rank]."""
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool (got {mask.dtype})")
    for name in OUTPUTS:
        if name not in outputs:
            raise ValueError(f"the per-token output {name} is missing (got {', '.join(sorted(outputs)) or 'none'})")
        if outputs[name].shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(outputs[name].shape)}, the mask {tuple(mask.shape)}")
    return {name: outputs[name].detach()[mask] for name in OUTPUTS}


def _all_reduced(x: torch.Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None) -> torch.Tensor:
    result = x.clone()
    if group is not None:
        dist.all_reduce(result, op=op, group=group)
    return result


def _divide(total: float, count: float) -> float:
    return total / count if count else torch.nan


class PhaseTimer:
    """Wall-clock seconds by phase on this rank. Devices are not waited for: a phase ends when its calls return."""

    def __init__(
        self, on_enter: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``on_enter`` is told the name of each phase as it begins, so that a display can show it."""
        self._on_enter = on_enter
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inside: str | None = None
        self._since = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside the ``with`` block, also one left by an exception, to phase ``name``.

        Raises RuntimeError inside another phase: the time would count twice.
        """
        if self._inside is not None:
            raise RuntimeError(f"phase {name} begins inside phase {self._inside}")
        self._inside = name
        if self._on_enter is not None:
            self._on_enter(name)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start
            self._inside = None

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last call (or the start) in all, and ``time/<phase>`` of the phases since; starts anew."""
        now = self._clock()
        total, phases = now - self._since, {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._since, self._seconds = now, {}
        return total, phases
