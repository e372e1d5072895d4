"""Large buffers are ordinary tensors."""

import pytest
import torch

from megatron.rl.ops.buffers import large_buffer


@pytest.mark.parametrize("shape", [(0, 5), (3, 5), (1024, 1024), (2049, 1031)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffer_can_be_written_and_read(shape, dtype):
    buffer = large_buffer(shape, dtype, torch.device("cpu"))
    assert buffer.shape == shape and buffer.dtype == dtype and buffer.is_contiguous()
    buffer.fill_(3)
    assert (buffer == 3).all()
