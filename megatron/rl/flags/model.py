"""Verdicts on the flags of the model: its architecture, its experts, and how its layers are computed."""

from megatron.rl.flags.verdict import Theme, acts, from_model, holds, refused

_ARCHITECTURE = "the architecture is that of --hf-model; supported are Llama, Qwen2, Qwen3 and Qwen3-MoE"
_OTHER_POLICY = "the engine samples without it, so that engine and trainer would be two policies"
_UNTRIED = "it has not been tried with the maps between Hugging Face's weights and Megatron's"

ARCHITECTURE = Theme(
    "Architecture and weights",
    (
        acts("--hf-model", "a Hugging Face checkpoint folder: architecture, weights and tokenizer"),
        from_model(
            "--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention "
            "--num-query-groups --kv-channels --vocab-size --max-position-embeddings --position-embedding-type "
            "--rotary-base --rotary-percent --rotary-interleaved --rotary-seq-len-interpolation-factor "
            "--use-rope-scaling --rope-scaling-factor --untie-embeddings-and-output-weights --normalization "
            "--norm-epsilon --apply-layernorm-1p --apply-residual-connection-post-layernorm --swiglu "
            "--disable-bias-linear --add-qkv-bias --qk-layernorm",
        ),
        from_model("--hidden-dropout --attention-dropout", "0: the policy that is trained is the one that samples"),
        from_model(
            "--num-experts --moe-layer-freq --moe-ffn-hidden-size --moe-router-topk --moe-router-pre-softmax "
            "--moe-router-score-function --moe-router-topk-scaling-factor --moe-router-num-groups "
            "--moe-router-group-topk --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size",
        ),
        holds("--use-rotary-position-embeddings --no-position-embedding", "positions are rotary"),
        refused("--rope-type", _ARCHITECTURE, values=("rope",)),
        refused("--softmax-type", _ARCHITECTURE, values=("vanilla",)),
        refused(
            "--encoder-num-layers --decoder-num-layers --window-size --window-attn-skip-freq "
            "--yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow "
            "--yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int "
            "--relative-attention-num-buckets --relative-attention-max-distance --no-rope-freq --openai-gelu "
            "--squared-relu --quick-geglu --onnx-safe --glu-linear-offset --activation-func-clamp-value --qk-l2-norm "
            "--attention-output-gate --multi-latent-attention --experimental-attention-variant --dsa-indexer-n-heads "
            "--dsa-indexer-head-dim --dsa-indexer-topk --dsa-indexer-topk-freq --dsa-indexer-skip-topk-offset "
            "--dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss --dsa-kernel-backend "
            "--dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu "
            "--dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32 --linear-conv-kernel-dim --linear-key-head-dim "
            "--linear-value-head-dim --linear-num-key-heads --linear-num-value-heads --linear-attention-freq "
            "--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rotary-scaling-factor "
            "--mscale --mscale-all-dim --cache-mla-latents --mla-down-proj-fusion --mrope-section --is-hybrid-model "
            "--mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads --disable-mamba-mem-eff-path "
            "--mamba-training-ssm-states-dtype --hybrid-layer-pattern --hybrid-override-pattern --spec "
            "--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json --moe-latent-size "
            "--moe-shared-expert-gate --moe-shared-expert-overlap --moe-shared-expert-glu-interleave-size "
            "--moe-mlp-glu-interleave-size --moe-apply-probs-on-input --use-fused-weighted-squared-relu",
            _ARCHITECTURE,
        ),
        refused(
            "--use-mup --mup-width-mult --mup-base-hidden-size --mup-embedding-mult --mup-output-mult "
            "--mup-base-head-dim --mup-attn-scale-power --init-method-std --embedding-init-method-std "
            "--init-method-xavier-uniform --init-model-with-meta-device --data-parallel-random-init",
            "weights come from --hf-model or --load, and none are drawn",
        ),
        acts(
            "--no-initialization --use-cpu-initialization", "what is skipped, or made on the CPU, is read over anyway"
        ),
        acts("--make-vocab-size-divisible-by", "rows that pad the embedding are no tokens: they are never sampled"),
        refused(
            "--padded-vocab-size --no-pad-vocab-size",
            "the embedding is padded by --make-vocab-size-divisible-by and tensor parallelism",
        ),
        refused("--freeze-all-layers", "nothing would be trained"),
    ),
)

_BALANCING = (
    "Megatron's balancing losses are products of means over a micro-batch, so that what is learned would depend on "
    "how a mini-batch is cut; --moe-z-loss-coeff does not"
)
EXPERTS = Theme(
    "Experts",
    (
        refused("--moe-router-load-balancing-type", _BALANCING, values=("none",)),
        refused("--moe-aux-loss-coeff", _BALANCING),
        acts("--moe-z-loss-coeff", "a mean over all tokens of the mini-batch, padding left out", needs="experts"),
        acts("--moe-router-dtype", "fp32 where it is left out", needs="experts"),
        acts("--moe-token-dispatcher-type", "alltoall where it is left out", needs="experts"),
        acts("--moe-layer-recompute", "", needs="experts"),
        acts("--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion", "", needs="experts te"),
        acts(
            "--moe-router-padding-for-quantization --moe-router-padding-for-fp8",
            "",
            needs="experts fp8 te",
        ),
        acts(
            "--moe-enable-deepep --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms --moe-deepep-num-sms "
            "--moe-hybridep-num-sms --moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute "
            "--moe-hybridep-num-sms-preprocessing --moe-permute-fusion-into-hybridep "
            "--moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-static-shape --moe-ncclep-zero-copy",
            "",
            needs="experts gpu flex",
        ),
        refused("--moe-input-jitter-eps --moe-router-force-load-balancing --moe-router-force-biased", _OTHER_POLICY),
        refused(
            "--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy "
            "--moe-expert-rank-capacity-factor",
            _OTHER_POLICY,
        ),
        refused(
            "--moe-router-bias-update-rate --moe-router-quantile-balancing-ema",
            "the router of a supported model has no bias",
        ),
        refused("--moe-enable-routing-replay", "the engine's choice of experts is not replayed"),
        refused(
            "--moe-per-layer-logging --save-tokens-per-expert-interval --moe-routing-trace-path "
            "--moe-routing-trace-max-training-iters --moe-routing-trace-capture-logits "
            "--moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights",
            "what the router does is not recorded",
        ),
        refused("--moe-use-upcycling --moe-upcycling-granularity", "start from a checkpoint that has experts"),
        refused("--moe-single-grouped-weight --moe-single-grouped-bias --use-grouped-gemm-for-shared-expert", _UNTRIED),
        refused(
            "--moe-paged-stash --moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda "
            "--moe-paged-stash-buffer-size-factor-cpu",
            "activations stay where they are; use --recompute-granularity",
        ),
    ),
)

LAYERS = Theme(
    "How layers are computed",
    (
        acts(
            "--transformer-impl",
            "local on CPUs and without Transformer Engine",
            values=("local", "transformer_engine"),
        ),
        acts("--attention-backend", "", needs="te", values=("auto", "flash", "fused", "unfused")),
        acts("--flash-attention-version", "", needs="te"),
        acts(
            "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
            "--no-persist-layer-norm --no-gradient-accumulation-fusion",
            "the local layers have none of these fusions in any case",
        ),
        acts("--disable-jit-fuser --deterministic-mode --no-clone-scatter-output-in-embedding"),
        acts("--mlp-chunks-for-training"),
        acts("--recompute-granularity"),
        acts("--recompute-activations", "an old name of --recompute-granularity selective"),
        acts("--recompute-method --recompute-num-layers", "uniform, 1 where they are left out", needs="recompute-all"),
        acts("--recompute-modules", "core_attn where it is left out", needs="recompute-some"),
        acts("--distribute-saved-activations", "", needs="recompute-all tp"),
        holds("--no-bias-gelu-fusion", "the activation is gated SiLU"),
        holds("--attention-softmax-in-fp32", "it is in float32 always"),
        refused("--checkpoint-activations", "an old name; use --recompute-granularity"),
        refused("--use-flash-attn", "it does nothing in Megatron; use --attention-backend flash"),
        refused("--apply-query-key-layer-scaling", "it is for fp16; the softmax is in float32 always"),
        refused("--qk-clip --qk-clip-alpha --qk-clip-threshold", "weights change by the optimizer's steps alone"),
        refused("--fused-residual-rmsnorm --use-te-activation-func --use-kitchen-attention", _UNTRIED),
        refused("--kitchen-attention-backend", _UNTRIED),
        refused("--use-transformer-engine-op-fuser --use-grouped-gemm-for-dense-mlp", _UNTRIED),
        refused(
            "--enable-cuda-graph --external-cuda-graph --cuda-graph-impl --cuda-graph-warmup-steps "
            "--cuda-graph-scope --cuda-graph-modules --optimizer-cuda-graph",
            "the shapes of micro-batches change from step to step",
        ),
        refused(
            "--cpu-offloading-num-layers --cpu-offloading-retain-pinned-cpu-buffers "
            "--fine-grained-activation-offloading --offload-modules --min-offloaded-tensor-size "
            "--delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks --activation-offload-fraction "
            "--fine-grained-offloading-max-inflight-offloads",
            "activations stay where they are; use --recompute-granularity",
        ),
    ),
)

THEMES = (ARCHITECTURE, EXPERTS, LAYERS)
