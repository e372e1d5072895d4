"""Gradients of the output projection, summed over chunks of tokens, and their hand-over to autograd and Megatron."""

import torch
import torch.distributed as dist

from megatron.rl.ops.chunking import Rows
from megatron.rl.ops.projection import Projection

# Rows of the weight whose bfloat16 gradient is widened to float32 at a time: 8 MiB at a hidden size of 2048.
_WIDENED_ROWS = 2048


class ProjectionGradients:
    """d_hidden and d_weight, each only where asked for. Chunks must not overlap."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        projection: Projection,
        *,
        needed: tuple[bool, bool],
        tokens: int,
        scaled_later: bool,
    ):
        """
        Args:
            hidden, weight: the op's inputs.
            needed: for hidden and for weight.
            tokens: how many the chunks will hold together.
            scaled_later: the loss's incoming gradient is not known yet, so main_grad cannot be written to.
        """
        for_hidden, for_weight = needed
        one_chunk = tokens <= projection.chunk
        self._true_weight = projection.true_rows(weight)
        self._hidden = _HiddenGradient(hidden, projection) if for_hidden else None
        rows = projection.shard.rows
        self._weight = _WeightGradient(weight, rows, one_chunk, scaled_later) if for_weight else None

    def add(self, rows: Rows, logit_gradients: torch.Tensor, chunk_hidden: torch.Tensor) -> None:
        """Adds a chunk: its tokens, logit gradients [n, columns] and hidden states [n, hidden_size]."""
        if self._hidden is not None:
            self._hidden.add(rows, logit_gradients @ self._true_weight)
        if self._weight is not None:
            self._weight.add(logit_gradients, chunk_hidden)

    def wait(self) -> None:
        """Finishes the communication that is still on its way."""
        if self._hidden is not None:
            self._hidden.wait()

    def deliver(self, scale: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What autograd is to be given for hidden and weight, times the scalar ``scale`` (None: 1). Call it once."""
        self.wait()
        if scale is not None and scale.device.type == "cpu" and scale.item() == 1:
            scale = None  # read only where that does not wait for a device
        hidden = None if self._hidden is None else self._hidden.total
        if hidden is not None and scale is not None:
            hidden.mul_(scale)
        return hidden, None if self._weight is None else self._weight.deliver(scale)


class _HiddenGradient:
    """d_hidden, complete over the ranks that share the vocabulary.

    Each rank's part is summed by an all-reduce per chunk, in float32, that runs while the next chunk is multiplied.
    With sequence parallelism this rank keeps only its slice of the tokens. (A chunk holds whichever tokens have
    weight, so it does not divide into the ranks' slices as a reduce-scatter would need.)
    """

    def __init__(self, hidden: torch.Tensor, projection: Projection):
        self.total = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        self._shard = projection.shard
        self._sliced = projection.sequence_parallel
        self._pending: tuple[Rows, torch.Tensor, dist.Work] | None = None

    def add(self, rows: Rows, part: torch.Tensor) -> None:
        """Sets the gradient of the tokens ``rows``, of which ``part`` [n, hidden_size] is this rank's share."""
        if self._shard.group is None:
            self.total[rows] = part
            return
        part = part.float()
        work = dist.all_reduce(part, group=self._shard.group, async_op=True)
        self.wait()
        self._pending = (rows, part, work)

    def wait(self) -> None:
        if self._pending is None:
            return
        rows, part, work = self._pending
        self._pending = None
        work.wait()
        if self._sliced:
            tokens = self.total.shape[0]
            places = torch.arange(rows.start, rows.stop, device=part.device) if isinstance(rows, slice) else rows
            places = places - self._shard.rank * tokens
            own = (places >= 0) & (places < tokens)
            rows, part = places[own], part[own]
        self.total[rows] = part.to(self.total.dtype)


class _WeightGradient:
    """d_weight, summed over chunks in float32 whatever the inputs' type."""

    def __init__(self, weight: torch.Tensor, rows: int, one_chunk: bool, scaled_later: bool):
        self._weight = weight
        self._rows = rows
        main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
        if main_grad is not None and main_grad.dtype == torch.float32 and not scaled_later:
            self._in_place = True
            self._total = main_grad
        else:
            self._in_place = False
            # One chunk's product arrives in the weight's type; there is nothing to sum it with.
            self._total = torch.empty(
                weight.shape, dtype=weight.dtype if one_chunk else torch.float32, device=weight.device
            )
            self._total[rows:] = 0
        self._empty = not self._in_place  # the true rows hold nothing yet, not even zeros

    def add(self, logit_gradients: torch.Tensor, hidden: torch.Tensor) -> None:
        """Adds logit_gradients^T [columns, n] @ hidden [n, hidden_size]."""
        if self._total.dtype == hidden.dtype:
            total = self._total[: self._rows]
            if self._empty:
                torch.mm(logit_gradients.t(), hidden, out=total)
            else:
                total.addmm_(logit_gradients.t(), hidden)
        else:
            for part in _row_parts(self._rows):
                product = logit_gradients[:, part].t() @ hidden
                if self._empty:
                    self._total[part] = product
                else:
                    self._total[part] += product
        self._empty = False

    def deliver(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        """Hands the sum over: to main_grad where Megatron keeps one, else as the weight's gradient."""
        weight, total = self._weight, self._total
        if self._empty:
            total.zero_()
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            return (total if scale is None else total.mul_(scale)).to(weight.dtype)
        if not self._in_place:
            for part in _row_parts(total.shape[0]):
                if scale is None:
                    main_grad[part] += total[part]
                else:
                    main_grad[part].addcmul_(total[part], scale)
        return _main_grad_placeholder(weight)


def _row_parts(rows: int) -> list[slice]:
    return [slice(first, min(first + _WIDENED_ROWS, rows)) for first in range(0, rows, _WIDENED_ROWS)]


def _main_grad_placeholder(weight: torch.Tensor) -> torch.Tensor | None:
    """Marks the gradient as added to ``weight.main_grad``; returns what autograd is to be given in its place.

    This is megatron-core's convention: its data-parallel hook runs when autograd delivers a gradient, and reads that
    tensor only where ``grad_added_to_main_grad`` is False, or where ``zero_out_wgrad`` says that the weight is tied
    to an embedding whose own gradient arrives in the same tensor.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    tied = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if tied else torch.empty_like(weight)
