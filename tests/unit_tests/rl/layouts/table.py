"""The parallel layouts that must all give one process's numbers, by the flags that ask for them."""

from dataclasses import dataclass

DENSE = "llama-tied"  # 4 layers, 4 heads in 4 groups, a tied embedding
MOE = "qwen3-moe-every-second"  # 4 layers, 2 of them with 4 experts, 2 key-value groups

_SHORT = {
    "TP": "--tensor-model-parallel-size",
    "PP": "--pipeline-model-parallel-size",
    "CP": "--context-parallel-size",
    "EP": "--expert-model-parallel-size",
    "ETP": "--expert-tensor-parallel-size",
}
_WORDS = {
    "SP": ("--sequence-parallel",),
    "VPP": ("--num-layers-per-virtual-pipeline-stage", "1"),
    "packed": ("--rl-use-sequence-packing", "--max-tokens-per-gpu", "32"),
    "tokens": ("--max-tokens-per-gpu", "32"),  # rows, cut by the budget
    "plain-optimizer": ("--no-use-distributed-optimizer",),
    "z-loss": ("--moe-z-loss-coeff", "0.1"),
    "recompute-all": ("--recompute-granularity", "full"),
    "recompute-some": ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp"),
    "recompute-experts": ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "moe"),
}


@dataclass(frozen=True)
class Layout:
    """A case of the table: processes, model, and words such as ``TP2`` or ``packed``."""

    processes: int
    model: str
    words: str

    @property
    def flags(self) -> list[str]:
        """On the command line."""
        flags: list[str] = []
        for word in self.words.split():
            name = word.rstrip("0123456789")
            flags += _WORDS[word] if word in _WORDS else (_SHORT[name], word[len(name) :])
        return flags

    @property
    def alone(self) -> "Layout":
        """One process with the same loss."""
        return Layout(1, self.model, " ".join(word for word in self.words.split() if word == "z-loss"))

    def __str__(self) -> str:
        return f"{self.processes} {'dense' if self.model == DENSE else 'moe'} {self.words}"


ALONE = [Layout(1, DENSE, ""), Layout(1, MOE, ""), Layout(1, MOE, "z-loss")]

LAYOUTS = [
    *(Layout(1, model, words) for model in (DENSE, MOE) for words in ("packed", "tokens", "recompute-all")),
    Layout(1, DENSE, "recompute-some"),
    Layout(1, MOE, "recompute-experts"),
    # two processes: each kind of parallelism alone
    Layout(2, DENSE, "TP2"),
    Layout(2, DENSE, "TP2 SP"),
    Layout(2, MOE, "TP2 SP ETP1"),
    Layout(2, MOE, "TP2 SP ETP2"),
    *(Layout(2, model, words) for model in (DENSE, MOE) for words in ("", "plain-optimizer", "packed", "tokens")),
    *(Layout(2, model, words) for model in (DENSE, MOE) for words in ("PP2", "PP2 VPP", "PP2 packed", "PP2 tokens")),
    *(Layout(2, model, words) for model in (DENSE, MOE) for words in ("CP2", "CP2 packed")),
    Layout(2, DENSE, "CP2 recompute-some"),
    Layout(2, MOE, "EP2 recompute-experts"),
    Layout(2, DENSE, "PP2 VPP packed recompute-all"),
    *(Layout(2, MOE, words) for words in ("EP2", "EP2 packed", "EP2 tokens", "CP2 EP2 packed recompute-all")),
    *(Layout(1, MOE, f"{words} z-loss") for words in ("packed", "tokens", "recompute-all")),
    *(
        Layout(2, MOE, f"{words} z-loss")
        for words in ("packed", "PP2 VPP", "CP2", "CP2 packed", "EP2 tokens", "TP2 SP ETP1")
    ),
    # four: combinations
    Layout(4, DENSE, "TP4"),
    Layout(4, DENSE, "TP4 SP packed"),
    *(Layout(4, DENSE, words) for words in ("TP2 PP2", "TP2 PP2 packed", "TP2 PP2 tokens")),
    Layout(4, DENSE, "TP2 SP CP2"),
    Layout(4, DENSE, "TP2 SP CP2 packed"),
    Layout(4, DENSE, "CP4 packed"),
    Layout(4, DENSE, "PP2 CP2 packed"),
    Layout(4, MOE, "EP2 ETP2"),
    Layout(4, MOE, "TP2 SP EP2 ETP1"),
    Layout(4, MOE, "TP2 SP EP2 ETP2 packed"),
    Layout(4, MOE, "TP2 SP PP2"),
    Layout(4, MOE, "TP2 SP CP2"),
    Layout(4, MOE, "EP4 packed"),
    Layout(4, MOE, "EP2 CP2"),
    Layout(4, MOE, "PP2 EP2 packed"),
    Layout(4, MOE, "TP2 SP PP2 packed z-loss"),
    Layout(4, MOE, "TP2 SP EP2 CP2 ETP1 z-loss"),
]

LARGE = [
    Layout(8, DENSE, "TP2 SP PP2 CP2 packed"),
    Layout(8, MOE, "TP2 SP PP2 EP2 CP2"),
    Layout(8, MOE, "TP2 SP PP2 EP2 CP2 ETP1 packed"),
    Layout(8, MOE, "TP2 SP PP2 VPP EP2 CP2 ETP1 packed"),
]
