"""The reinforcement-learning stage of Megatron-LM, with DRPO (arXiv 2606.09821) as a native loss."""
