"""A small sample of a run's tokens with their probabilities, for figures such as the paper's figure 2."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron.rl.errors import OutputError
from megatron.rl.run_log.files import TOKENS_FILE, writing


@dataclass(frozen=True)
class TokenSample:
    """Single tokens of a run, [n] each."""

    step: np.ndarray  # int32, the rollout batch
    logmu: np.ndarray  # float32, nat, by the rollout engine
    logp: np.ndarray  # float32, nat, by the trainer before the step's first update
    stride: int = 1  # only steps that are multiples of it are kept

    @property
    def mu(self) -> np.ndarray:
        """The rollout engine's probability, float64."""
        return np.exp(self.logmu.astype(np.float64))

    @property
    def pi(self) -> np.ndarray:
        """The trainer's probability, float64."""
        return np.exp(self.logp.astype(np.float64))

    @property
    def tv(self) -> np.ndarray:
        """abs(pi - mu), float64 (arXiv 2606.09821 eq. 7)."""
        return np.abs(self.pi - self.mu)


class TokenSampleWriter:
    """Keeps ``tokens.npz`` of a run folder. One rank of the last pipeline stage has it; its own tokens are sampled.

    Of each step at most ``per_step`` tokens are drawn, uniformly and without replacement. When more than ``in_all``
    would be kept, the stride doubles: every second of the kept steps is dropped and only every second (fourth, ...)
    step is added from then on, so that the sample covers the whole run evenly.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        seed: int,
        per_step: int = 2048,
        in_all: int = 65536,
        resume_step: int | None = None,
    ) -> None:
        """``resume_step``: goes on behind that step with the sample that is there; None begins a new one.

        Raises ValueError where ``in_all`` has no room for two steps, and :class:`OutputError` for a sample that is
        to be continued and cannot be read.
        """
        if per_step < 1 or in_all < 2 * per_step:
            raise ValueError(f"per_step must be positive and in_all hold two steps (got {per_step}, {in_all})")
        self._path = Path(run_dir) / TOKENS_FILE
        self._seed = seed
        self._per_step, self._in_all = per_step, in_all
        self._stride = 1
        self._steps: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # step to (logmu, logp)
        if resume_step is not None and self._path.is_file():
            earlier = read_tokens(run_dir)
            self._stride = earlier.stride
            for step in np.unique(earlier.step[earlier.step <= resume_step]).tolist():
                self._steps[step] = (earlier.logmu[earlier.step == step], earlier.logp[earlier.step == step])

    def add(self, step: int, logp: torch.Tensor, logmu: torch.Tensor) -> None:
        """Draws from a step's sampled tokens and writes the file.

        ``logp``, ``logmu`` [tokens]: log-probabilities of this rank's sampled tokens by the trainer, before the step's
        first update, and by the rollout engine. A step without tokens, or one that the stride leaves out, adds nothing.

        Raises ValueError for shapes that do not fit, OutputError where the file cannot be written.
        """
        if logp.shape != logmu.shape or logp.dim() != 1:
            raise ValueError(f"log-probabilities must be [tokens] (got {tuple(logp.shape)} and {tuple(logmu.shape)})")
        tokens = logp.numel()
        if step % self._stride or tokens == 0:
            return
        random = np.random.default_rng((self._seed, step))
        drawn = torch.from_numpy(random.choice(tokens, min(tokens, self._per_step), replace=False)).to(logp.device)
        self._steps[step] = (_array(logmu[drawn]), _array(logp[drawn]))
        while sum(len(logmu) for logmu, _ in self._steps.values()) > self._in_all:
            self._stride *= 2
            self._steps = {step: tokens for step, tokens in self._steps.items() if step % self._stride == 0}
        self._write()

    def _write(self) -> None:
        kept = sorted(self._steps)
        logmu = [self._steps[step][0] for step in kept]
        arrays = {
            "step": np.repeat(np.array(kept, dtype=np.int32), [len(values) for values in logmu]),
            "logmu": np.concatenate([*logmu, np.empty(0, np.float32)]),
            "logp": np.concatenate([*(self._steps[step][1] for step in kept), np.empty(0, np.float32)]),
            "stride": np.array(self._stride),
        }
        replacement = self._path.with_suffix(".part")
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacement.open("wb") as file:
                np.savez(file, **arrays)
            replacement.replace(self._path)


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()


def read_tokens(run_dir: str | Path) -> TokenSample:
    """The token sample of a run folder. Raises :class:`OutputError` where there is none or it cannot be read."""
    path = Path(run_dir) / TOKENS_FILE
    if not path.is_file():
        raise OutputError(f"{run_dir} has no {TOKENS_FILE}; give the folder of a run (--run-dir) that saved its tokens")
    try:
        with np.load(path) as arrays:
            return TokenSample(arrays["step"], arrays["logmu"], arrays["logp"], int(arrays["stride"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise OutputError(f"{path} is no token sample ({error}); remove it") from error
