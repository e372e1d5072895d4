"""Starts, watches and ends the inference servers that a run has for itself."""

from megatron.rl.rollout.servers.process import ServerProcess, start_servers
from megatron.rl.rollout.servers.specs import SERVER_SPECS, ServerSettings, ServerSpec

__all__ = ["SERVER_SPECS", "ServerProcess", "ServerSettings", "ServerSpec", "start_servers"]
