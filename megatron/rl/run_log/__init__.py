"""What a run leaves behind in its folder: the record of every step, and a sample of its tokens."""

from megatron.rl.run_log.files import (
    CHECKPOINTS_FOLDER,
    EXPORT_FOLDER,
    METRICS_FILE,
    PLOTS_FOLDER,
    TENSORBOARD_FOLDER,
    TOKENS_FILE,
    Record,
    read_metrics,
)
from megatron.rl.run_log.folder import Places, check_places, hold_places
from megatron.rl.run_log.names import METRICS, PHASES, Metric, metrics_page
from megatron.rl.run_log.token_samples import TokenSample, TokenSampleWriter, read_tokens
from megatron.rl.run_log.writer import RunLog

__all__ = [
    "CHECKPOINTS_FOLDER",
    "EXPORT_FOLDER",
    "METRICS",
    "METRICS_FILE",
    "PHASES",
    "PLOTS_FOLDER",
    "TENSORBOARD_FOLDER",
    "TOKENS_FILE",
    "Metric",
    "Places",
    "Record",
    "RunLog",
    "TokenSample",
    "TokenSampleWriter",
    "check_places",
    "hold_places",
    "metrics_page",
    "read_metrics",
    "read_tokens",
]
