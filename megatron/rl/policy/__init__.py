"""The policy: a Megatron GPTModel, its layers off Transformer Engine, the loss head, and the forward step."""
