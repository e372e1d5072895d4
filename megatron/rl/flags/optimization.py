"""Verdicts on the flags of the optimizer, its schedules and of precision."""

from megatron.rl.flags.verdict import Theme, acts, holds, refused

OPTIMIZER = Theme(
    "Optimizer and schedules",
    (
        acts("--lr", "1e-6 where it is left out (3e-4 with the bundled model)"),
        acts("--lr-decay-style", "constant where it is left out"),
        acts("--min-lr", "", needs="decay"),
        acts("--lr-decay-iters", "optimizer steps; --train-iters where it is left out", needs="horizon"),
        acts("--lr-wsd-decay-style --lr-wsd-decay-iters", "", needs="wsd"),
        acts("--lr-warmup-iters --lr-warmup-fraction", "optimizer steps, or a share of --lr-decay-iters"),
        acts("--lr-warmup-init", "", needs="warmup"),
        acts("--decoupled-lr", "of embedding and output projection"),
        acts("--decoupled-min-lr", "", needs="decoupled decay"),
        acts("--weight-decay", "", needs="constant-weight-decay"),
        acts("--weight-decay-incr-style"),
        acts("--start-weight-decay --end-weight-decay", "", needs="weight-decay-schedule"),
        acts("--apply-wd-to-qk-layernorm", "", needs="qk-norm"),
        acts("--no-weight-decay-cond-type", "an old name of --apply-wd-to-qk-layernorm", needs="qk-norm"),
        acts("--clip-grad --adam-beta1 --adam-beta2 --adam-eps"),
        acts(
            "--no-use-distributed-optimizer --use-distributed-optimizer",
            "optimizer state is shared out over data-parallel ranks unless it is switched off",
        ),
        refused("--optimizer", "the optimizer is Adam, with decoupled weight decay", values=("adam",)),
        refused(
            "--sgd-momentum --muon-momentum --muon-no-split-qkv --muon-nesterov --muon-scale-mode "
            "--muon-fp32-matmul-prec --muon-coefficient-type --muon-num-ns-steps --muon-tp-mode "
            "--muon-extra-scale-factor --muon-scalar-optimizer --lion-beta1 --lion-beta2 "
            "--no-use-layer-wise-param-layout",
            "the optimizer is Adam",
        ),
        refused(
            "--lr-decay-samples --lr-wsd-decay-samples --lr-warmup-samples",
            "schedules count optimizer steps: use the flag that ends in -iters",
        ),
        refused("--warmup", "an old name; use --lr-warmup-fraction"),
        refused(
            "--optimizer-cpu-offload --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload "
            "--overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --dump-param-to-param-group-map",
            "optimizer state stays beside the weights; share it out over more ranks",
        ),
        refused("--use-precision-aware-optimizer", "gradients and optimizer state are in float32"),
        refused(
            "--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
            "gradients and optimizer state are in float32",
            values=("fp32",),
        ),
    ),
)

PRECISION = Theme(
    "Precision",
    (
        acts("--bf16", "weights and activations; log-probabilities and the loss stay in float32"),
        acts("--grad-reduce-in-bf16", "", needs="bf16"),
        acts(
            "--loss-scale",
            "a constant factor of the loss that the gradient is divided by again; an update whose gradient is then not "
            "finite is skipped and counted",
            needs="scaler",
        ),
        acts(
            "--no-check-for-nan-in-loss-and-grad",
            "a gradient that is not finite does not end the run: its update is skipped and counted",
            needs="scaler",
        ),
        acts("--check-for-large-grads", "a gradient far above those before ends the run"),
        acts("--disable-bf16-reduced-precision-matmul", "", needs="bf16 gpu"),
        acts("--fp8-format", "through Transformer Engine on GPUs, emulated elsewhere"),
        acts(
            "--fp8-recipe",
            "tensorwise where it is left out, the only one that is emulated",
            needs="fp8",
            values=("tensorwise", "delayed", "mxfp8", "blockwise"),
        ),
        acts("--fp8-margin --fp8-amax-history-len --fp8-amax-compute-algo", "", needs="te fp8-delayed"),
        acts("--no-fp8-wgrad --first-last-layers-bf16", "", needs="fp8 te"),
        acts("--num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16", "", needs="fp8 te bf16-layers"),
        holds("--accumulate-allreduce-grads-in-fp32", "gradients are, unless --grad-reduce-in-bf16 is given"),
        refused("--fp16", "use --bf16, or neither for float32"),
        refused(
            "--initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis",
            "it is for fp16; use --loss-scale",
        ),
        refused("--fp32-residual-connection", "the residual stream has the precision of the weights"),
        refused("--fp8-interval", "it does nothing in Transformer Engine"),
        refused("--fp8-output-proj", "the output projection is part of the loss and stays in high precision"),
        refused(
            "--fp8-quantizer-factory --te-precision-config-file", "a recipe is one of those that --fp8-recipe names"
        ),
        refused("--fp4-format --fp4-recipe --fp4-quantizer-factory", "use --fp8-format"),
        refused(
            "--fp8-param-gather --fp4-param-gather --reuse-grad-buf-for-mxfp8-param-ag --no-stream-ckpt-dequant",
            "weights are kept in the policy's precision, from which the engine takes them over",
        ),
    ),
)

THEMES = (OPTIMIZER, PRECISION)
