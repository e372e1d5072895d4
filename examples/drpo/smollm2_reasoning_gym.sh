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
[ -f $model/model.safetensors ] || .venv/bin/python tools/make_smollm2.py --out $model
for part in train:2000:1 eval:64:2; do
    IFS=: read -r name count seed <<< "$part"
    [ -f $problems.$name.jsonl ] || .venv/bin/python tools/make_reasoning_gym_prompts.py \
        --dataset chain_sum --count "$count" --seed "$seed" --out $problems.$name.jsonl
done
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
exec .venv/bin/torchrun --standalone --nproc-per-node "${PROCESSES:-1}" pretrain_rl.py \
    --loss drpo --hf-model $model \
    --train-prompts $problems.train.jsonl --eval-prompts $problems.eval.jsonl \
    --reward reasoning-gym --apply-chat-template \
    --max-prompt-tokens 96 --max-response-tokens 32 \
    --grpo-prompts-per-step 8 --grpo-group-size 8 --global-batch-size 64 --micro-batch-size 16 \
    --lr 1e-5 --train-iters 100 --eval-interval 20 --rl-prompts-per-eval 32 --eval-samples 2 \
    --run-dir runs/smollm2 "$@"
