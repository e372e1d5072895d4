"""Verdicts on the flags of processes, communication, checkpoints and records."""

from megatron.rl.flags.verdict import Theme, acts, holds, refused

_FSDP = "use --use-distributed-optimizer"
_UNTRIED = "it has not been tried here"
_RECORDS = "metrics.jsonl and TensorBoard hold the numbers of docs/metrics.md, every step"

LAYOUT = Theme(
    "Processes and communication",
    (
        acts(
            "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size "
            "--expert-model-parallel-size"
        ),
        acts("--expert-tensor-parallel-size", "", needs="experts"),
        acts("--sequence-parallel", "always on for experts under tensor parallelism", needs="tp"),
        acts(
            "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
            "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "",
            needs="pp",
        ),
        acts(
            "--microbatch-group-size-per-virtual-pipeline-stage --no-overlap-p2p-communication "
            "--overlap-p2p-communication-warmup-flush",
            "",
            needs="pp vpp",
        ),
        acts("--cp-comm-type --hierarchical-context-parallel-sizes", "", needs="cp te"),
        acts("--use-tp-pp-dp-mapping --distributed-timeout-minutes"),
        acts("--distributed-backend", "gloo on CPUs, nccl on GPUs where it is left out"),
        acts("--local-rank", "torchrun sets it by LOCAL_RANK"),
        acts("--overlap-grad-reduce"),
        acts("--no-align-grad-reduce", "", needs="overlap"),
        acts("--ddp-num-buckets --ddp-bucket-size", "", needs="overlap"),
        acts("--ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective"),
        acts("--ddp-reduce-scatter-with-fp32-accumulation", "", needs="bf16-gradients distributed-optimizer"),
        acts("--ddp-param-name-patterns-for-fp32-local-accumulation", "", needs="bf16-gradients"),
        acts(
            "--nccl-communicator-config-path --use-sharp --sharp-enabled-group --high-priority-stream-groups "
            "--flight-recorder-dump-path --flight-recorder-trace-buffer-size --no-flight-recorder-dump-on-timeout "
            "--flight-recorder-include-stack-trace --no-flight-recorder-include-only-active "
            "--no-flight-recorder-extra-dump-on-exec",
            "",
            needs="gpu",
        ),
        acts("--pipeline-model-parallel-comm-backend", "", needs="gpu pp"),
        refused("--model-parallel-size", "an old name; use --tensor-model-parallel-size"),
        refused(
            "--overlap-param-gather --overlap-param-gather-with-optimizer-step --no-align-param-gather",
            "the engine takes the weights over right after the optimizer step, and cannot wait for the next pass",
        ),
        refused(
            "--tp-comm-overlap --no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag "
            "--no-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --no-tp-comm-split-ag --no-tp-comm-split-rs "
            "--tp-comm-bootstrap-backend --tp-comm-overlap-cfg",
            "the user buffers of Transformer Engine are not set up",
        ),
        refused(
            "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --overlap-dispatch-backward-with-experts-wgrad "
            "--ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream --defer-embedding-wgrad-compute "
            "--wgrad-deferral-limit",
            "the policy's loss is taken inside its output projection, which that schedule does not know",
        ),
        refused(
            "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank",
            "use --rl-use-sequence-packing with --max-tokens-per-gpu",
        ),
        refused(
            "--use-megatron-fsdp --use-torch-fsdp2 --fsdp-manual-registration --data-parallel-sharding-strategy "
            "--outer-dp-sharding-strategy --fsdp-double-buffer --suggested-communication-unit-size "
            "--keep-fp8-transpose-cache --enable-full-sharding-in-hsdp --torch-fsdp2-no-reshard-after-forward "
            "--megatron-fsdp-main-params-dtype --megatron-fsdp-main-grads-dtype --megatron-fsdp-grad-comm-dtype "
            "--megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer "
            "--fsdp-db-use-persist-buf-on-alloc-fail --no-gradient-reduce-div-fusion --create-all-gather-group "
            "--no-strict-fsdp-dtensor-load",
            _FSDP,
        ),
        refused(
            "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards --use-nccl-ub "
            "--disable-symmetric-registration --num-distributed-optimizer-instances",
            _UNTRIED,
        ),
        refused("--use-ring-exchange-p2p", "it needs a torch that was built for it"),
        refused("--disable-gloo-process-groups", "the process groups of the optimizer are asked for with gloo's"),
        refused("--lazy-mpu-init", "process groups are made at the start"),
        refused("--fake-process-group", "the ranks exchange rollouts and gradients"),
        refused(
            "--inprocess-restart --inprocess-max-iterations --inprocess-monitor-thread-interval "
            "--inprocess-monitor-process-interval --inprocess-progress-watchdog-interval "
            "--inprocess-heartbeat-interval --inprocess-soft-timeout --inprocess-hard-timeout "
            "--inprocess-heartbeat-timeout --inprocess-barrier-timeout --inprocess-completion-timeout "
            "--inprocess-last-call-wait --inprocess-termination-grace-time --inprocess-granularity "
            "--inprocess-active-world-size --inprocess-empty-cuda-cache --enable-ft-package --calc-ft-timeouts "
            "--ft-num-warmup-iters",
            "a run that ended goes on by --load; torchrun --max-restarts starts it again",
        ),
        refused(
            "--fault-injector-ranks --fault-injector-num-ranks --fault-injector-fault-types "
            "--fault-injector-fault-probabilities --fault-injector-fault-delay "
            "--fault-injector-delay-start-iteration --fault-injector-mtti-seconds --fault-injector-offset-seconds "
            "--fault-injector-seed",
            "no faults are injected",
        ),
    ),
)

CHECKPOINTS = Theme(
    "Checkpoints",
    (
        acts("--run-dir", "a folder of one run; an earlier run's files in it are set aside"),
        acts("--save", "in the run folder where it is left out; a folder that holds another run's is refused"),
        acts("--save-interval", "optimizer steps; there is a checkpoint after the last in any case"),
        acts("--save-retain-interval", "checkpoints in between are deleted when the next one is whole"),
        acts("--load", "weights, optimizer, counters and prompt order go on"),
        acts("--ckpt-step", "", needs="load"),
        acts("--finetune", "a new run from the weights in --load", needs="load"),
        acts("--no-load-optim", "the optimizer and its schedules start anew; counters go on", needs="counters"),
        acts("--no-load-rng", "", needs="counters"),
        acts("--no-save-optim --no-save-rng"),
        acts("--use-checkpoint-opt-param-scheduler", "schedules as the checkpoint has them", needs="optimizer-state"),
        acts("--no-ckpt-fully-parallel-save --verify-integrity"),
        acts("--distrib-optim-fully-reshardable-mem-efficient", "", needs="distributed-optimizer"),
        acts("--ckpt-fully-parallel-load --no-ckpt-load-validate-sharding-integrity", "", needs="load"),
        acts(
            "--dist-ckpt-strictness",
            "a checkpoint must have all that the model has",
            needs="load",
            values=("assume_ok_unexpected", "log_unexpected", "raise_unexpected", "raise_all"),
        ),
        holds("--override-opt-param-scheduler", "schedules are those of the command line"),
        holds("--exit-on-missing-checkpoint", "a --load without a checkpoint ends the run"),
        holds("--ckpt-assume-constant-structure", "one model is saved each time"),
        holds("--dist-ckpt-optim-fully-reshardable", "a run may go on in another layout"),
        holds("--use-dist-ckpt --ckpt-fully-parallel-save", "an old name of what is so"),
        refused("--ckpt-format", "checkpoints are torch_dist, which another layout can load", values=("torch_dist",)),
        refused("--dist-ckpt-format", "an old name; checkpoints are torch_dist"),
        refused("--ckpt-fully-parallel-load-exchange-algo", "Megatron's others are not stable", values=("broadcast",)),
        refused(
            "--ckpt-fully-parallel-save-process-group --ckpt-fully-parallel-load-process-group",
            _UNTRIED,
            values=("dp",),
        ),
        refused("--pretrained-checkpoint", "use --load DIR --finetune"),
        refused(
            "--use-checkpoint-args --use-mp-args-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args",
            "the model comes from --hf-model, all else from the command line",
        ),
        refused("--override-ckpt-iteration", "counters and weights go on together; use --ckpt-step"),
        refused("--load-main-params-from-ckpt", "the optimizer's weights are those that are loaded"),
        refused(
            "--async-save --async-strategy --use-persistent-ckpt-worker --async-ckpt-cpu-priority "
            "--async-ckpt-io-priority --async-ckpt-use-cpu-shm",
            "a checkpoint is whole before the run goes on",
        ),
        refused("--dist-ckpt-workers", "a checkpoint is whole before the run goes on", values=(1,)),
        refused(
            "--non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-global-ckpt-dir "
            "--non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --replication --replication-jump "
            "--replication-factor",
            "use --save-interval with --save-retain-interval",
        ),
        refused(
            "--auto-detect-ckpt-format --ckpt-convert-format --ckpt-convert-save "
            "--ckpt-convert-update-legacy-dist-opt-format --dist-ckpt-save-pre-mcore-014",
            "checkpoints of other formats come in through Hugging Face's (--hf-model)",
        ),
        refused(
            "--save-params-interval --save-activations-interval --save-wgrads-interval --save-dgrads-interval",
            "weights are in the checkpoints; activations and gradients are not kept",
        ),
    ),
)

RECORDS = Theme(
    "Records and profiling",
    (
        acts("--tensorboard-dir", "in the run folder where it is left out; one that holds another run's is refused"),
        refused("--log-interval --tensorboard-log-interval", _RECORDS, values=(1,)),
        refused(
            "--log-params-norm --log-throughput --log-progress --timing-log-level --timing-log-option "
            "--tensorboard-queue-size --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard "
            "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --log-memory-interval "
            "--log-device-memory-used --log-num-zeros-in-grad --log-max-attention-logit "
            "--no-barrier-with-level-1-timing --log-world-size-to-tensorboard --log-energy --log-straggler "
            "--straggler-ctrlr-port --straggler-minmax-count --disable-straggler-on-startup",
            _RECORDS,
        ),
        refused("--logging-level", "Megatron's own messages are left out"),
        refused("--config-logger-dir", "the table at the start says what a run is made of"),
        refused(
            "--wandb-project --wandb-exp-name --wandb-save-dir --wandb-entity",
            "numbers go to TensorBoard, which wandb can follow (wandb sync, or sync_tensorboard)",
        ),
        holds("--no-one-logger", "there is no such logger"),
        refused(
            "--one-logger-project --one-logger-run-name --one-logger-async --app-tag-run-name --app-tag-run-version",
            "there is no such logger",
        ),
        refused(
            "--profile --profile-step-start --profile-step-end --use-pytorch-profiler "
            "--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack "
            "--pytorch-profiler-collect-chakra --profile-ranks --record-memory-history --memory-snapshot-path "
            "--record-shapes --nvtx-ranges --run-workload-inspector-server",
            "the time of each phase is in metrics.jsonl (time/*); for more, profile the whole command (nsys, py-spy)",
        ),
    ),
)

THEMES = (LAYOUT, CHECKPOINTS, RECORDS)
