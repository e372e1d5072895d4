"""Verdicts on the flags of the loop: what is sampled, scored and trained on, and for how long."""

from megatron.rl.flags.verdict import Theme, acts, holds, refused

_OTHER_LOOP = "it belongs to the training loop of pre-training, and this program has a loop of its own"
_BEFORE = "rollouts are made by the current policy only, a whole batch at a time"
_TRUNCATED = "it truncates the policy that samples, and not the one that is trained"
_ENGINE = "rollouts are made by --rollout-engine, not by Megatron's inference"

LOOP = Theme(
    "Rollouts, batches and length of the run",
    (
        acts("--grpo-prompts-per-step", "prompts of a rollout batch"),
        acts("--grpo-group-size", "responses to each prompt; at least 2"),
        acts("--grpo-iterations", "passes over each rollout batch"),
        acts("--global-batch-size", "responses of one optimizer step; divides the rollout batch"),
        acts("--micro-batch-size", "responses of one forward pass of one rank, where no token budget decides"),
        acts("--max-tokens-per-gpu", "tokens of a micro-batch on one GPU, which then decide the cut"),
        acts("--rl-use-sequence-packing", "several responses in one row"),
        acts("--rl-sequence-packing-max-sequences-per-bin", "most responses of a row", needs="packing"),
        acts(
            "--seq-length",
            "tokens of a pack, where --rl-use-sequence-packing comes without --max-tokens-per-gpu; elsewhere it may "
            "only say what is so: prompt and response limit together",
        ),
        acts("--train-iters", "optimizer steps of the whole run, those before a --load included"),
        acts("--rl-default-temperature", "of sampling; the trainer's log-probabilities use it too"),
        acts("--grpo-filter-groups-with-same-reward", "such groups enter neither the loss nor its denominators"),
        acts("--grpo-entropy-term-weight", "of the policy's entropy, which is added to the objective"),
        acts("--seed", "of the prompts' order and of sampling; at least 1"),
        acts(
            "--exit-interval",
            "ends the run, with a checkpoint, after a multiple of so many optimizer steps",
        ),
        acts("--exit-duration-in-mins", "ends the run, with a checkpoint, after the step in which the time is up"),
        acts("--exit-signal-handler", "ends the run, with a checkpoint, after the step in which a SIGTERM came"),
        acts(
            "--exit-signal",
            "another signal for it",
            needs="signal-handler",
            values=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"),
        ),
        refused("--rl-default-top-p", _TRUNCATED, values=(0, 1)),
        refused("--rl-default-top-k", _TRUNCATED, values=(-1, 0)),
        refused("--grpo-kl-beta", "it needs a reference model, and there is none here", values=(0,)),
        refused("--perform-rl-step", "this program is the RL step"),
        refused("--langrl-env-config", "problems come from --train-prompts, their scorer from --reward"),
        refused("--rl-generation-lag --rl-partial-rollouts", _BEFORE),
        refused("--rl-submission-granularity --rl-consumption-granularity", _BEFORE, values=("B",)),
        refused(
            "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef",
            "the behaviour policy is the engine's own, uncorrected",
        ),
        refused("--rl-sequence-packing-algo", "packs are balanced over the ranks by their tokens"),
        refused("--rl-skip-bos-token", "a prompt has the tokens that its tokenizer gives it"),
        refused(
            "--rl-offload-optimizer-during-inference --rl-kv-cache-management-mode --rl-persist-cuda-graphs "
            "--rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size "
            "--rl-inference-pipeline-model-parallel-size --rl-inference-expert-model-parallel-size "
            "--rl-inference-expert-tensor-model-parallel-size --rl-inference-model-unified-memory-level "
            "--rl-offload-inference-model-weights-when-idle --refit-method --rl-verify-model-weights-swap "
            "--rl-inference-parsers",
            _ENGINE,
        ),
        refused("--rl-profile --rl-profile-dir", "the time of each phase of a step is in metrics.jsonl (time/*)"),
        refused("--train-samples", "use --train-iters, the number of optimizer steps"),
        refused(
            "--rampup-batch-size --step-batch-size-schedule --decrease-batch-size-if-needed",
            "the mini-batch has one size, --global-batch-size",
        ),
        refused("--batch-size", "an old name; use --micro-batch-size"),
        refused(
            "--empty-unused-memory-level --check-weight-hash-across-dp-replicas-interval --gpu-sniff-test-interval "
            "--train-sync-interval --manual-gc --manual-gc-interval --no-manual-gc-eval --iterations-to-skip "
            "--result-rejected-tracker-filename --phase-transition-iterations --distributed-timeout-seconds-after-init "
            "--adlr-autoresume --adlr-autoresume-interval --enable-experimental --vision-pretraining",
            _OTHER_LOOP,
        ),
        refused("--exit-signal-handler-for-dataloader", "there is no data loader"),
        refused("--exit-signal-handler-for-training", "use --exit-signal-handler, which saves a checkpoint first"),
        refused("--te-rng-tracker --inference-rng-tracker", "the policy's passes draw no random numbers"),
        refused("--rerun-mode", "no step is run again", values=("disabled",)),
        refused("--error-injection-rate --error-injection-type --check-for-spiky-loss", "no step is run again"),
        refused("--yaml-cfg", "give the flags on the command line"),
        holds("--use-mcore-models", "the model is Megatron-Core's"),
    ),
)

EVALUATION = Theme(
    "Evaluation",
    (
        acts("--eval-interval", "optimizer steps between evaluations", needs="held-out"),
        acts("--rl-prompts-per-eval", "held-out problems of an evaluation; no more than there are", needs="held-out"),
        acts("--eval-samples", "responses to each", needs="held-out"),
        refused(
            "--eval-iters --start-eval-at-iter --eval-global-batch-size --eval-micro-batch-size --full-validation "
            "--multiple-validation-sets --validation-set-names",
            "held-out problems are evaluated; use --eval-prompts, --eval-interval, --rl-prompts-per-eval and "
            "--eval-samples",
        ),
        refused("--skip-train", "evaluation comes with training"),
        refused("--test-mode", "Megatron's checks at run time do not know the local layers"),
    ),
)

OBJECTIVE = Theme(
    "The loss",
    (
        acts("--loss", "the objective that is maximised"),
        acts("--loss-delta", "its trust-region size", needs="loss-delta"),
        acts("--loss-eps", "its bound on the ratio", needs="loss-eps"),
        acts("--grpo-clamp-eps-lower --grpo-clamp-eps-upper", "its clip range", needs="loss-clip"),
        acts("--no-loss-advantage-weight", "", needs="loss-weight"),
        acts("--loss-normalization", "denominators are over all ranks and micro-batches"),
        acts("--loss-horizon", "the divisor of a response's sum over tokens", needs="loss-horizon"),
        acts("--token-chunk", "tokens whose logits exist at a time"),
        acts("--advantage-std --advantage-leave-one-out --unscored-responses"),
        refused("--calculate-per-token-loss", "use --loss-normalization token-mean"),
        refused(
            "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --fp16-lm-cross-entropy",
            "the loss is computed in chunks inside the output projection, and whole logits never exist",
        ),
        refused(
            "--mtp-num-layers --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads "
            "--mtp-hybrid-override-pattern --mtp-standalone",
            "multi-token prediction has no part in the policy's loss",
        ),
    ),
)

DATA = Theme(
    "Prompts, rewards and the tokenizer",
    (
        acts("--train-prompts --eval-prompts --max-prompt-tokens --max-response-tokens --overlong-prompts"),
        acts("--apply-chat-template --reward --rollout-engine --unscorable-prompts"),
        acts("--rollout-url --weight-sync-dir", needs="servers"),
        acts("--rollout-server-args", needs="own-server"),
        acts("--reward-workers --reward-timeout", needs="workers"),
        refused(
            "--data-path --split --train-data-path --valid-data-path --test-data-path --data-args-path "
            "--per-split-data-args-path --per-dataset-sequences-path --dataloader-fast-cache-load "
            "--dataloader-defer-npy-index-mmap --data-cache-path --no-mmap-bin-files --mock-data --encoder-seq-length "
            "--decoder-seq-length --sample-rate --mask-prob --short-seq-prob --num-workers --reset-position-ids "
            "--reset-attention-mask --dataloader-inter-document-masking --eod-mask-loss "
            "--num-dataset-builder-threads --object-storage-cache-path "
            "--mid-level-dataset-surplus --allow-ambiguous-pad-tokens --fim-data --fim-rate --fim-spm-rate "
            "--fim-split-sample --fim-fragment-rate --fim-no-prefix --fim-prefix-token --fim-middle-token "
            "--fim-suffix-token --fim-pad-token --fim-eod-token --dataloader-type --sft --sft-tokenizer-prompt-format",
            "prompts come from --train-prompts and --eval-prompts",
        ),
        holds("--no-create-attention-mask-in-dataloader", "no attention mask is made from data"),
        refused(
            "--vocab-file --merge-file --vocab-extra-ids --tokenizer-type --tokenizer-model --tokenizer-metadata "
            "--tokenizer-special-tokens --tiktoken-pattern --tiktoken-num-special-tokens "
            "--tokenizer-sentencepiece-legacy --no-tokenizer-sentencepiece-ignore-extra-whitespaces "
            "--tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens --trust-remote-code "
            "--null-tokenizer-eod-id --null-tokenizer-pad-id --chat-template",
            "the tokenizer and its chat template are those in --hf-model",
        ),
        refused("--enable-msc", "folders are local ones"),
        holds("--disable-msc", "folders are local ones"),
    ),
)

OTHER_PROGRAMS = Theme(
    "Megatron's other programs",
    (
        refused(
            "--ict-head-size --biencoder-projection-dim --biencoder-shared-query-context-model --ict-load --bert-load "
            "--titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path "
            "--retriever-report-topk-accuracies --retriever-score-scaling --block-data-path --embedding-path "
            "--indexer-batch-size --indexer-log-interval --bert-no-binary-head",
            "it belongs to retrieval models",
        ),
        refused(
            "--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction --data-per-class-fraction "
            "--no-data-sharding --head-lr-mult --vision-pretraining-type --vision-backbone-type --swin-backbone-type "
            "--mask-type --mask-factor --iter-per-epoch --dino-local-img-size --dino-local-crops-number "
            "--dino-head-hidden-size --dino-bottleneck-size --dino-freeze-last-layer --dino-norm-last-layer "
            "--dino-warmup-teacher-temp --dino-teacher-temp --dino-warmup-teacher-temp-epochs",
            "it belongs to vision models",
        ),
        refused(
            "--logits-save-top-k --logits-save-top-p --logits-save-top-p-min-k --logits-save-dir --logits-save-dtype "
            "--logits-load-dir --logits-load-decode-threads --logits-load-prefetch-factor "
            "--logits-load-msc-prefetch-depth --logits-load-kd-loss-alpha --logits-load-ignore-errors",
            "nothing is distilled",
        ),
        refused(
            "--inference-batch-times-seqlen-threshold --max-tokens-to-oom --output-bert-embeddings "
            "--bert-embedder-type --use-legacy-static-engine --inference-max-requests --inference-max-seq-length "
            "--inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb "
            "--inference-dynamic-batching-paused-buffer-size-gb --inference-dynamic-batching-mamba-memory-ratio "
            "--inference-dynamic-batching-block-size --inference-dynamic-batching-max-requests "
            "--inference-dynamic-batching-max-tokens --inference-dynamic-batching-num-cuda-graphs "
            "--inference-dynamic-batching-track-paused-request-events "
            "--inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs "
            "--inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens "
            "--inference-dynamic-batching-unified-memory-level --enable-chunked-prefill --num-speculative-tokens "
            "--inference-dynamic-batching-prefix-caching "
            "--inference-dynamic-batching-prefix-caching-eviction-policy "
            "--inference-dynamic-batching-prefix-caching-coordinator-policy "
            "--inference-dynamic-batching-prefix-caching-routing-alpha "
            "--inference-dynamic-batching-prefix-caching-mamba-gb "
            "--inference-dynamic-batching-cuda-graph-mixed-prefill-count "
            "--inference-dynamic-batching-cuda-graph-sizing-distribution "
            "--inference-dynamic-batching-sampling-backend --use-same-sampling-seed-across-dp-ranks "
            "--inference-dynamic-batching-async-sched-mode --inference-dynamic-batching-logprobs-mode "
            "--inference-logging-step-interval --inference-text-gen-server-logging --inference-wandb-logging "
            "--inference-coordinator-port --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype "
            "--inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus --inference-shards "
            "--inference-cuda-graph-scope --flash-decode --batch-invariant-mode --symmetric-ar-type "
            "--nccl-all-reduce-for-prefill --inference-fuse-tp-communication --inference-disable-triton-nvls-kernels "
            "--inference-grouped-gemm-backend --inference-moe-disable-fused-quant-kernels "
            "--inference-moe-token-dispatcher-type --moe-pad-experts-for-cuda-graph-inference --mlp-chunks-for-prefill",
            _ENGINE,
        ),
    ),
)
