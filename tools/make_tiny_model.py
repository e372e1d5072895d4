"""Make the bundled prompts, tokenizer and tiny Qwen3-MoE again, from a seed.

    python tools/make_tiny_model.py --out megatron/rl/assets

The model first learns additions and subtractions from right answers, then from a careless pupil's
answers, of which most have one wrong digit. So it knows the arithmetic (greedy decoding is nearly always
right) but sampling at temperature 1 solves only about a third of the held-out problems: the place from
which reinforcement learning starts. The output is the same bit for bit on one machine.
"""

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

Problem = tuple[str, str]  # prompt, answer

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID = 0, 1
DIGITS = "0123456789"
# 53 entries in all: a prime, so that no parallel layout divides the vocabulary without padding.
VOCABULARY = (*SPECIAL_TOKENS, *DIGITS, *"+-*/=().,?:'", " ", "\n", *"abcdefghijklmnopqrstuvwxyz")
FIRST_DIGIT_ID = VOCABULARY.index("0")

TRAIN_PROMPTS, EVAL_PROMPTS = 4000, 200
MAX_NEW_TOKENS = 6  # three digits, the end, and room for a mistake
CLEAN_STEPS, CARELESS_STEPS, BATCH = 1500, 500, 256
PEAK_LR, WARMUP_STEPS, CLIP_NORM = 3e-3, 100, 1.0
RIGHT_ANSWER_RATE = 0.32  # of the careless pupil
ACCURACY_RANGE = (0.28, 0.40)  # sampled, held-out; outside of it the model is not worth bundling
MIN_EXPERT_SHARE = 0.02  # of all routed tokens; an even load is 1/8
EVAL_SAMPLES = 16


@dataclass(frozen=True)
class Encoded:
    """Problems as tensors: ``ids`` [problems, tokens] is prompt, answer, end, padding."""

    ids: torch.Tensor  # int64 [problems, tokens]
    answer_start: torch.Tensor  # int64 [problems], position of the first answer digit
    answer_digits: torch.Tensor  # int64 [problems], number of answer digits


def make_problems(seed: int) -> list[Problem]:
    """All sums and non-negative differences of two numbers below 100, shuffled."""
    problems = [(f"{a}+{b}=", str(a + b)) for a in range(100) for b in range(100)]
    problems += [(f"{a}-{b}=", str(a - b)) for a in range(100) for b in range(a + 1)]
    random.Random(seed).shuffle(problems)
    return problems


def write_prompts(path: Path, problems: list[Problem]) -> None:
    """Write one JSON object a line: prompt, answer, source."""
    lines = (json.dumps({"prompt": prompt, "answer": answer, "source": "arithmetic"}) for prompt, answer in problems)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character, whose decoding gives back the text exactly."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def make_model(seed: int) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of 0.23 M parameters: 2 layers, 4 heads, 2 key-value heads, 8 experts of which 2 act."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coef=0.01,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    # Nothing is cut off from the distribution that is sampled: a rollout engine may take these as its defaults.
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    return model


def encode(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Tokenise problems for supervised training."""
    prompts = [tokenizer.encode(prompt) for prompt, _ in problems]
    answers = [tokenizer.encode(answer) for _, answer in problems]
    rows = [torch.tensor([*prompt, *answer, EOS_ID]) for prompt, answer in zip(prompts, answers, strict=True)]
    return Encoded(
        ids=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID),
        answer_start=torch.tensor([len(prompt) for prompt in prompts]),
        answer_digits=torch.tensor([len(answer) for answer in answers]),
    )


def draw_batch(data: Encoded, careless: bool, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw (ids, labels), each [BATCH, tokens]; labels are -100 outside answer and end.

    A careless answer has one digit, at a random place, replaced by another one.
    """
    rows = torch.randint(len(data.ids), (BATCH,), generator=generator)
    ids, start, digits = data.ids[rows], data.answer_start[rows], data.answer_digits[rows]
    if careless:
        wrong = torch.rand(BATCH, generator=generator) >= RIGHT_ANSWER_RATE
        place = (start + (torch.rand(BATCH, generator=generator) * digits).long())[:, None]
        shift = torch.randint(1, 10, (BATCH,), generator=generator)[:, None]
        old = ids.gather(1, place)
        new = (old - FIRST_DIGIT_ID + shift) % 10 + FIRST_DIGIT_ID
        ids = ids.scatter(1, place, torch.where(wrong[:, None], new, old))
    position = torch.arange(ids.shape[1])[None]
    in_answer = (position >= start[:, None]) & (position <= (start + digits)[:, None])
    return ids, ids.where(in_answer, -100)


@torch.no_grad()
def sampled_accuracy(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], samples: int
) -> float:
    """The share of right answers among ``samples`` responses a problem, at temperature 1."""
    prompts = tokenizer([prompt for prompt, _ in problems], return_tensors="pt", padding=True)
    right = 0
    for _ in range(samples):
        output = model.generate(
            input_ids=prompts.input_ids, attention_mask=prompts.attention_mask, max_new_tokens=MAX_NEW_TOKENS
        )
        responses = tokenizer.batch_decode(output[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
        right += sum(text == answer for text, (_, answer) in zip(responses, problems, strict=True))
    return right / (samples * len(problems))


@torch.no_grad()
def smallest_expert_share(model: Qwen3MoeForCausalLM, data: Encoded) -> float:
    """The least share of routed tokens that any expert of any layer gets."""
    mask = data.ids != PAD_ID
    output = model(input_ids=data.ids, attention_mask=mask.long(), output_router_logits=True)
    shares = []
    for logits in output.router_logits:  # [problems * tokens, experts]
        chosen = logits[mask.flatten()].topk(model.config.num_experts_per_tok, dim=-1).indices
        load = torch.bincount(chosen.flatten(), minlength=model.config.num_experts)
        shares.append(load.min().item() / load.sum().item())
    return min(shares)


def learning_rate(step: int, total: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / total))
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * (0.05 + 0.95 * cosine)


def train(model: Qwen3MoeForCausalLM, data: Encoded, seed: int) -> None:
    """Supervised training: right answers first, a careless pupil's afterwards."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    total = CLEAN_STEPS + CARELESS_STEPS
    started = time.monotonic()
    for step in range(total):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total)
        ids, labels = draw_batch(data, step >= CLEAN_STEPS, generator)
        # The router's load-balancing loss is part of output.loss.
        output = model(input_ids=ids, labels=labels, attention_mask=(ids != PAD_ID).long(), output_router_logits=True)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if (step + 1) % 100 == 0:
            left = (time.monotonic() - started) / (step + 1) * (total - step - 1)
            answers = "right" if step < CLEAN_STEPS else "careless"
            print(
                f"step {step + 1:4d}/{total}  {answers:8s} answers  loss {output.loss.item():.3f}  {left:3.0f} s left",
                flush=True,
            )


def build(out: Path, seed: int) -> None:
    """Write prompts, tokenizer and model below ``out``.

    Raises:
        RuntimeError: if the accuracy or the router's load is outside the range worth bundling.
    """
    problems = make_problems(seed)
    held_out, learnt = problems[:EVAL_PROMPTS], problems[EVAL_PROMPTS:]
    out.mkdir(parents=True, exist_ok=True)
    write_prompts(out / "arithmetic_train.jsonl", learnt[:TRAIN_PROMPTS])
    write_prompts(out / "arithmetic_eval.jsonl", held_out)

    tokenizer, model = make_tokenizer(), make_model(seed)
    train(model, encode(learnt, tokenizer), seed)
    model.eval()
    torch.manual_seed(seed)
    accuracy = sampled_accuracy(model, tokenizer, held_out, EVAL_SAMPLES)
    share = smallest_expert_share(model, encode(held_out, tokenizer))
    print(f"sampled accuracy {accuracy:.3f} on {len(held_out)} held-out problems; least used expert {share:.1%}")
    if not ACCURACY_RANGE[0] <= accuracy <= ACCURACY_RANGE[1]:
        raise RuntimeError(f"accuracy outside {ACCURACY_RANGE}: change RIGHT_ANSWER_RATE or the seed (got {accuracy})")
    if share < MIN_EXPERT_SHARE:
        raise RuntimeError(f"an expert is nearly dead: change the seed (got a share of {share})")
    folder = out / "tiny_qwen3_moe"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description="Make the bundled prompts and the tiny Qwen3-MoE from a seed.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to, for example megatron/rl/assets")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists() and not args.out.is_dir():
        print(f"--out: {args.out} is a file; name a folder", file=sys.stderr)
        return 2
    # One thread: sums are split over threads, so the number of cores would change the last bits.
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    started = time.monotonic()
    build(args.out, args.seed)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"wrote {args.out} ({size / 1e6:.1f} MB) in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
