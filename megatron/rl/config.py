"""Frozen configurations of the RL stage. No torch here: a launcher or a linter may import this file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which per-token objective is maximised, and its trust region."""

    name: str = "drpo"
    delta: float = 12.5  # trust-region size of drpo, drpo-topk, dppo, kl, k3, tv and the mask-* family
    eps: float = 0.2  # ratio bound of spo
    eps_low: float = 0.2  # lower clip of grpo and gspo
    eps_high: float = 0.28  # upper clip of grpo and gspo
    advantage_weight: bool = True  # weight the regulariser by abs(advantage)


@dataclass(frozen=True)
class SamplingConfig:
    """How a rollout engine samples. top_p = 1 and top_k = 0 mean: no truncation."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class RolloutConfig:
    """Where responses come from."""

    engine: str = "hf"  # transformers inside the trainer's processes; or "vllm", "sglang": servers
    urls: tuple[str, ...] = ()  # servers to join; without any, one is started
    server_args: tuple[str, ...] = ()  # further arguments of the server that is started
    sync_dir: str | None = None  # weights are handed to servers by files in it


@dataclass(frozen=True)
class AdvantageConfig:
    """Group-relative advantages: reward minus the group's mean, with two options."""

    normalize_std: bool = False  # divide by the group's standard deviation
    leave_one_out: bool = False  # baseline from the other members of the group only
    unscored: str = "zero"  # a timed-out or failed scoring counts as score 0; or "exclude": it is left out
    filter_flat_groups: bool = False  # groups without signal enter neither the loss nor its denominators


@dataclass(frozen=True)
class LossNormalizationConfig:
    """How per-token objectives become one number; denominators are global over data-parallel ranks."""

    mode: str = "seq-mean-token-sum-norm"  # or "token-mean"
    horizon: int | None = None  # tokens; the fixed divisor of seq-mean-token-sum-norm


@dataclass(frozen=True)
class RewardConfig:
    """Which reward scores a response, and in how many worker processes, with which deadline."""

    name: str = "math-verify"
    workers: int = 2
    timeout_s: float = 5.0


@dataclass(frozen=True)
class DataConfig:
    """Which prompts are trained and evaluated on, and their limits in tokens."""

    train_prompts: str
    eval_prompts: str | None
    max_prompt_tokens: int
    max_response_tokens: int
    overlong_prompts: str = "error"  # or "skip": leave them out and count them
    unscorable_prompts: str = "keep"  # or "skip": leave out those whose own right answer does not score; told anyway
    apply_chat_template: bool = False  # to plain text too; lists of messages always go through it


@dataclass(frozen=True)
class BatchingConfig:
    """How the mini-batch of an optimizer step is cut into micro-batches. Nothing that is learned depends on it."""

    micro_batch_size: int  # responses of one forward pass of one rank, where no token budget decides
    token_budget: int | None = None  # most tokens of a micro-batch, padding and all context-parallel ranks included
    packed: bool = False  # responses one after another in one row, instead of a row each
    max_sequences_per_bin: int | None = None  # packed: most responses of a micro-batch
    sequence_multiple: int = 1  # packed: tokens of each response are padded to a multiple of it
    total_multiple: int = 1  # tokens of a row are
    count_multiple: int = 1  # micro-batches of a rank are a multiple of it
    uniform: bool = False  # all micro-batches of an optimizer step have one shape


@dataclass(frozen=True)
class TrainerConfig:
    """The loop: sizes of a rollout batch and its mini-batches, evaluation, seeds, output."""

    prompts_per_step: int
    group_size: int
    iterations: int  # epochs over each rollout batch
    mini_batch_size: int  # responses of one optimizer step, over all data-parallel ranks
    train_iters: int  # optimizer steps of the whole run
    seed: int
    eval_interval: (
        int  # optimizer steps between evaluations; there is one before the first and after the last in any case
    )
    save_interval: int  # optimizer steps between checkpoints; there is one after the last in any case
    eval_prompts: int
    eval_samples: int  # responses a prompt in evaluation
    run_dir: str
    tensorboard_dir: str
    entropy_coeff: float = 0.0
    token_chunk: int | None = None

    @property
    def iterations_per_step(self) -> int:
        """Optimizer steps taken on one rollout batch."""
        return self.prompts_per_step * self.group_size * self.iterations // self.mini_batch_size

    def steps_in_all(self, step: int = 0, iteration: int = 0) -> int:
        """Rollout batches of the whole run, where ``step`` of them, with ``iteration`` optimizer steps, are behind."""
        return step + (self.train_iters - iteration) // self.iterations_per_step


@dataclass(frozen=True)
class RunConfig:
    """Everything that the loop reads, resolved once from the command line."""

    objective: ObjectiveConfig
    sampling: SamplingConfig
    advantage: AdvantageConfig
    normalization: LossNormalizationConfig
    reward: RewardConfig
    data: DataConfig
    batching: BatchingConfig
    trainer: TrainerConfig
    hf_model: str
    bf16: bool = False
    rollout: RolloutConfig = RolloutConfig()
    fp8_format: str | None = None
    fp8_recipe: str | None = None
