"""What a run leaves behind in its folder: the record of every step, and a sample of its tokens."""

from megatron.rl.run_log.files import METRICS_FILE, TOKENS_FILE, Record, read_metrics
from megatron.rl.run_log.names import METRICS, PHASES, Metric, metrics_page
from megatron.rl.run_log.token_samples import TokenSample, TokenSampleWriter, read_tokens
from megatron.rl.run_log.writer import RunLog

__all__ = [
    "METRICS",
    "METRICS_FILE",
    "PHASES",
    "TOKENS_FILE",
    "Metric",
    "Record",
    "RunLog",
    "TokenSample",
    "TokenSampleWriter",
    "metrics_page",
    "read_metrics",
    "read_tokens",
]
