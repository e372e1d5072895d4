"""Gradients of the output projection, summed over chunks of tokens, and their hand-over to autograd and Megatron."""

import torch
import torch.distributed as dist

from megatron.rl.ops.buffers import large_buffer
from megatron.rl.ops.chunking import Chunk, Exchange, Plan, Rows
from megatron.rl.ops.collectives import finish
from megatron.rl.ops.projection import Projection

# Rows of the weight whose bfloat16 gradient is widened and added at a time, so that it is still in a cache; a GPU
# wants few large launches instead.
_WIDENED_ROWS = {"cpu": 1024, "cuda": 1 << 15}


class ProjectionGradients:
    """d_hidden and d_weight, each only where asked for. Chunks must not overlap."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        projection: Projection,
        plan: Plan,
        *,
        needed: tuple[bool, bool],
        final: bool,
    ):
        """
        Args:
            hidden, weight: the op's inputs.
            plan: the chunks that will be added.
            needed: for hidden and for weight.
            final: what is added needs no further factor, so it may go straight into ``weight.main_grad``. Otherwise
                the loss's incoming gradient is not known yet.
        """
        for_hidden, for_weight = needed
        self._true_weight = projection.true_rows(weight)
        self._hidden = _HiddenGradient(hidden, projection) if for_hidden else None
        one_chunk = len(plan.chunks) <= 1
        self._weight = _WeightGradient(weight, projection.shard.rows, one_chunk, final) if for_weight else None

    def add(self, chunk: Chunk, logit_gradients: torch.Tensor, chunk_hidden: torch.Tensor) -> None:
        """Adds a chunk's logit gradients [n, columns]; its hidden states are ``chunk_hidden`` [n, hidden_size]."""
        if self._hidden is not None:
            self._hidden.add(chunk, logit_gradients, self._true_weight)
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

    The ranks' parts are summed chunk by chunk in float32, while the next chunk is multiplied: by an all-reduce, or
    with sequence parallelism by a reduce-scatter, since each rank then keeps its own tokens' alone.
    """

    def __init__(self, hidden: torch.Tensor, projection: Projection):
        self.total = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        self._shard = projection.shard
        self._pending: tuple[Rows, torch.Tensor, list[torch.Tensor], dist.Work] | None = None

    def add(self, chunk: Chunk, logit_gradients: torch.Tensor, weight: torch.Tensor) -> None:
        """Sets the gradient of the chunk's tokens; logit_gradients [n, columns] @ weight is this rank's part of it."""
        if self._shard.group is None:
            self.total[chunk.rows] = logit_gradients @ weight
            return
        part = _float32_product(logit_gradients, weight)
        if chunk.exchange is not None:
            self._scatter(chunk.exchange, part)
        else:
            work = dist.all_reduce(part, group=self._shard.group, async_op=True)
            self._queue(chunk.rows, part, [], work)

    def _scatter(self, exchange: Exchange, part: torch.Tensor) -> None:
        if exchange.places is None:
            sent = part
        else:
            sent = torch.zeros(self._shard.size * exchange.width, part.shape[1], device=part.device)
            sent[exchange.places] = part
        received = sent.new_empty(exchange.width, part.shape[1])
        work = dist.reduce_scatter_tensor(received, sent, group=self._shard.group, async_op=True)
        self._queue(exchange.own, received, [sent], work)

    def _queue(self, rows: Rows, result: torch.Tensor, keep_alive: list[torch.Tensor], work: dist.Work) -> None:
        self.wait()
        self._pending = (rows, result, keep_alive, work)

    def wait(self) -> None:
        if self._pending is None:
            return
        rows, result, sent, work = self._pending
        self._pending = None
        finish(work, result, *sent)
        count = rows.stop - rows.start if isinstance(rows, slice) else rows.shape[0]
        self.total[rows] = result[:count].to(self.total.dtype)


class _WeightGradient:
    """d_weight, summed over chunks in float32 whatever the inputs' type."""

    def __init__(self, weight: torch.Tensor, rows: int, one_chunk: bool, final: bool):
        self._weight = weight
        self._rows = rows
        main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
        if main_grad is not None and main_grad.dtype == torch.float32 and final:
            self._in_place = True
            self._total = main_grad
        else:
            self._in_place = False
            # One chunk's product arrives in the weight's type; there is nothing to sum it with.
            dtype = weight.dtype if one_chunk else torch.float32
            self._total = large_buffer(tuple(weight.shape), dtype, weight.device)
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
            self._add_widened(logit_gradients, hidden)
        self._empty = False

    def _add_widened(self, logit_gradients: torch.Tensor, hidden: torch.Tensor) -> None:
        """The same for bfloat16 inputs and a float32 total."""
        parts = _row_parts(self._rows, self._total.device)
        product, wide = (
            torch.empty(_WIDENED_ROWS[self._total.device.type], hidden.shape[1], dtype=dtype, device=hidden.device)
            for dtype in (hidden.dtype, torch.float32)
        )
        for part in parts:
            count = part.stop - part.start
            torch.mm(logit_gradients[:, part].t(), hidden, out=product[:count])
            if self._empty:
                self._total[part] = product[:count]
            else:
                # Widened first: on a CPU an addition of mixed types takes three times as long.
                self._total[part] += wide[:count].copy_(product[:count])

    def deliver(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        """Hands the sum over: to main_grad where Megatron keeps one, else as the weight's gradient."""
        weight, total = self._weight, self._total
        if self._empty:
            total.zero_()
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            return (total if scale is None else total.mul_(scale)).to(weight.dtype)
        if not self._in_place:
            for part in _row_parts(total.shape[0], total.device):
                if scale is None:
                    main_grad[part] += total[part].float()
                else:
                    main_grad[part].addcmul_(total[part].float(), scale)
        return _main_grad_placeholder(weight)


def _float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [n, k] @ b [k, m] in float32: parts of a sum, rounded to bfloat16 each, would lose more than the sum itself."""
    if a.dtype == torch.float32:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    # PyTorch has no such product of bfloat16 on CPUs. Several times slower, but on several ranks only.
    product = torch.zeros(a.shape[0], b.shape[1])
    for part in _row_parts(b.shape[0], b.device):
        product.addmm_(a[:, part].float(), b[part].float())
    return product


def _row_parts(rows: int, device: torch.device) -> list[slice]:
    step = _WIDENED_ROWS[device.type]
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


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
