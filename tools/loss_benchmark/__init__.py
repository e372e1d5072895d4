"""Parts of ``tools/benchmark_loss.py``: the inputs, the paths compared, the measurements and the report."""
