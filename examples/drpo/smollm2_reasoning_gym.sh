#!/usr/bin/env bash
# A real pretrained model on real problems, on any machine: SmolLM2-135M-Instruct learns to answer sums.
# The model comes from a package, the problems and their verifier from reasoning-gym; both are made at the first start.
#
#   examples/drpo/smollm2_reasoning_gym.sh                      # the whole run
#   examples/drpo/smollm2_reasoning_gym.sh --train-iters 3      # a look: three steps, some minutes on two cores
#
# Flags given here win over the recipe's. PROCESSES sets how many processes share the work (default 1).
set -euo pipefail
cd "$(dirname "$0")/../.."
tools/setup_env.sh
model=runs/assets/smollm2-135m-instruct
problems=runs/assets/chain_sum
settings='{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
[ -f $model/model.safetensors ] || .venv/bin/python tools/make_smollm2.py --out $model
[ -f $problems.eval.jsonl ] || .venv/bin/python tools/make_reasoning_gym_prompts.py --dataset chain_sum \
    --config "$settings" --count 32 --seed 1 --out $problems.eval.jsonl
[ -f $problems.train.jsonl ] || .venv/bin/python tools/make_reasoning_gym_prompts.py --dataset chain_sum \
    --config "$settings" --count 1000 --seed 2 --exclude $problems.eval.jsonl --out $problems.train.jsonl
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
exec .venv/bin/torchrun --standalone --nproc-per-node "${PROCESSES:-1}" pretrain_rl.py \
    --loss drpo --hf-model $model \
    --train-prompts $problems.train.jsonl --eval-prompts $problems.eval.jsonl \
    --reward reasoning-gym --max-prompt-tokens 64 --max-response-tokens 16 \
    --grpo-prompts-per-step 8 --grpo-group-size 8 --global-batch-size 64 --micro-batch-size 16 \
    --lr 1e-5 --train-iters 100 --eval-interval 20 --rl-prompts-per-eval 32 --eval-samples 2 \
    --run-dir runs/smollm2 "$@"
