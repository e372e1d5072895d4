"""Rollout engines: the contract they share, the embedded one, sharing of work, and the check of mu at start.

Nothing is imported here: ``vllm_plugin`` is loaded in vLLM's environment, which has not what the engines need.
"""
